"""--confirm test measures what deploy.json says, once and as it is, next to a plain loop."""

import csv
import json
import random
from itertools import islice, permutations, product

import numpy as np
import pytest
from _cli import figures
from _lookup import tokenizer_of
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

import st_magnitude as stm
from st_magnitude.evaluation import bm25_run
from st_magnitude.evaluation.lexical import TOKENS
from st_magnitude.workbench.judging.choice import DEPLOY
from st_magnitude.workbench.judging.controls import CLASSIFIER
from st_magnitude.workbench.judging.verdict import BEFORE

SHARED = 8  # words of which a query and its document have the same one
TAUGHT = 12  # words that only a training brings together
ASKED, TOLD, FILLERS = (  # without a letter in common
    ["".join(letters) for letters in islice(permutations(alphabet, 5), 0, None, 7)][:30]
    for alphabet in ("abcdef", "uvwxyz", "ijklmn")
)


def save_table(folder, knows):
    """A table of random vectors; one that knows has the same for both words of a pair."""
    words = [*ASKED[:TAUGHT], *TOLD, "the", *FILLERS]
    weights = np.random.default_rng(0).normal(size=(len(words) + 1, 32)) / 10
    weights[0] = 0
    if knows:
        weights[1 : 2 * TAUGHT + 1] *= 20
        weights[TAUGHT + 1 : 2 * TAUGHT + 1] = weights[1 : TAUGHT + 1]
    table = StaticEmbedding(tokenizer_of(words), embedding_weights=weights.astype(np.float32))
    SentenceTransformer(modules=[table], device="cpu").save_pretrained(str(folder))
    return folder


def save_pairs(file, taught, shared):
    """A document for each pair of a taught and a shared word, and twelve queries in each split."""
    rng = random.Random(0)
    rows = []
    for t, s in product(range(taught), range(shared)):
        for split, size in (("train", 20), ("dev", 6), ("test", 6)):
            for _ in range(max(1, size // shared)):
                fillers = " ".join(rng.sample(FILLERS, 3))
                number = 1000 + s
                document = f"the {TOLD[t]} {number} {TOLD[-1 - s % 18]}"
                rows.append([f"{ASKED[t]} {number} {fillers} the", document, split])
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows([["query", "document", "split"], *rows])
    return file


def ndcg_of(how, model, data):
    """Mean nDCG@10 by loops, of one relevant document for each query."""
    if isinstance(how, str) and how:
        how = {"weight": 0.0, "unit": 1.0, "scale": 1.0, "tokens": how}
    how = how or {"weight": 1.0, "unit": 1.0, "scale": 1.0, "tokens": "words"}
    lexical = bm25_run(data, 100, tokenizer=TOKENS[how["tokens"]])
    ids = sorted(data.corpus)
    is_cosine = model.similarity_fn_name == "cosine"
    documents = model.encode([data.corpus[i] for i in ids], normalize_embeddings=is_cosine)
    found = []
    for query, (answer,) in data.relevant.items():
        vector = model.encode(data.queries[query], normalize_embeddings=True)
        dense = dict(zip(ids, (documents @ vector).tolist(), strict=True))
        scores = {
            i: how["weight"] * dense[i] / how["unit"]
            + (1 - how["weight"]) * lexical[query].get(i, 0.0) / how["scale"]
            for i in (ids if how["weight"] else lexical[query])
        }
        best = sorted(scores, key=lambda i: (-round(scores[i], 6), i))[:10]
        found.append(1 / np.log2(2 + best.index(answer)) if answer in best else 0.0)
    return np.mean(found)


@pytest.mark.parametrize(
    ("shape", "given", "name"),
    [
        ((TAUGHT, 1), {}, "the trained model"),
        ((1, 60), {}, "BM25"),
        ((TAUGHT, SHARED), {"loss": "dot", "keep_scoring": True}, "the trained model with BM25"),
        ((TAUGHT, 1), {"max_steps": 1, "also": "also"}, "also"),
    ],
)
def test_what_is_deployed_is_measured_once_on_test(tmp_path, shape, given, name):
    file = save_pairs(tmp_path / "pairs.csv", *shape)
    output = tmp_path / "out"
    options = {"data": file, "model": save_table(tmp_path / "table", False), "output": output}
    options |= given
    if "also" in given:
        options["also"] = save_table(tmp_path / "also", True)
    found = figures("train", confirm="test", keep_anyway=True, **options)
    deployed = json.loads((output / DEPLOY).read_text())
    assert deployed["name"].endswith(name)
    test = stm.load_splits(file)["test"]
    model = stm.load(options.get("also", output))
    before = stm.load(options["model"])
    confirmed = found["test"]
    assert confirmed == json.loads((output / "training.json").read_text())["test"]
    assert "decision" not in json.dumps(confirmed)
    assert (confirmed["split"], confirmed["queries"]) == ("test", len(test.queries))
    first, *others = confirmed["rows"]
    assert first["ndcg"] == pytest.approx(ndcg_of(deployed["how"], model, test), abs=1e-6)
    by_name = {row["name"].replace("BM25 of words", "BM25"): row for row in others}
    named = {deployed["over"], deployed["rival"], BEFORE} - {""}
    are_classes = shape == (TAUGHT, 1)  # with twenty training queries each
    assert by_name.keys() == named | ({CLASSIFIER} if are_classes else set())
    assert by_name[BEFORE]["ndcg"] == pytest.approx(ndcg_of("", before, test), abs=1e-6)
    for row in others:
        assert row["gain"]["mean"] == pytest.approx(first["ndcg"] - row["ndcg"], abs=1e-9)
        assert row["gain"]["low"] < row["gain"]["mean"] < row["gain"]["high"]
    card = (output / "README.md").read_text()
    assert f"| {first['name']} | {first['ndcg']:.4f} | deployed |" in card
    assert f"nDCG@10 on {len(test.queries)} test queries" in card

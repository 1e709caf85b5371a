"""The examples and the demo of the README run as they stand, shortened, and save what loads."""

import json
import os
import re
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from _processes import forked, python
from _tiny import language_model
from conftest import CORPUS, save_splits
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

import st_magnitude as stm
from st_magnitude.workbench.judging.choice import Decision

Image = pytest.importorskip("PIL.Image")  # matplotlib brings it

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("minilm_path")]


def execute(example, folder, *arguments, code=0, start=forked):
    """The output of an example, or its error."""
    script, how = ROOT / "examples" / f"{example}.py", {"PYTHONPATH": str(ROOT)}
    done = start(script, *arguments, code=code, cwd=folder, environment=how)
    return done.stderr if code else done.stdout


def run(example, folder, *arguments):
    """The output of an example, which also draws a picture."""
    said = execute(example, folder, "--output", folder, *arguments)
    with Image.open(folder / f"{example}.png") as picture:
        assert min(picture.size) > 250
    return said


def encodes(model):
    return model.encode(["what barks?", "a dog"]).std() > 0


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_splits(tmp_path_factory.mktemp("data"), "train", "dev", "test")


def ndcg_of(folder, data):
    """nDCG@10 of a saved model of stock modules, by sentence-transformers."""
    model = SentenceTransformer(str(folder))
    scores = InformationRetrievalEvaluator(data.queries, data.corpus, data.relevant)(model)
    return scores[f"{model.similarity_fn_name}_ndcg@10"]


def test_demo(tmp_path):
    """Its five commands run, it ends with the decision of the first, and its server is gone."""
    options = ("--output", "demo", "--size", 40, "--budget", "1s")
    said = execute("demo", tmp_path, *options)
    shown = re.findall(r"^\$ st-magnitude (\S+)", said, re.MULTILINE)
    assert shown == ["train", "search", "compare", "compress", "check-serving"]
    assert "\nSAME\n" in said
    decision = Decision.load(tmp_path / "demo" / "my-retriever")
    assert f"{decision} In demo: docs.csv" in " ".join(said.partition("The decision [")[2].split())
    own = [line for line in said.splitlines() if not re.search(r"serve\.py|YOUR-PAIRS", line)]
    assert max(map(len, own)) <= 80, max(own, key=len)
    with pytest.raises(OSError, match="refused"):
        urlopen(re.search(r"Serving my-retriever at (\S+)", said)[1], b"")
    assert "is not empty" in execute("demo", tmp_path, *options, code=2)


def test_demo_ends_with_the_first_command_that_fails(tmp_path):
    script = "from demo import *; Commands(Path()).run('', 'train', *'--data a --output b'.split())"
    how = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}"}
    done = forked("-c", f"{script}; print('went on')", code=2, cwd=tmp_path, environment=how)
    assert "went on" not in done.stdout


def test_norms(tmp_path):
    """Its models are the models that it measured."""
    said = run("norms", tmp_path, "--steps", 2, "--train-queries", 80, "--test-queries", 60)
    assert "answers kept" in said
    results = json.loads((tmp_path / "results.json").read_text())
    data = stm.load_splits(tmp_path / "data")["test"]
    for name in ("cosine", "qnorm"):
        ndcg = results["models"][name]["matched"]
        assert ndcg_of(tmp_path / name, data) == pytest.approx(ndcg, abs=2e-3)


@pytest.mark.parametrize(
    ("example", "load", "prints"),
    [
        ("magnitude_retriever", stm.load, {"by document exponent": 1, "test_matched_ndcg@10": 1}),
        # bytes, in the tables of three models
        ("small_index", SentenceTransformer, {"temperature 0.03": 1, "1,536": 3}),
        ("isotropy", SentenceTransformer, {"IsoScore": 3}),
    ],
)
def test_training(data, tmp_path, example, load, prints):
    said = run(example, tmp_path, "--steps", 2, "--data", data)
    assert all(said.count(text) >= times for text, times in prints.items())
    assert encodes(load(str(tmp_path / "model")))


def test_index_metrics(minilm, data, tmp_path):
    faiss = pytest.importorskip("faiss")
    stm.prepare(minilm, "qnorm").save_pretrained(str(tmp_path / "model"))
    said = run("index_metrics", tmp_path, "--model", tmp_path / "model", "--data", data)
    lines = [line for line in said.splitlines() if "top 10" in line]
    shares = {line[:20].strip(): float(line[20:].split()[0]) for line in lines}
    assert shares["inner product"] == shares["L2, augmented"] == 1
    assert shares["cosine (wrong)"] < 1
    assert faiss.read_index(str(tmp_path / "documents.faiss")).ntotal == len(CORPUS)


def test_watch_norms(tmp_path):
    """With the data that all examples make when they are given none."""
    said = run("watch_norms", tmp_path, "--steps", 4)
    assert (tmp_path / "runs" / "docstrings" / "train" / "corpus.jsonl").exists()
    assert "cut_init: mean norm" in said
    assert encodes(SentenceTransformer(str(tmp_path / "cut_init")))


def test_raw_text(tmp_path):
    pytest.importorskip("peft")
    for part in language_model():
        part.save_pretrained(tmp_path / "lm")
    (tmp_path / "corpus").mkdir()
    for i in range(4):
        chosen = list(CORPUS.values())[5 * i : 5 * i + 5]
        sentences = [f"{text} The number of this one is {i}." for text in chosen]
        (tmp_path / "corpus" / f"{i}.txt").write_text("\n\n".join(4 * sentences))
    places = ("--lm", tmp_path / "lm", "--corpus", tmp_path / "corpus")
    said = run("raw_text", tmp_path, "--steps", 2, *places)
    assert said.count("of the weight on chunks of the same document") == 2
    assert SentenceTransformer(str(tmp_path / "model")).prompts["query"] == "Query: "


def test_sentence_transformers_own_clip(tmp_path):
    """It has no picture."""
    execute("clip_sentence_transformers", tmp_path, "--steps", 2, "--output", tmp_path / "model")
    assert encodes(SentenceTransformer(str(tmp_path / "model")))


def test_encode_with_ray(minilm, minilm_path, tmp_path):
    """Equal to one process; after a kill, what is missing is encoded, and nothing else."""
    pytest.importorskip("ray")
    pandas = pytest.importorskip("pandas")
    rows = [{"_id": key, "title": "", "text": text} for key, text in CORPUS.items()]
    rows[2]["title"] = "A text."
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    output = tmp_path / "embeddings"
    given = (minilm_path, corpus, output, "--size", 7)
    encode = partial(execute, "encode_with_ray", tmp_path, *given, start=python)
    assert "Encoded 3 of 3 shards" in encode()
    shards = sorted(output.glob("*.parquet"))
    kept = shards[0].stat().st_mtime_ns
    shards[1].rename(shards[1].with_suffix(".tmp"))  # as a kill leaves it
    shards[1].with_suffix(".tmp").write_bytes(b"half")
    assert "Encoded 1 of 3 shards" in encode()
    assert shards[0].stat().st_mtime_ns == kept
    assert sorted(output.iterdir()) == shards
    found = pandas.concat(map(pandas.read_parquet, shards))
    assert found["_id"].tolist() == list(CORPUS)
    expected = minilm.encode_document([f"{row['title']} {row['text']}".strip() for row in rows])
    np.testing.assert_allclose(np.stack(found["embedding"]), expected, atol=1e-5)

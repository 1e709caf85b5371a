"""diagnose: verdicts on planted tasks, one encoding, arguments, and the command."""

import json
import math

import pytest
from _cli import invoke
from _planted import found_in, model_of, planted, quick, table_of, unit
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW

from st_magnitude import Similarity, calibrate_exponent, diagnose, prepare
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.judge import judge


@pytest.mark.parametrize(("seed", "normalize"), [(0, False), (1, True), (3, True)])
def test_planted_relevance_is_found_and_real(seed, normalize):
    found = found_in(seed, "relevance", normalize=normalize)
    advice = found["exponent"]
    assert advice.verdict == "do"
    assert advice.gain.low > 0
    assert min(found.cohens_d, found.adjusted_cohens_d) > 1.5
    assert found.normalizes is normalize
    chosen = found.tried.value
    assert advice.choice == f"stm.prepare(model, stm.Similarity(1, {chosen:.2g}))"
    # on queries, documents and norms that the diagnosis has not seen
    fresh_model, *fresh = planted(seed + 100, "relevance")
    curve = calibrate_exponent(fresh_model, RetrievalData(*fresh), exponents=[chosen])
    of_fresh = curve.per_query[list(curve.exponents).index(chosen)]
    gain = judge(of_fresh - curve.per_query[-1])
    assert gain.low > 0
    assert gain.mean == pytest.approx(advice.gain.mean, abs=0.08)


def test_diagnose_and_calibrate_agree():
    """A tie keeps today's scoring: another exponent is taken only if it is clearly better."""
    model, *task = planted(0, "noise", num_queries=240)
    rows = enumerate(table_of(model).items())
    flat = {text: unit(x) * (1 + 0.02 * i / len(task[1])) for i, (text, x) in rows}
    for exponent in (0.52, 0.0):
        scored = prepare(model_of(flat), Similarity(1.0, exponent))
        curve = calibrate_exponent(scored, RetrievalData(*task))
        found = quick(scored, *task)
        assert curve.best == curve.present == found.exponent.best == pytest.approx(exponent)
        assert found["exponent"].choice.startswith("keep ")


@pytest.mark.parametrize(("seed", "similarity"), [(0, "cosine"), (1, "dot")])
def test_noise_is_called_noise(seed, similarity):
    found = found_in(seed, "noise", num_queries=300, similarity=similarity)
    assert abs(found.cohens_d) < 0.35
    if similarity == "cosine":
        assert found["exponent"].verdict == "no benefit expected"
        assert found["exponent"].choice == "keep cosine"
    else:  # the model is scored with the noise: cosine is the better one, and that is real too
        assert found["exponent"].verdict == "do"
        assert found.tried.value >= 0.8


@pytest.mark.parametrize("seed", range(3))
def test_few_queries_decide_nothing(seed):
    found = found_in(seed, "relevance", num_queries=10)
    assert found["exponent"].verdict == "not enough data"


def test_each_model_encodes_every_text_once():
    model, *task = planted(0, "noise", num_queries=30)
    quick(model, *task)
    assert model[0].encoded == 30 + 150
    assert len(model) == 1


def test_a_model_without_reachable_norms():
    model, *task = planted(0, "relevance")
    found = quick(model_of({text: unit(x) for text, x in table_of(model).items()}), *task)
    assert found.has_magnitude is False
    assert found["exponent"].verdict == "not enough data"
    assert found["exponent"].gain is None
    assert math.isnan(found.documents.length_spearman)
    assert "All norms are 1" in found.measurements[0].note


def test_inner_products_of_prefixes_of_unit_vectors_are_not_called_cosine():
    model, *task = planted(0, "relevance", num_queries=30, similarity="dot", normalize=True)
    model.truncate_dim = 4
    with pytest.raises(ValueError, match="truncate_dim=4 after Normalize"):
        quick(model, *task)
    assert quick(model, *task, similarity="cosine").similarity == "cosine"


def test_answers_to_other_queries_are_not_called_never_relevant():
    model, queries, corpus, relevant = planted(0, "relevance")
    some = {query: queries[query] for query in list(queries)[:80]}
    judged = {query: relevant[query] for query in some}
    others = {document for query in relevant.keys() - some for document in relevant[query]}
    alone, told = (
        quick(model, some, corpus, judged, also_relevant=given)
        for given in ((), {*others, "unknown"})
    )
    assert told.is_relevant.tolist() == found_in(0, "relevance").is_relevant.tolist()
    assert told.cohens_d == found_in(0, "relevance").cohens_d
    # large norms of answers are not boilerplate's
    assert told.cohens_d > alone.cohens_d + 0.5
    assert (alone.is_relevant.mean(), told.is_relevant.mean()) == (0.1, 0.2)
    assert told["exponent"] == alone["exponent"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_gain": 2}, "min_gain and tolerance must lie between 0 and 1"),
        ({"tolerance": 5}, "min_gain and tolerance must lie between 0 and 1"),
        ({"similarity": "l2"}, "No similarity is called 'l2'"),
        ({"data": {"q0": {"d0-0"}}}, "at least two queries with a relevant document"),
    ],
)
def test_bad_input_is_refused_before_encoding(options, message):
    model, queries, corpus, relevant = planted(0, "noise", num_queries=30)
    data = RetrievalData(queries, corpus, options.pop("data", relevant))
    with pytest.raises(ValueError, match=message):
        diagnose(model, data, **options)
    assert model[0].encoded == 0


def test_command(data_folder, static_path, tmp_path):
    with (data_folder / "qrels" / "train.tsv").open("a") as file:
        file.write("train-q1\td20\t1\n")
    target = tmp_path / "new" / "out"
    options = {"data": data_folder, "seed": 3}
    options |= {"report": tmp_path / "report.html"}
    result = invoke("diagnose", static_path, **options, output=target, verbose=True)
    assert result.exit_code == 0, result.output
    assert "dev: 8 queries, 20 documents" in result.stdout
    # one of them to a training query
    assert "20 documents (13 answer a query)" in " ".join(result.stdout.split())
    assert result.stdout.index("\n[") < result.stdout.index("IsoScore")
    assert "IsoScore" not in invoke("diagnose", static_path, **options).stdout
    assert "| IsoScore |" in (target / "diagnosis.md").read_text()
    saved = json.loads((target / "diagnosis.json").read_text())
    assert len(saved["documents"]["values"]) == 20
    assert "Document exponent" in (tmp_path / "report.html").read_text()
    assert (saved["seed"], saved["min_gain"]) == (3, 0.02)


WORDS = ["card", "loan", "fee", "rate", "pin", "cash", "visa", "tax"]


def test_it_recommends_the_storage_of_compress_in_words_of_the_file(tmp_path):
    """A file of texts with their categories: 8 dimensions, in bits as good as in float32."""
    rows = [f"my {word} number {i},{word}" for i in range(200) for word in WORDS]
    (tmp_path / "rows.csv").write_text("\n".join(["text,category", *rows]))
    model = SentenceTransformer(modules=[BoW(WORDS)], device="cpu")
    model.save_pretrained(str(tmp_path / "bow"))
    said = {}
    for name in ("compress", "diagnose"):
        done = invoke(name, tmp_path / "bow", data=tmp_path / "rows.csv")
        assert done.exit_code == 0, done.output
        said[name] = " ".join(done.output.split())
    sentence = "Store 8 dimensions in binary, 1 byte a document: it costs 0.0 points of nDCG@10"
    for text in said.values():
        assert sentence in text
        assert "allowed are 5.0 (5 %)." in text
    assert "-> 8 dimensions in binary" in said["diagnose"]
    assert not [x for x in ("qrels", "judge more", "relevant to", "log p") if x in said["diagnose"]]

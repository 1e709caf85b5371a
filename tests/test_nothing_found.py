"""A summary whose reference is 0 or nan says so, and recommends nothing: of every `Result`."""

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW

import st_magnitude as stm
from st_magnitude.comparison.config import Candidate
from st_magnitude.comparison.result import CompareResult, Entry, OnTest
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.diagnosis.findings import Diagnosis
from st_magnitude.evaluation import CompressionEvaluator
from st_magnitude.evaluation.abstention import Abstention
from st_magnitude.evaluation.calibration import ExponentCurve, PriorCurve
from st_magnitude.evaluation.compression import table
from st_magnitude.evaluation.judge import nothing_found
from st_magnitude.finetune.baseline import Baseline
from st_magnitude.finetune.settings import TrainConfig
from st_magnitude.finetune.verdict import Verdict
from st_magnitude.result import Result
from st_magnitude.serving.check import ServingCheck

NOTHING = "so nothing can be recommended: check the judgments"
NUMBER = 60
# None of these compares figures of two searches.
OTHERS = {Abstention, ServingCheck}


@pytest.fixture(scope="module", params=["nothing", "something"])
def searched(request):
    """A model and data whose answers share no word with the queries, or one word and the rest."""
    words = [f"word{i}" for i in range(8)]
    model = SentenceTransformer(modules=[BoW(words)], similarity_fn_name="dot", device="cpu")
    corpus = {f"d{i}": " ".join([words[i % 8]] * (1 + i // 8)) for i in range(96)}
    corpus |= {f"z{i}": "an answer" for i in range(NUMBER)}
    queries = {f"q{i}": words[i % 8] for i in range(NUMBER)}
    is_empty = request.param == "nothing"
    relevant = {f"q{i}": {f"z{i}" if is_empty else f"d{88 + i % 8}"} for i in range(NUMBER)}
    return model, RetrievalData(queries, corpus, relevant), is_empty


def verdict(model, data):
    return Baseline(model, data, data, (), TrainConfig()).compare()[0]


def comparison(model, data):
    """Of a loss that is saved as it was."""
    found = verdict(model, data)
    entry = Entry(Candidate("cosine", 0.1, 0.03), [(9, found.pretrained)], 1.0, 1.0)
    gains = {entry.name: found.saved.gain}
    ndcg = {"pretrained": found.pretrained, entry.name: found.saved.ndcg}
    test = OnTest(found.queries, len(data.corpus), ndcg, gains, {}, None)
    return CompareResult("bow", [entry], test, found.pretrained, found.queries, 0, (), ())


def prior(data):
    """A prior of what no answer is."""
    return {key: -1.0 if key.startswith("d") else -9.0 for key in data.corpus}


RESULTS = {
    Diagnosis: lambda model, data: stm.diagnose(model, data, log_prior=prior(data)),
    ExponentCurve: stm.calibrate_exponent,
    PriorCurve: lambda model, data: stm.calibrate_prior(model, data, prior(data)),
    CompareResult: comparison,
    Verdict: verdict,
}
ADVICE = [
    "Within one point of all dimensions",
    "is kept",
    "[do]",
    "[no benefit expected]",
    "is tied with",
    "With the prior, on queries",
    "Use cosine",
    "Train on more pairs",
    " best ",
    "highest ",
]


@pytest.mark.parametrize("kind", RESULTS, ids=lambda kind: kind.__name__)
def test_a_result_recommends_nothing_where_nothing_was_found(searched, kind):
    model, data, is_empty = searched
    found = RESULTS[kind](model, data)
    assert type(found) is kind
    advice = found.advice() if kind is Verdict else ""
    said = " ".join(f"{found} {advice}".split())
    assert (NOTHING in said) == is_empty
    assert "nan" not in said
    if is_empty:
        assert not [part for part in ADVICE if part in said]
        assert kind is not Diagnosis or said.count(NOTHING) == len(found.recommendations) == 3


def test_every_result_is_walked():
    for file in Path(stm.__file__).parent.rglob("*.py"):
        if re.search(r"\(Result\):", file.read_text(encoding="utf-8")):
            place = file.relative_to(Path(stm.__file__).parent.parent).with_suffix("")
            import_module(".".join(place.parts))
    kinds = {kind for kind in subclasses(Result) if kind.__module__.startswith("st_magnitude")}
    assert {kind for kind in kinds - OTHERS if kind.tables is not Result.tables} == RESULTS.keys()


def subclasses(kind):
    for child in kind.__subclasses__():
        yield from (child, *subclasses(child))


def test_a_table_of_formats_recommends_nothing_where_nothing_was_found(searched):
    model, data, is_empty = searched
    evaluator = CompressionEvaluator(data.queries, data.corpus, data.relevant)
    evaluator(model)
    said = str(table(evaluator.cells)).replace("\n", " ")
    assert (NOTHING in said) == is_empty
    assert ("Within one point of all dimensions" in said) != is_empty
    broken = [replace(cell, ndcg=float("nan")) for cell in evaluator.cells]
    assert NOTHING in str(table(broken)).replace("\n", " ")


def test_storage_that_finds_by_chance_what_the_whole_embedding_misses_is_not_recommended():
    """In one dimension all documents are equal, and the first by its id answers."""
    model = SentenceTransformer(modules=[BoW(["tea", "wax"])], device="cpu")
    corpus = {"a": "tea wax wax"} | {f"b{i:02}": "tea tea" for i in range(20)}
    queries = {f"q{i}": "tea" for i in range(80)}
    data = RetrievalData(queries, corpus, {key: {"a"} for key in queries})
    found = stm.diagnose(model, data)["storage"]
    assert found.gain[1] > 0
    assert found.verdict == "not enough data"
    assert NOTHING in found.reason
    assert found.choice == "keep all 2 dimensions in float32"


def test_one_search_that_finds_something_is_enough():
    assert nothing_found(0.0, float("nan"))
    assert nothing_found()
    assert not nothing_found(0.0, float("nan"), 1e-9)

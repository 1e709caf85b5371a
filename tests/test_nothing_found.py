"""A summary whose reference is 0 or nan says so, and recommends nothing: of every `Result`."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from _lookup import bag

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import CompressionEvaluator
from st_magnitude.evaluation.compression import summary
from st_magnitude.workbench.comparison.config import Candidate
from st_magnitude.workbench.comparison.result import CompareResult, Entry
from st_magnitude.workbench.judging.contestants import search
from st_magnitude.workbench.judging.exam import Exam
from st_magnitude.workbench.judging.verdict import AFTER, BEFORE, verdict_of

NOTHING = "so nothing can be recommended: check the judgments"
WORDS = [f"word{i}" for i in range(8)]
MODEL = bag(WORDS)


# For each word twelve documents of different norms, and one answer, which has none of the words.
CORPUS = {f"d{i}": " ".join([WORDS[i % 8]] * (1 + i // 8)) for i in range(96)} | {"z": "answer"}
QUERIES = {f"q{i}": WORDS[i % 8] for i in range(60)}
DATA = RetrievalData(QUERIES, CORPUS, {query: {"z"} for query in QUERIES})


def verdict():
    exam = Exam(DATA, DATA)
    after = replace(search(AFTER, MODEL, exam), base=BEFORE)
    return verdict_of(exam, [search(BEFORE, MODEL, exam), after])


def comparison():
    entry = Entry(Candidate("cosine", 0.1, 0.03), [(9, 0.0)], 1.0, 1.0)
    return CompareResult("bow", [entry], verdict(), None, 0.0, 60, 0, (), ())


def compression():
    evaluator = CompressionEvaluator(DATA.queries, DATA.corpus, DATA.relevant)
    evaluator(MODEL)
    return evaluator.cells


SUMMARIES = {
    "ExponentCurve": lambda: stm.calibrate_exponent(MODEL, DATA),
    "CompareResult": comparison,
    "Verdict": verdict,
    "a table of formats": lambda: summary(compression()),
    "of nan": lambda: summary([replace(cell, ndcg=float("nan")) for cell in compression()]),
}
ADVICE = r"[Cc]osts |tied with|Train with|Deploy|"
ADVICE += r"Train on more| best |highest |nan"


@pytest.mark.parametrize("name", SUMMARIES)
def test_nothing_is_recommended_where_nothing_was_found(name):
    said = " ".join(str(SUMMARIES[name]()).split())
    assert said.count(NOTHING) == 1
    assert re.findall(ADVICE, said) == []


def test_every_result_is_walked():
    found = set()
    for file in Path(stm.__file__).parent.rglob("*.py"):
        found |= {*re.findall(r"^class (\w+)\((?:.*, )?Result\)", file.read_text(), re.MULTILINE)}
    # which recommend nothing by a comparison of two searches
    others = {"Confirmation", "ServingCheck"}
    assert found - others == {name for name in SUMMARIES if name.isalpha()}


def test_storage_that_finds_by_chance_what_the_whole_embedding_misses_is_not_recommended():
    """In one dimension all documents are equal, and the first by its id answers."""
    model = bag(["tea", "wax"], similarity="cosine")
    corpus = {"a": "tea wax wax"} | {f"b{i:02}": "tea tea" for i in range(20)}
    queries = {f"q{i}": "tea" for i in range(80)}
    evaluator = CompressionEvaluator(queries, corpus, {q: {"a"} for q in queries})
    evaluator(model)
    assert max(cell.change.low for cell in evaluator.cells) > 0
    assert NOTHING in summary(evaluator.cells).note

"""TREC run files, ours and others', and what ir-measures makes of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from st_magnitude.data.beir import DataError
from st_magnitude.evaluation import read_run, write_run

RUN = {"q2": {"d1": 0.25, "d10": 0.1 + 0.2, "d2": 0.25}, "q1": {"d3": -1e-30}}


def test_the_format(tmp_path) -> None:
    write_run(RUN, tmp_path / "run", tag="mine")
    lines = (tmp_path / "run").read_text().splitlines()
    assert lines[0] == "q2 Q0 d10 1 0.30000000000000004 mine"
    assert [line.split()[2:4] for line in lines] == [["d10", "1"], ["d1", "2"], ["d2", "3"], ["d3", "1"]]


ids = st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1, max_size=5)
scores = st.floats(allow_nan=False)


@given(st.dictionaries(ids, st.dictionaries(ids, scores, min_size=1, max_size=6), max_size=4))
def test_there_and_back_is_exact(tmp_path_factory, run) -> None:
    path = tmp_path_factory.mktemp("runs") / "run"
    write_run(run, path)
    assert read_run(path) == run


def test_runs_of_others(tmp_path) -> None:
    (tmp_path / "run").write_text("q1\tQ0\td1\t0\t1.5e0\tlucene\n\nq1 0 d2 7 3 lucene\n")
    found = read_run(tmp_path / "run")
    assert found == {"q1": {"d2": 3.0, "d1": 1.5}}
    assert list(found["q1"]) == ["d2", "d1"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("q1 Q0 d1 1 0.5 x\nq1 d2 0.4\n", r"run:2: expected 'query Q0 document rank score tag', got 'q1 d2 0.4'"),
        ("q1 Q0 d1 1 high x\n", r"run:1: expected"),
        ("q1 Q0 d1 1 nan x\n", r"run:1: the score is not a number"),
        ("q1 Q0 d1 1 0.5 x\nq1 Q0 d1 2 0.4 x\n", r"run:2: document 'd1' occurs twice"),
    ],
)
def test_bad_files_name_the_line(tmp_path, text: str, says: str) -> None:
    (tmp_path / "run").write_text(text)
    with pytest.raises(DataError, match=says):
        read_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("run", "tag", "says"),
    [
        ({"a query": {"d": 1.0}}, "x", "query id 'a query'"),
        ({"q": {"": 1.0}}, "x", "document id ''"),
        ({"q": {"d\n": 1.0}}, "x", "document id"),
        ({"q": {"d": math.nan}}, "x", "not a number"),
        ({}, "two words", "one word, got 'two words'"),
    ],
)
def test_what_the_format_cannot_hold(tmp_path, run: dict, tag: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        write_run(run, tmp_path / "run", tag)
    assert not (tmp_path / "run").exists()


def test_ir_measures_reads_them(tmp_path) -> None:
    ir_measures = pytest.importorskip("ir_measures")
    write_run({"q": {"d1": 0.9, "d2": 0.8, "d3": 0.7}}, tmp_path / "run")
    (tmp_path / "qrels").write_text("q 0 d2 1\n")
    measures = [ir_measures.nDCG @ 10, ir_measures.R @ 1]
    found = ir_measures.calc_aggregate(
        measures, ir_measures.read_trec_qrels(str(tmp_path / "qrels")), ir_measures.read_trec_run(str(tmp_path / "run"))
    )
    assert found[measures[0]] == pytest.approx(1 / math.log2(3))
    assert found[measures[1]] == 0

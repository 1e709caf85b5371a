"""The magnitude study: its data builders, measurements and statistics on made-up data; no network, no Debian."""

from __future__ import annotations

import csv
import doctest
import gzip
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    """benchmarks/ is no package: its scripts import one another from their own folder."""
    sys.path.append(str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


search_tasks, tables, magnitude = (load(name) for name in ("search_tasks", "magnitude_tables", "magnitude"))


def test_examples() -> None:
    result = doctest.testmod(search_tasks)
    assert result.attempted > 4
    assert not result.failed


# --- data -------------------------------------------------------------------------------------------------------------

PAGE = r"""'\" t
.\" a comment
.TH seals 7
.SH NAME
seals, seal_count \- count the seals \(em quickly
.SH SYNOPSIS
.nf
int seal_count(void);
.fi
.SH DESCRIPTION
.SS "An aside"
The
.BR seal_count ()
function \fIreally\fP counts;
see
.BR walrus (7),
.I "all of it"
.EX
code = here;
.EE
.TP
.B \-\-big
\&.only big ones
.SH BUGS
many
"""


def test_man_page() -> None:
    title, text = search_tasks.man_page(PAGE)
    assert title == "count the seals - quickly"
    assert text == "The seal_count() function really counts; see walrus(7), all of it --big .only big ones"
    assert search_tasks.man_page(PAGE, max_words=2)[1] == "The seal_count()"


def test_a_link_to_another_page_is_no_page() -> None:
    assert search_tasks.man_page(".so man7/seals.7\n") is None
    assert search_tasks.man_page(".SH NAME\nseals \\- things\n") is None


def test_man_pages(tmp_path: Path) -> None:
    folder = tmp_path / "usr/share/man/man7"
    folder.mkdir(parents=True)
    for i, what in enumerate(("ice", "snow", "sleet", "hail")):
        text = f".SH NAME\n{what} \\- about {what}y things {i}\n.SH DESCRIPTION\n" + f"word{i} " * 9
        (folder / f"{what}.7.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "short.7.gz").write_bytes(gzip.compress(b".SH NAME\nx \\- a b\n.SH DESCRIPTION\ntoo short\n"))
    task = search_tasks.man_pages([tmp_path], num_queries=3, corpus_size=4)
    assert len(task.queries) == 3
    assert set(task.corpus) == {"ice.7", "snow.7", "sleet.7", "hail.7"}
    for query, text in task.queries.items():
        assert task.relevant[query] == {f"{text.split()[1].removesuffix('y')}.7"}


def test_shrink_keeps_what_is_relevant() -> None:
    corpus = {f"d{i}": f"text {i}" for i in range(50)}
    relevant = {f"q{i}": {f"d{i}", f"d{i + 1}"} for i in range(20)} | {
        "many": {f"d{i}" for i in range(10)},
        "none": set(),
    }
    negatives = {"q0": {"d40", "d41"}}
    task = RetrievalData({q: q for q in relevant}, corpus, relevant, negatives)
    small = search_tasks.shrink(task, 5, 24, seed=1, most=2)
    assert len(small.queries) == 5
    assert len(small.corpus) == 24
    assert "many" not in small.queries
    assert "none" not in small.queries
    assert small.relevant == {q: relevant[q] for q in small.queries}
    assert small.queries.keys() == search_tasks.shrink(task, 5, 24, seed=1, most=2).queries.keys()
    assert small.queries.keys() != search_tasks.shrink(task, 5, 24, seed=2, most=2).queries.keys()
    assert len(search_tasks.shrink(task, 20, 12, seed=1, most=2).queries) < 6  # relevant ones fill half at most


def test_hubs(tmp_path: Path) -> None:
    """Synset 1 is above 11 to 14, 2 above 1: not a distractor; 3 and 4 are others; 15 has two hypernyms."""

    def line(number: int, lemma: str, gloss: str, *parents: int) -> str:
        pointers = "".join(f" @ {parent:08d} n 0000" for parent in parents)
        return f"{number:08d} 05 n 01 {lemma} 0 {len(parents):03d}{pointers} | {gloss}"

    lines = [
        "  1 licence",
        line(1, "seal", "a swimmer with flippers", 2),
        line(2, "beast", "a thing that lives", 3),
        line(3, "stone", "a hard thing indeed"),
        line(4, "bread", "a food of flour"),
        *(line(i, f"kind_{i}", "some special sort of it", 1) for i in range(11, 15)),
        line(15, "mixture", "some odd sort of it", 1, 4),
    ]
    folder = tmp_path / "usr/share/wordnet"
    folder.mkdir(parents=True)
    (folder / "data.noun").write_text("\n".join(lines) + "\n")
    held_out = {f"{i:08d}-n" for i in (1, 2, 4)}
    task = search_tasks.hubs(tmp_path, held_out, num_queries=10, corpus_size=5, per_hub=(4, 4))
    assert sorted(task.queries.values()) == [f"kind {i}" for i in range(11, 15)]
    assert set(task.corpus) == {"00000001-n", "00000004-n"}
    assert all(answers == {"00000001-n"} for answers in task.relevant.values())
    assert task.corpus["00000001-n"] == "a swimmer with flippers"


# --- measuring --------------------------------------------------------------------------------------------------------

TASK = RetrievalData(
    {"q1": "bees", "q2": "wax"},
    {"d1": "bees", "d2": "bees honey", "d3": "wax wax wax", "d4": "wax honey", "d5": "honey honey"},
    {"q1": {"d2"}, "q2": {"d3"}},
)


@pytest.fixture
def bow() -> SentenceTransformer:
    return SentenceTransformer(modules=[BoW(["bees", "honey", "wax"])], similarity_fn_name="dot", device="cpu")


def test_read_ranks_at_every_exponent(bow: SentenceTransformer) -> None:
    found = magnitude.read(bow, {"task": TASK}, (0.0, 1.0))["task"]
    evaluator = stm.MagnitudeEvaluator(TASK.queries, TASK.corpus, TASK.relevant, write_csv=False)
    metrics = evaluator(bow)
    for i, name in enumerate(("dot", "cosine")):
        for metric in ("ndcg@10", "mrr@10", "recall@100"):
            assert found[metric][i] == pytest.approx(metrics[f"{name}_{metric}"]), (name, metric)
        assert np.mean(found["per query"][i]) == pytest.approx(found["ndcg@10"][i], abs=1e-5)
    assert found["d"]["corpus"] == pytest.approx(metrics["cohens_d"])
    assert found["document cv"] == pytest.approx(metrics["document_norm_cv"])


def encoded(norms: list[float], judged: list[list[int]]) -> EncodedTask:
    documents = torch.tensor(norms)[:, None] * torch.tensor([[1.0, 0.0]])
    return EncodedTask(torch.ones(len(judged), 2), documents, [np.flatnonzero(row).tolist() for row in judged])


def test_separations_by_pairing() -> None:
    task = encoded([4.0, 5.0, 1.0, 2.0, 3.0], [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    d = magnitude.separations(task, np.arange(1.0, 6.0))
    assert d["corpus"] == pytest.approx(stm.geometry.cohens_d([4, 5], [1, 2, 3]))
    assert d["pairs"] == pytest.approx(stm.geometry.cohens_d([4, 5, 4], [1, 2, 3, 5, 1, 2, 3]))
    assert d["corpus, length out"] == pytest.approx(
        stm.geometry.adjusted_cohens_d([4, 5, 1, 2, 3], np.log([1, 2, 3, 4, 5]), [1, 1, 0, 0, 0])
    )


def test_separations_that_are_not_defined() -> None:
    d = magnitude.separations(encoded([4.0, 5.0, 3.0], [[1, 0, 0], [0, 1, 0], [0, 0, 1]]), np.arange(1.0, 4.0))
    assert d["corpus"] is None  # all are relevant
    assert d["pairs"] is None  # every one to one query
    assert d["hard"] is not None


def test_mrr_of_a_query_without_hits() -> None:
    found = magnitude.ranked(encoded([1.0] * 12, [[0] * 11 + [1]]), 0.0)
    assert found["mrr@10"].tolist() == [0.0]
    assert found["recall@100"].tolist() == [1.0]


# --- what is stored ---------------------------------------------------------------------------------------------------


def test_plan() -> None:
    cells = magnitude.plan(["static", "random", "decoder"], quick=False)
    assert len(cells) == len(set(cells)) == (1 + 30) + (3 + 30) + (1 + 10)
    assert ("static", "none", "pretrained", 1) not in cells
    assert ("random", "none", "pretrained", 1) in cells  # another initialisation
    assert len(magnitude.plan(["MiniLM"], quick=True)) == 11


def test_a_cell_of_other_settings_is_stale(tmp_path: Path) -> None:
    base, path = magnitude.BASES["static"], tmp_path / "cell.json"
    assert magnitude.stored(path, base) is None
    magnitude.store(path, {"settings": magnitude.settings_of(base)})
    assert magnitude.stored(path, base) is not None
    assert magnitude.stored(path, magnitude.brief(base)) is None
    assert [file.name for file in tmp_path.iterdir()] == ["cell.json"]


def cell(loss: str, seed: int, dot: list[float], cosine: list[float], matched: float) -> dict[str, Any]:
    task = {
        "exponents": [0.0, 0.25, 0.5, 0.75, 1.0],
        "per query": [dot] * 4 + [cosine],
        **{
            metric: [float(np.mean(dot))] * 4 + [float(np.mean(cosine))]
            for metric in ("ndcg@10", "recall@100", "mrr@10")
        },
        "d": {
            "corpus": 0.5 + 0.1 * seed,
            "corpus, length out": 0.4,
            "hard": 0.2,
            "hard, length out": 0.1,
            "pairs": None,
        },
        **{"query cv": 0.2, "document cv": 0.1, "query norm": 2.0, "document norm": 3.0, "length spearman": -0.5},
    }
    return {
        "seed": seed,
        "matched": matched,
        "chosen": {"wordnet": 1.0, "docstrings": 0.5},
        "tasks": {"wordnet": task, "foldoc": task, "docstrings": task, "docstrings, no boilerplate": task},
        "clustering": {"v-measure, directions": 0.4, "v-measure, raw": 0.3},
        "gaps": [] if loss == "pretrained" else [{"step": s, "dot": 0.5, "cosine": 0.4} for s in range(5)],
        "gammas": [[0.5, 0.5], [0.5, 0.6]] if loss == "learnable" else [],
        "seconds": {"training": 2.0, "evaluation": 1.0},
    }


@pytest.fixture
def cells() -> Any:
    """Dot: .8 by dot and .6 by cosine on every query; Cosine: .5 by cosine. The other losses are missing."""
    return {
        ("static", "none", "pretrained"): [cell("pretrained", 0, [0.3] * 4, [0.4] * 4, 1.0)],
        ("static", "wordnet", "cosine"): [cell("cosine", s, [0.1] * 4, [0.5] * 4, 1.0) for s in (0, 1)],
        ("static", "wordnet", "dot"): [cell("dot", s, [0.8] * 4, [0.6] * 4, 0.0) for s in (0, 1, 2)],
    }


# --- statistics -------------------------------------------------------------------------------------------------------


def test_gain_pairs_seeds_and_read_outs(cells: Any) -> None:
    matched = tables.gain(cells, "static", "wordnet", "dot", ["wordnet"])
    assert (matched.mean, matched.low, matched.high) == pytest.approx((0.3, 0.3, 0.3))
    by_cosine = tables.gain(cells, "static", "wordnet", "dot", ["wordnet", "foldoc"], "chosen")
    assert by_cosine.mean == pytest.approx(0.1)
    assert tables.gain(cells, "static", "wordnet", "qnorm", ["wordnet"]) is None


def test_outside_leaves_out_the_domain_and_the_control(cells: Any) -> None:
    assert tables.outside(cells["static", "wordnet", "dot"][0], "wordnet") == ["foldoc", "docstrings"]


def test_paired_takes_the_wider_interval() -> None:
    rng = np.random.default_rng(0)
    steady = np.tile(rng.normal(0.1, 0.5, 200), (3, 1))  # seeds agree, queries differ
    narrow = tables.paired([steady])
    assert 0.05 < narrow.high - narrow.low < 0.2
    shifting = np.array([[-0.3], [0.1], [0.5]]) + np.zeros((3, 200))  # queries agree, seeds differ
    wide = tables.paired([shifting])
    assert wide.mean == pytest.approx(0.1)
    assert wide.high - wide.low > 1.5
    assert wide.verdict(1) == "open"
    assert wide.p == pytest.approx(0.7, abs=0.1)


def test_paired_weighs_tasks_alike() -> None:
    found = tables.paired([np.full((2, 10), 0.2), np.full((2, 1000), 0.4)])
    assert found.mean == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("low", "high", "sign", "verdict"),
    [(0.1, 0.3, 1, "agrees"), (0.1, 0.3, -1, "disagrees"), (-0.1, 0.5, 1, "open"), (-0.3, -0.1, -2.5, "agrees")],
)
def test_verdict(low: float, high: float, sign: float, verdict: str) -> None:
    assert tables.Estimate((low + high) / 2, low, high).verdict(sign) == verdict


def test_an_unknown_interval_is_open() -> None:
    assert tables.over([0.3]).verdict(1) == "open"


def test_scored_pairs_are_compared_by_seed() -> None:
    runs = {"cosine auto": [0.8, 0.7], "qnorm 0.01": [0.3, 0.2], "dot auto": [0.8, 0.7]}
    scored = {key: [{"matched_spearman": v} for v in values] for key, values in runs.items()}
    found = {finding.what: finding for finding in tables.other_findings({}, scored)}
    qnorm = found["scored pairs, scale 0.01: QNorm - Cosine, Spearman"]
    assert qnorm.here.mean == pytest.approx(-0.5)
    assert qnorm.verdict == "agrees"
    assert found["scored pairs, scale auto: Dot - Cosine, Spearman"].sign == 0  # the paper's two models differ
    assert "Table 5 | 1 | 0 | 0" in tables.count(found.values())


def test_report_of_a_part(cells: Any, tmp_path: Path) -> None:
    text = tables.report(cells, None, ["static/docstrings/dot/0"])
    assert "| wordnet | 40.0 | 50.0 ± 0.0 | 80.0 ± 0.0 |" in text
    assert (
        "| Table 1, Contriever | static on wordnet: Dot - Cosine, in domain | +0.2 | +30.0 [+30.0, +30.0] | agrees |"
        in text
    )
    assert "static/docstrings/dot/0" in text
    assert "Table 4 (RAG) | not measured" in text
    tables.write_csv(cells, tmp_path / "results.csv")
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    dot = [r for r in rows if r["loss"] == "dot" and r["task"] == "foldoc" and r["metric"] == "ndcg@10"]
    assert [float(r["value"]) for r in dot if r["exponent"] == "0.0"] == pytest.approx([0.8] * 3)
    tables.pictures(cells, tmp_path)
    assert (tmp_path / "collapse.png").stat().st_size > 1000


def test_report_of_nothing() -> None:
    assert "Missing" in tables.report({}, None, ["everything"])


def test_main_prints_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["magnitude.py", "--tables", "--only", "static", "--output", str(tmp_path)])
    magnitude.main()
    assert "31 of the cells" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["magnitude.py", "--only", "statik"])
    with pytest.raises(SystemExit):
        magnitude.main()


def test_run_measures_what_is_missing_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[Any, ...]] = []

    def measure(base: Any, loss: str, rows: str, seed: int, suite: Any, cache: Path) -> dict[str, Any]:
        done.append((rows, loss, seed))
        return cell(loss, seed, [0.1], [0.2], 1.0)

    monkeypatch.setattr(magnitude, "measure", measure)
    monkeypatch.setattr(magnitude, "build_suite", lambda cache: None)
    cells = magnitude.plan(["static"], quick=False)[:3]
    magnitude.run(cells[:2], tmp_path, tmp_path, magnitude.BASES)
    magnitude.run(cells, tmp_path, tmp_path, magnitude.BASES)
    assert done == [x[1:] for x in cells]
    found, missing = magnitude.load_cells(tmp_path, magnitude.plan(["static"], quick=False), magnitude.BASES)
    assert len(found) == 3
    assert len(missing) == 28
    stored = json.loads((tmp_path / "cells" / "static-wordnet-cosine-0.json").read_text())
    assert stored["base"] == "static"

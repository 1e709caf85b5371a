"""The regret of rules, by hand, and that the rule of `train` is `decide`."""

from pathlib import Path

import numpy as np
import pytest
from benchmarks.studies.known import begin
from benchmarks.studies.store import Store, packed

from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.workbench.judging.choice import System, decide

JUDGED = {"BM25": 0.5, "the table": 0.5045, "the trained table": 0.508}
TEST = {"BM25": 0.4, "the table": 0.43, "the trained table": 0.42}
REGRETS = [1.0, 0.0, 3.0, 3.0]  # of the highest mean, half a point, one point, the unbeaten one


def noisy(mean: float) -> np.ndarray:
    """Figures of 40 queries with a mean, which differ too much to show less than a point."""
    return mean + 0.2 * np.random.default_rng(int(1e4 * mean)).permutation(np.repeat([-1, 1], 20))


def test_the_regret_of_every_rule_by_hand() -> None:
    judged, test = ({name: noisy(x) for name, x in of.items()} for of in (JUDGED, TEST))
    found = [begin.regret(rule, judged, test) for rule in begin.RULES.values()]
    assert found == pytest.approx(REGRETS)
    judged["BM25"] = judged["the table"] - 0.3  # is clearly beaten
    assert begin.unbeaten(judged) == "the table"


def test_the_tables_of_hand_made_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "cells.jsonl", begin.Cell)
    monkeypatch.setattr(begin, "CELLS", store)
    seconds = {"encoding": 1.0, "training": 2.0}
    judged, test = ({name: packed(noisy(x)) for name, x in of.items()} for of in (JUDGED, TEST))
    figures = {"judged": judged, "test": test, "seconds": seconds}
    store.add(begin.Cell("XQuAD", 100, "table"), figures)
    store.add(
        begin.Cell("XQuAD", 300, "table", 1),
        figures | {"test": {**test, "BM25": test["the table"]}},
    )
    assert begin.table_begin() == begin.markdown([], [])  # nothing without an encoder
    better = {"the encoder": packed(noisy(0.606)), "the trained encoder": packed(noisy(0.612))}
    better |= {"BM25": test["BM25"], "the trained encoder with BM25": packed(noisy(0.615))}
    encoder = {"judged": better, "test": better, "seconds": seconds | {"training": 200.0}}
    store.add(begin.Cell("XQuAD", 100, "encoder"), encoder)
    rows = [line.split(" | ") for line in begin.table_regret()[2:]]
    assert [row[2] for row in rows[:4]] == [f"{x:.2f}" for x in REGRETS]  # of 100 pairs
    assert [row[4] for row in rows[:2]] == ["1.00", "0.00"]  # of both sizes
    assert [row[2] for row in rows[4:7]] == ["0.00", "0.30", "0.90"]
    assert rows[0][0] == "| BM25, table: 2 runs"


@pytest.mark.parametrize("worth", [0.0, 0.5, 1.0])
def test_the_rule_of_train_is_decide(worth: float) -> None:
    rng = np.random.default_rng(0)
    corpus = {f"d{i}": f"text {i}" for i in range(30)}
    answers = {f"q{i}": {f"d{i}"} for i in range(30)}
    data = RetrievalData({query: query for query in answers}, corpus, answers)
    chosen = set()
    for _ in range(30):
        found = {}
        for name in "abcd":
            run = {query: dict(zip(corpus, rng.permutation(30), strict=True)) for query in answers}
            found[name] = Ranking.of_run(data, run)
        name = begin.within({name: ranking.ndcg for name, ranking in found.items()}, worth)
        systems = [System(name, ranking) for name, ranking in found.items()]
        assert decide(systems, worth=worth).name == name
        chosen.add(name)
    assert len(chosen) == 4

"""The study of the document prior: data and scoring."""

import pytest
import torch
from benchmarks.data import popularity as prior_data
from benchmarks.studies.prior import prior

from st_magnitude.data.retrieval import RetrievalData

LIKED = {"ann": list("1234567"), "bob": list("8123456"), "cid": list("12")}


@pytest.fixture
def films(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prior_data, "liked", lambda: LIKED)
    return prior_data.film_ids()


def test_films_that_are_asked_for_are_not_trained_on(films):
    assert len(films.anchors) == 6
    assert set(zip(films.anchors, films.positives, strict=True)) > {("q1 q2 q3", "4")}
    assert {"q1 q2 q3 q4 q5", "q8 q1 q2"} < set(films.anchors)
    asked = films.dev.relevant | films.test.relevant
    assert {viewer: set(found) for viewer, found in asked.items()} == {"ann": {"7"}, "bob": {"6"}}
    assert films.seen == {"ann": set("123456"), "bob": set("812345")}


def test_log_p_counts_the_pairs(films):
    counts = torch.tensor([films.counts[film] for film in films.corpus])
    expected = (counts + 1) / (counts.sum() + len(films.corpus))
    torch.testing.assert_close(films.log_p(films.corpus).exp(), expected)
    assert films.rows["positive"][:] == [f"d{film}" for film in films.positives]


def test_ranking_with_the_prior():
    corpus = {"a": "", "b": "", "c": ""}
    part = RetrievalData({"q": "?", "r": "!"}, corpus, {"q": {"b"}, "r": {"c"}})
    task = prior_data.Task([], [], corpus, part, part, {"q": {"c"}})
    logits = torch.tensor([[2.0, 1.0, 9.0], [0.0, 0.0, 1.0]])
    plain, weighted = prior.ranked(
        logits, torch.tensor([0.0, 3.0, 0.0]), (0.0, 1.0), part, ["a", "b", "c"], task
    )
    assert plain == pytest.approx(
        [1 / torch.log2(torch.tensor(3.0)).item(), 1]
    )  # c is hidden from the first query
    assert weighted == pytest.approx([1, 1 / torch.log2(torch.tensor(3.0)).item()])

"""The study of the document prior: data and scoring."""

import pytest
import torch
from benchmarks.data import popularity as prior_data
from benchmarks.studies.prior import prior

from st_magnitude.data.retrieval import RetrievalData

TITLES = {str(i): f"Film {i} (199{i}) Drama" for i in range(8)}
LIKED = {"ann": list("0123456"), "bob": list("7012345"), "cid": list("01")}


@pytest.fixture
def films(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prior_data, "liked", lambda: (TITLES, LIKED))
    return prior_data.films()


def test_films_that_are_asked_for_are_not_trained_on(films):
    assert len(films.anchors) == 6
    assert set(zip(films.anchors, films.positives, strict=True)) > {("Film 0, Film 1, Film 2", "3")}
    assert {"Film 0, Film 1, Film 2, Film 3, Film 4", "Film 7, Film 0, Film 1"} < set(films.anchors)
    asked = films.dev.relevant | films.test.relevant
    assert {viewer: set(found) for viewer, found in asked.items()} == {"ann": {"6"}, "bob": {"5"}}
    assert films.seen == {"ann": set("012345"), "bob": set("701234")}


def test_log_p_counts_the_pairs(films):
    counts = torch.tensor([films.counts[film] for film in TITLES])
    torch.testing.assert_close(
        films.log_p(TITLES).exp(), (counts + 1) / (counts.sum() + len(TITLES))
    )
    assert films.rows["positive"][:] == [TITLES[film] for film in films.positives]


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

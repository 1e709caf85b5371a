"""Whether the queries and documents of a task swap roles."""

from __future__ import annotations

import pytest

from st_magnitude import geometry
from st_magnitude.diagnosis.symmetry import task_symmetry

LONG = "a text of quite a few words, number"


@pytest.mark.parametrize(
    ("queries", "corpus", "relevant", "verdict"),
    [
        ({"q": "who?"}, {"d": LONG}, {"q": {"d"}}, "asymmetric"),
        ({"q": "one two three"}, {"d": "four five six"}, {"q": {"d"}}, "unclear"),
        ({"a": "A  b", "b": "c d"}, {"x": "a B", "y": "c d"}, {"a": {"y"}, "b": {"x"}}, "symmetric"),
        # a cites b, b cites c: the same texts, one way
        ({"a": "a 1", "b": "b 1"}, {"a": "a 1", "b": "b 1", "c": "c 1"}, {"a": {"b"}, "b": {"c"}}, "asymmetric"),
        # queries stand in the corpus, and none of their answers is a query
        ({"a": "a 1", "b": "b 1"}, {"a": "a 1", "b": "b 1", "c": "c 1"}, {"a": {"c"}, "b": {"c"}}, "symmetric"),
        ({"a": "a 1", "b": "b 1"}, {"a": "a 1", "b": "b 1", "c": LONG}, {"a": {"c"}, "b": {"c"}}, "unclear"),
    ],
)
def test_symmetry_of_a_task(queries, corpus, relevant, verdict):
    assert task_symmetry(queries, corpus, relevant).verdict == verdict
    assert task_symmetry(queries, corpus, relevant, symmetric=verdict != "symmetric").verdict != verdict


def test_figures_of_symmetry():
    queries = {"a": "a 1", "b": "b 1", "c": "c", "unjudged": "x"}
    corpus = {"a": "a 1", "b": "b 1", "x": "x y z"}
    found = task_symmetry(queries, corpus, {"a": {"b"}, "b": {"a", "b"}, "c": {"a", "x"}})
    assert found.queries_in_corpus == pytest.approx(2 / 3)
    assert found.answers_that_ask == pytest.approx(2 / 3)
    assert found.mutual == 1.0  # (a, b) and (b, a); c is no document, and (b, b) is no exchange
    assert found.own_text_unjudged == pytest.approx(1 / 3)  # a; b is judged relevant to itself
    assert found.length_auc == geometry.auroc([2, 2, 3], [2, 2, 1])

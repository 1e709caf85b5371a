"""Which difference is a cut and which is not, and which rankings are tied: vectors by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from st_magnitude.serving.check import _changed_rankings
from st_magnitude.serving.explain import Side, explain

TOKENS = [3, 5, 8, 20, 30, 40, 64, 64]


@pytest.mark.parametrize(
    ("others", "limit", "name"),
    [
        ([], 64, None),
        ([6, 7], 64, "truncation"),
        ([5, 6, 7], 64, "truncation"),
        ([7], 64, "truncation"),  # of two with as many tokens as the limit, one is longer
        ([6, 7], None, "vectors"),  # of a model that reads whole texts
        ([5], 64, "vectors"),  # longer ones are equal
        ([3, 4, 5, 6, 7], 64, "vectors"),  # 20 tokens are a short text, which no limit cuts
    ],
)
def test_a_cut_changes_all_texts_from_a_length_on(others, limit, name):
    model = SimpleNamespace(max_seq_length=limit, similarity_fn_name="cosine", prompts={})
    expected = np.eye(8)
    served = expected.copy()
    served[others] = np.roll(served[others], 1, axis=1)
    side = Side("document", [f"text {n}" for n in TOKENS], np.array(TOKENS), served, expected)
    findings, _ = explain(model, [side], 1e-4)
    assert [found.name for found in findings] == ([name] if name else [])
    if name == "truncation":
        assert f"from {TOKENS[others[0]]} tokens on" in findings[0].text


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("step", "changed"), [(0.0, 0), (1e-4, 0), (2e-4, 1), (0.1, 1)])
def test_rankings_are_tied_up_to_rounding(sign, step, changed):
    """The tenth and the eleventh document change places, and 1e-5 of the largest score is 1.2e-4.

    The scores are 12, 11, ..., or -1, -2, ..., of which 12 is the largest, too.
    """
    scores = np.arange(12.0, 0, -1) - (0 if sign > 0 else 13)
    scores[10] = scores[9] - step
    other = scores.copy()
    other[[9, 10]] = scores[9] - 1, scores[9] - 0.5
    model = SimpleNamespace(similarity=lambda q, d: q @ d.T)
    query = Side("query", ["?"], np.ones(1), np.ones((1, 1)), np.ones((1, 1)))
    document = Side("document", [""] * 12, np.ones(12), other[:, None], scores[:, None])
    assert _changed_rankings(model, query, document) == changed

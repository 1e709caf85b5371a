"""Which difference is a cut and which is not: vectors by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from st_magnitude.workbench.serving.explain import Side, explain

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

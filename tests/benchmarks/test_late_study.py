"""The study of late interaction: what remains of an index, and what is stored."""

from __future__ import annotations

import doctest
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "evidence"))
try:
    cells, late = (importlib.import_module(name) for name in ("cells", "late_interaction"))
finally:
    sys.path.pop(0)


@pytest.fixture
def tokens():
    """Twenty documents whose query is their token of the largest norm."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randn(8 + i, 6, generator=generator) for i in range(20)]
    for document in documents:
        document[3] *= 10
    ids = [list(range(len(document))) for document in documents]
    return late.Tokens([document[3:4] for document in documents], documents, ids, [{i} for i in range(20)])


def test_pruning_keeps_what_is_asked_for(tokens):
    found = late.measured(tokens, "cosine")
    assert set(found) == {"norm, cosine", "norm, pooling", "pooling", "random", "first", "IDF"}
    assert set(late.measured(tokens, "qnorm")) == {"norm, cosine", "norm, calibrated", "norm, pooling"}
    for share, figures in found["norm, cosine"].items():
        assert figures["vectors"] == pytest.approx(max(float(share), 20 / sum(map(len, tokens.documents))), abs=0.01)
        assert figures["ndcg"].mean() == pytest.approx(1)  # their token is the last to go
    assert found["random"]["0.1"]["ndcg"].mean() < 0.9


def test_the_exponent_is_given_for_a_test(tokens):
    exponents = {f"{share:g}": 0.5 for share in late.SHARES}
    assert {x["exponent"] for x in late.measured(tokens, "dot", exponents)["norm, calibrated"].values()} == {0.5}


def test_clustering_leaves_as_many_vectors(tokens):
    total = sum(map(len, tokens.documents))
    assert total / 2 - 20 < len(torch.cat(late.pooled(tokens.documents, total // 2))) <= total / 2


def test_every_stored_cell_has_the_name_of_its_settings():
    for path in (late.RESULTS / "late_interaction").glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        assert path == late.path_of(cells.Cell(**found["settings"]))


def test_examples_in_docstrings():
    assert not doctest.testmod(late).failed

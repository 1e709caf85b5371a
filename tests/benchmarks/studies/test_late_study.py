"""The study of late interaction: what remains of an index, and what is stored."""

import pytest
import torch
from benchmarks.studies.late_interaction import late_interaction as late


@pytest.fixture
def tokens():
    """Twenty documents whose query is their token of the largest norm."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randn(8 + i, 6, generator=generator) for i in range(20)]
    for document in documents:
        document[3] *= 10
    queries = [document[3:4] for document in documents]
    return late.Tokens(queries, documents, [{i} for i in range(20)])


def test_pruning_keeps_what_is_asked_for(tokens):
    found = late.measured(tokens, "cosine")
    assert set(found) == {"norm, cosine", "norm, pooling", "pooling"}
    rules = {"norm, cosine", "norm, calibrated", "norm, pooling"}
    assert set(late.measured(tokens, "dot")) == rules
    for share, figures in found["norm, cosine"].items():
        assert figures["vectors"] == pytest.approx(
            max(float(share), 20 / sum(map(len, tokens.documents))), abs=0.01
        )
        assert figures["ndcg"].mean() == pytest.approx(1)  # their token is the last to go
    # for a test, the exponents are given
    exponents = {f"{share:g}": 0.5 for share in late.SHARES}
    assert {
        x["exponent"] for x in late.measured(tokens, "dot", exponents)["norm, calibrated"].values()
    } == {0.5}


def test_clustering_leaves_as_many_vectors(tokens):
    total = sum(map(len, tokens.documents))
    assert total / 2 - 20 < len(torch.cat(late.pooled(tokens.documents, total // 2))) <= total / 2

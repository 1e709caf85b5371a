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


def test_every_rule_is_measured_at_every_share(tokens):
    found = late.measured(tokens, "dot", lambda values: values.mean())
    assert set(found) == {"norm, cosine", "norm, calibrated", "norm, pooling"}
    assert {tuple(by_share) for by_share in found.values()} == {tuple(late.SHARES)}
    # the token of the query is the last to go
    assert [x["ndcg"] for x in found["norm, cosine"].values()] == pytest.approx([1] * 6)
    # for a test, the exponents are given
    given = late.measured(tokens, "dot", len, dict.fromkeys(late.SHARES, 0.5))
    assert {x["exponent"] for x in given["norm, calibrated"].values()} == {0.5}
    assert set(late.measured(tokens, "cosine", len)) == {"pooling"}


@pytest.mark.parametrize("share", [1.0, 0.5, 0.05])
def test_as_many_vectors_remain_as_are_asked_for(tokens, share):
    total = sum(map(len, tokens.documents))
    number = round(share * total)
    assert len(torch.cat(late.largest(tokens.documents, number))) == max(number, 20)
    clustered = len(torch.cat(late.pooled(tokens.documents, number)))
    assert number - 20 < clustered <= max(number, 2 * 20)

"""In-batch attention: what is left alone, what is refused. test_architectures.py tests values."""

import pytest
import torch
from revela_reference import VOCABULARY, decoder, padded
from torch import Tensor

from st_magnitude.revela import attention as A
from st_magnitude.revela.attention import (
    Neighbours,
    in_batch_attention,
    set_in_batch_attention,
    two_streams,
)

LENGTHS = (5, 3, 1, 4, 6)


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module")
def lm():
    model = decoder()
    set_in_batch_attention(model)
    return model


def test_generation_and_plain_calls_are_not_touched(lm) -> None:
    plain = decoder()
    ids = documents()[0][None]
    torch.testing.assert_close(lm(ids).logits, plain(ids).logits)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(lm.generate(ids, **options), plain.generate(ids, **options))


def test_pairs_that_are_left_out_do_not_matter(lm, monkeypatch) -> None:
    """A softmax so peaked that most weights are below 1e-7: float32 does not see the difference."""
    docs = documents()
    generator = torch.Generator().manual_seed(2)
    scores = 25.0 * torch.randn(5, 5, dtype=torch.float64, generator=generator)
    weights = scores.fill_diagonal_(-torch.inf).softmax(-1)
    assert sum(len(j) for *_, j in Neighbours(weights).chunks) <= 10  # of 20
    ids, mask = padded(docs)
    _, sparse = two_streams(lm, ids, Neighbours(weights, mask))
    monkeypatch.setattr(A, "SPARSE_BELOW", -1.0)
    _, exact = two_streams(lm, ids, Neighbours(weights, mask))
    assert torch.allclose(exact, sparse, rtol=0, atol=2e-6)
    assert not torch.allclose(exact, sparse, rtol=0, atol=1e-14)


def test_bfloat16_autocast_stays_near_float32() -> None:
    model = decoder().float()
    set_in_batch_attention(model)
    ids, mask = padded(documents())
    weights = torch.full((5, 5), 0.25)
    _, exact = two_streams(model, ids, Neighbours(weights, mask))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, half = two_streams(model, ids, Neighbours(weights, mask))
    assert torch.isfinite(half).all()
    both = half[mask.bool()].float(), exact[mask.bool()]
    assert torch.nn.functional.cosine_similarity(*both, dim=-1).min() > 0.995


@pytest.mark.parametrize("v_norm", [True, False])
def test_zero_values_and_huge_scores_stay_finite(v_norm: bool) -> None:
    query = 20 * torch.randn(3, 2, 4, 8)
    value = torch.zeros(3, 2, 4, 8, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0]] * 3)
    neighbours = Neighbours(torch.full((3, 3), 0.5), mask, v_norm=v_norm)
    result = in_batch_attention(query, query, value, neighbours)
    (gradient,) = torch.autograd.grad(result.sum(), value)
    assert (result == 0).all()
    assert torch.isfinite(gradient).all()


def test_the_loss_of_documents_of_one_token_is_zero(lm) -> None:
    ids, mask = torch.full((2, 5, 1), 1)
    assert A.next_token_loss(lm, torch.randn(5, 1, 24, dtype=torch.float64), ids, mask) == 0


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="LlamaModel is not a causal decoder"):
        set_in_batch_attention(decoder().model)
    ids, mask = padded(documents())
    model = decoder()
    with pytest.raises(ValueError, match="reached 0 of 2 layers"):  # without set_in_batch_attention
        two_streams(model, ids, Neighbours(torch.ones(5, 5), mask))

"""Division by norms, with a backward pass that holds little memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from st_magnitude.similarity import at_least_float32, safe_norm, without_autocast


def divide_by_norms(
    x: Tensor, dims: tuple[int, ...], gamma: float | Tensor
) -> tuple[Tensor, Tensor | None]:
    """x / |x|^gamma of the longest prefix, (n, D'), and the factors of shorter ones, (K - 1, n)."""
    x = at_least_float32(x[:, : dims[-1]])
    if not isinstance(gamma, Tensor) and gamma == 0.0:
        return x, None
    with torch.no_grad():
        norms = torch.stack([safe_norm(x[:, :dim])[:, 0] for dim in dims])  # (K, n)
    divided, scales = _DivideByNorms.apply(x, torch.as_tensor(gamma, dtype=x.dtype), norms, dims)
    return divided, scales if len(dims) > 1 else None


class _DivideByNorms(torch.autograd.Function):
    """x / |x|^gamma, (n, D), and (|x| / |x[:dim]|)^gamma of all prefixes but the last, (K - 1, n).

    Autograd of the same formulas holds several temporaries of the size of x, which set the peak
    memory of a large batch. This backward pass holds only the gradient.
    """

    @staticmethod
    def forward(
        x: Tensor, gamma: Tensor, norms: Tensor, dims: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        scale = norms[-1] ** -gamma  # (n,)
        scales = (norms[-1] / norms[:-1]) ** gamma  # (K - 1, n)
        return x * scale[:, None], scales

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, gamma, norms, ctx.dims = inputs
        ctx.save_for_backward(x, gamma, norms, output[1])

    @staticmethod
    def backward(ctx: Any, grad_divided: Tensor, grad_scales: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, norms, scales = ctx.saved_tensors
        with without_autocast(x):
            grad = grad_divided * (norms[-1] ** -gamma)[:, None]
            whole = torch.linalg.vecdot(x, grad)  # d loss / d -log |x|^gamma, (n,)
            parts = grad_scales * scales  # d loss / d log of the scales, (K - 1, n)
            of_scales = (parts * (norms[-1] / norms[:-1]).log()).sum()
            grad_gamma = of_scales - (whole * norms[-1].log()).sum()
            # The derivative of log |x| is x / |x|^2, in the coordinates of the prefix. One of the
            # two norms is divided out at the end, because the square of a small norm is 0.
            shares = torch.cat([parts, (whole - parts.sum(dim=0))[None]])  # (K, n)
            pulls = gamma * shares * (norms[-1] / norms) / norms  # (K, n)
            grad *= norms[-1:].T
            for k, (start, stop) in enumerate(pairwise((0, *ctx.dims))):
                block = slice(start, stop)
                grad[:, block].addcmul_(x[:, block], pulls[k:].sum(dim=0)[:, None], value=-1)
            grad /= norms[-1:].T
        return grad, grad_gamma, None, None

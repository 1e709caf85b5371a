"""Known: a loss whose gradients the forward pass has computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Known(torch.autograd.Function):
    """A loss with known gradients, which backward multiplies by the outer gradient.

    ``Known.apply(loss, gradients, refusal, *tensors)``: the refusal is what a second derivative
    raises.
    """

    @staticmethod
    def forward(
        loss: Tensor, gradients: Sequence[Tensor | None], refusal: str, *tensors: Tensor | None
    ) -> Tensor:
        return loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1])
        ctx.refusal = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # these gradients would be constants
            raise RuntimeError(ctx.refusal)
        return None, None, None, *(g if g is None else g * grad_output for g in ctx.saved_tensors)

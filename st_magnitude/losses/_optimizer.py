"""What a loss learns beside the weights of its model, at the steps of an optimizer.

A loop of your own builds the optimizer, and the Trainer leaves alone what is not part of the model. So one hook looks
at all steps of the optimizers of torch.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from st_magnitude.losses._temperature import Temperatures
    from st_magnitude.losses.ranking import MagnitudeRankingLoss

__all__ = ["average_over_ranks", "expect_in_optimizer"]

logger = logging.getLogger(__name__)

# Losses that have seen a batch, and whose first step has not come yet.
_expected: WeakSet[MagnitudeRankingLoss] = WeakSet()
_averaged: WeakSet[Temperatures] = WeakSet()


def expect_in_optimizer(loss: MagnitudeRankingLoss) -> None:
    """Has the first step of an optimizer warn if it holds the model of a loss, but not all that the loss learns."""
    _expected.add(loss)
    _watch()


def average_over_ranks(temperatures: Temperatures) -> None:
    """Averages the gradient of learned temperatures over all ranks before every step of their optimizer.

    DistributedDataParallel does this for the parameters of the model. Ranks may train on different data sets in the
    same step, so a rank may have no gradient.
    """
    _averaged.add(temperatures)
    _watch()


@lru_cache(maxsize=1)
def _watch() -> None:
    """Registers one hook for all losses of the process; torch does not allow a hook to remove itself."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if _expected or _averaged:
        held = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
        _check(held)
        _average(held)


def _check(held: dict[int, nn.Parameter]) -> None:
    for loss in list(_expected):
        if not any(id(parameter) in held for parameter in loss.model.parameters()):
            continue  # the optimizer of another model
        _expected.discard(loss)
        if missing := [name for name, parameter in loss.learned_parameters() if id(parameter) not in held]:
            logger.warning(
                "The optimizer that makes its first step does not hold the %s of %s, so they are not learned. Build "
                "the optimizer after the loss and from the parameters of the loss, such as AdamW(loss.parameters()).",
                " and ".join(dict.fromkeys(missing)),
                type(loss).__name__,
            )


@torch.no_grad()
def _average(held: dict[int, nn.Parameter]) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        return
    ours = {id(temperatures.bias) for temperatures in _averaged}
    biases = [parameter for key, parameter in held.items() if key in ours]  # in the same order on every rank
    if not biases:
        return
    gradients = [torch.zeros_like(b) if b.grad is None else b.grad for b in biases]
    has_gradient = torch.tensor([b.grad is not None for b in biases]).to(gradients[0])
    together = torch.cat([*gradients, has_gradient])
    dist.all_reduce(together)
    *sums, counts = together.split([*map(len, biases), len(biases)])
    for bias, gradient, count in zip(biases, sums, counts.tolist(), strict=True):
        bias.grad = gradient / dist.get_world_size() if count else None

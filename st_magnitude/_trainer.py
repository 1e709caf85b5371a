"""The Trainer in whose step something is computed: only it knows the step, and what was logged before a resume."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn
from transformers import Trainer

__all__ = ["calling_trainer", "once_in_a_run"]


def calling_trainer() -> Trainer | None:
    """The nearest Trainer among the callers, or None outside of one."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(trainer := frame.f_locals.get("self"), Trainer):
            return trainer
        frame = frame.f_back
    return None


def once_in_a_run(loss: nn.Module, key: str, measure: Callable[[], float]) -> float:
    """A number that a loss measures in its first step and logs; a run that is resumed finds it in the Trainer's log.

    One of several losses, by dataset, has the dataset's name behind the key. Outside a Trainer it is only measured.
    """
    trainer = calling_trainer()
    if trainer is None:
        return measure()
    if isinstance(losses := getattr(trainer, "loss", None), dict):
        key += "".join(f"_{name}" for name, other in losses.items() if other is loss)
    logged = [entry[key] for entry in trainer.state.log_history if key in entry]
    if logged:
        return logged[-1]
    value = measure()
    trainer.log({key: value})
    return value

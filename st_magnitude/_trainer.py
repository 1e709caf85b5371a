"""The Trainer in whose step something is computed: only it knows the step, and what was logged before a resume."""

from __future__ import annotations

import inspect

from transformers import Trainer

__all__ = ["calling_trainer"]


def calling_trainer() -> Trainer | None:
    """The nearest Trainer among the callers, or None outside of one."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(trainer := frame.f_locals.get("self"), Trainer):
            return trainer
        frame = frame.f_back
    return None

"""What a loss finds out during a run, in the log and the checkpoints of a Trainer."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from st_magnitude.training.monitor import NormMonitor

__all__ = ["Remembering", "attach"]

KEY = "st_magnitude"  # in TrainerState.stateful_callbacks, which checkpoints contain

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


class Remembering(nn.Module):
    """A module that finds a few numbers during a run and needs them again when the run resumes.

    A subclass returns them from ``get_extra_state`` and takes them back in ``set_extra_state``, as a dict of numbers.
    So they are part of the module's ``state_dict``, and :func:`attach` puts them into the checkpoints of a Trainer,
    which saves the model but not the loss. A number called ``auto_...`` goes to the Trainer's log once.
    """

    def get_extra_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def set_extra_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def attach(trainer: AnyTrainer) -> AnyTrainer:
    """Lets a Trainer log, checkpoint and resume what the losses of this package find out during a run.

    sentence-transformers' Trainer saves the model and the optimizer, but not the loss. After this call its checkpoints
    also contain the automatic scale of a loss and the step counter of SIGReg, its log shows the automatic scale as
    ``auto_scale``, and a resumed run finds both again. A NormMonitor comes before all other callbacks, so that
    Weights & Biases, TensorBoard and others receive its figures. Training itself does not change.

    Args:
        trainer: The Trainer, before ``train``. A second call does nothing.

    Returns:
        The same Trainer.

    Example:
        ::

            trainer = SentenceTransformerTrainer(model, args, train_dataset=data, loss=stm.QNormRankingLoss(model))
            stm.attach(trainer).train(resume_from_checkpoint=True)

    ``st-magnitude train`` calls it. A loss also trains without it, in a Trainer, in ``fit`` and in a loop of your own:
    but when such a run resumes, a loss with ``scale="auto"`` refuses the first batch, because it is not the first
    batch of the run.
    """
    if not any(isinstance(callback, _LossState) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(_LossState(trainer))
    callbacks = trainer.callback_handler.callbacks
    callbacks.sort(key=lambda callback: not isinstance(callback, NormMonitor))  # stable: all others keep their order
    return trainer


class _LossState(TrainerCallback):
    """Copies the state of losses and regularizers to the TrainerState before each step, and back on resume."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def _modules(self) -> dict[str, tuple[str, Remembering]]:
        """By their path: the name that the loss has among several, and the module."""
        losses = getattr(self.trainer, "loss", None)
        by_name = losses if isinstance(losses, dict) else {"": losses}
        return {
            f"{name}/{path}": (name, module)
            for name, loss in by_name.items()
            if isinstance(loss, nn.Module)
            for path, module in loss.named_modules()
            if isinstance(module, Remembering)
        }

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        saved: Any = state.stateful_callbacks
        for path, (_name, module) in self._modules().items():
            if path in saved.get(KEY, {}):
                module.set_extra_state(saved[KEY][path])

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        saved: Any = state.stateful_callbacks
        before = saved.get(KEY, {})
        saved[KEY] = {path: module.get_extra_state() for path, (_name, module) in self._modules().items()}
        for path, (name, _module) in self._modules().items():
            for key, value in saved[KEY][path].items():
                if key.startswith("auto_") and value is not None and before.get(path, {}).get(key) is None:
                    self.trainer.log({f"{key}_{name}" if name else key: value})

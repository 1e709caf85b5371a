"""The state of losses in the log and the checkpoints of a Trainer."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from st_magnitude.training.engines import engine_of_trainer
from st_magnitude.training.monitor import NormMonitor

__all__ = ["Remembering", "attach"]

KEY = "st_magnitude"  # in TrainerState.stateful_callbacks, which checkpoints contain

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


class Remembering(nn.Module):
    """A module that finds a few numbers during a run and needs them again when the run resumes.

    A subclass returns them from ``get_extra_state`` and takes them back in ``set_extra_state``, as a dict of numbers.
    They are therefore part of the module's ``state_dict``, and :func:`attach` puts them into the checkpoints of a
    Trainer, which saves the model but not the loss. The numbers of ``get_log`` go to every line of the Trainer's log.
    """

    is_attached = False  # whether a Trainer calls `before_step`

    def before_step(self) -> None:
        """Runs on every process before each step of the optimizer."""

    def get_log(self) -> dict[str, float]:
        return {}

    def get_extra_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def set_extra_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def attach(trainer: AnyTrainer) -> AnyTrainer:
    """Lets a Trainer log, checkpoint and resume the learned temperatures of losses.

    sentence-transformers' Trainer saves the model and the optimizer, but not the loss. After this call its checkpoints
    also contain the learned temperatures of a loss, and a resumed run finds them again. On several processes they take
    the same steps everywhere. The log shows a learned temperature as ``temperature``
    (:class:`~st_magnitude.kernel.terms.LearnedTemperature`). These figures and the figures of a NormMonitor reach
    Weights & Biases, TensorBoard and others.

    Args:
        trainer: The Trainer, before ``train``. A second call does nothing.

    Returns:
        The same Trainer.

    Raises:
        ValueError: If a loss needs DistributedDataParallel, and the Trainer uses FSDP or DeepSpeed.

    Example:
        ::

            trainer = SentenceTransformerTrainer(model, args, train_dataset=data, loss=stm.QNormRankingLoss(model))
            stm.attach(trainer).train(resume_from_checkpoint=True)

    ``st-magnitude train`` calls it. Without it a loss trains too, in a Trainer, in ``fit`` and in a loop of your own;
    but a run that resumes with a learned temperature is refused on its first batch.
    """
    if not any(isinstance(callback, _LossState) for callback in trainer.callback_handler.callbacks):
        state = _LossState(trainer)
        for loss in state.losses().values():
            check_engine: Any = getattr(loss, "check_engine", None)
            if check_engine is not None:
                check_engine(engine_of_trainer(trainer))
        trainer.add_callback(state)
    callbacks = trainer.callback_handler.callbacks
    callbacks.sort(
        key=lambda callback: not isinstance(callback, NormMonitor | _LossState)
    )  # all others keep their order
    return trainer


class _LossState(TrainerCallback):
    """Copies the state of losses and regularizers to the TrainerState before each step, and back on resume."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def losses(self) -> dict[str, nn.Module]:
        """The losses by the names that they have among several."""
        losses = getattr(self.trainer, "loss", None)
        by_name = losses if isinstance(losses, dict) else {"": losses}
        return {name: loss for name, loss in by_name.items() if isinstance(loss, nn.Module)}

    def _modules(self) -> dict[str, tuple[str, Remembering]]:
        """By their path: the name that the loss has among several, and the module."""
        return {
            f"{name}/{path}": (name, module)
            for name, loss in self.losses().items()
            for path, module in loss.named_modules()
            if isinstance(module, Remembering)
        }

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        saved: Any = state.stateful_callbacks
        for path, (_name, module) in self._modules().items():
            module.is_attached = True
            if path in saved.get(KEY, {}):
                module.set_extra_state(saved[KEY][path])

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        for _name, module in self._modules().values():
            module.before_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        saved: Any = state.stateful_callbacks
        saved[KEY] = {path: module.get_extra_state() for path, (_name, module) in self._modules().items()}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if logs is not None and "loss" in logs:
            modules = self._modules().values()
            figures = {_key(key, name): x for name, module in modules for key, x in module.get_log().items()}
            logs.update(figures)  # for the callbacks after this one
            state.log_history[-1].update(figures)


def _key(key: str, name: str) -> str:
    """The key of a figure in the log; ``name`` names one loss among several."""
    return f"{key}_{name}" if name else key

"""A loss in a Trainer: its state in the log and the checkpoints, and engines that cannot train it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from st_magnitude.training.monitor import NormMonitor

__all__ = ["Remembering", "attach", "engine_of", "engine_of_trainer", "refuse_engine"]

KEY = "st_magnitude"  # in TrainerState.stateful_callbacks, which checkpoints contain

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


class Remembering(nn.Module):
    """A part of a loss whose ``get_extra_state``, a dict of numbers, :func:`attach` puts into checkpoints."""

    is_attached = False  # whether a Trainer calls `before_step`

    def before_step(self) -> None:
        """Runs on every process before each step of the optimizer."""

    def get_log(self) -> dict[str, float]:
        """Figures for every line of the Trainer's log."""
        return {}


def attach(trainer: AnyTrainer) -> AnyTrainer:
    """Lets a Trainer log, checkpoint and resume the learned temperatures of losses.

    sentence-transformers' Trainer saves the model and the optimizer, but not the loss. After this call its checkpoints
    also contain the learned temperatures of a loss, and a resumed run finds them again. On several processes they take
    the same steps everywhere. The log shows a learned temperature as ``temperature``
    (:class:`~st_magnitude.kernel.terms.LearnedTemperature`). These figures and the figures of a NormMonitor reach
    Weights & Biases, TensorBoard and others. ``st-magnitude train`` calls it; a run that resumes with a learned
    temperature and without it is refused on its first batch.

    Args:
        trainer: The Trainer, before ``train``, which is also returned. A second call does nothing.

    Raises:
        ValueError: If a loss needs DistributedDataParallel, and the Trainer uses FSDP or DeepSpeed.

    Example:
        ::

            trainer = SentenceTransformerTrainer(model, args, train_dataset=data, loss=stm.QNormRankingLoss(model))
            stm.attach(trainer).train(resume_from_checkpoint=True)
    """
    callbacks = trainer.callback_handler.callbacks
    if not any(isinstance(callback, _LossState) for callback in callbacks):
        for loss in _losses_by_name(trainer).values():
            check_engine: Any = getattr(loss, "check_engine", None)
            if check_engine is not None:
                check_engine(engine_of_trainer(trainer))
        trainer.add_callback(_LossState(trainer))
    # The figures reach the callbacks after these two; all others keep their order.
    callbacks.sort(key=lambda callback: not isinstance(callback, NormMonitor | _LossState))
    return trainer


def _losses_by_name(trainer: Trainer) -> dict[str, nn.Module]:
    losses = getattr(trainer, "loss", None)
    by_name = losses if isinstance(losses, dict) else {"": losses}
    return {name: loss for name, loss in by_name.items() if isinstance(loss, nn.Module)}


class _LossState(TrainerCallback):
    """Copies the state of losses to the TrainerState after each step, and back on resume."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.modules: dict[str, tuple[str, Remembering]] = {}  # by path: the end of its keys in the log, and the module

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        saved: Any = state.stateful_callbacks
        self.modules = {
            f"{name}/{path}": (f"_{name}" if name else "", module)
            for name, loss in _losses_by_name(self.trainer).items()
            for path, module in loss.named_modules()
            if isinstance(module, Remembering)
        }
        for path, (_name, module) in self.modules.items():
            module.is_attached = True
            if path in saved.get(KEY, {}):
                module.set_extra_state(saved[KEY][path])

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        for _name, module in self.modules.values():
            module.before_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        saved: Any = state.stateful_callbacks
        saved[KEY] = {path: module.get_extra_state() for path, (_name, module) in self.modules.items()}

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **event: Any) -> None:
        if "loss" in event["logs"]:
            figures = {key + name: x for name, module in self.modules.values() for key, x in module.get_log().items()}
            event["logs"].update(figures)  # for the callbacks after this one
            state.log_history[-1].update(figures)


def engine_of(model: Any) -> str | None:
    """The engine around a model: ``"FSDP"``, ``"DeepSpeed ZeRO-3"`` (or another stage), or None.

    Classes are compared by name, because importing them takes long, or needs DeepSpeed.
    """
    if type(model).__name__ == "DeepSpeedEngine":
        return f"DeepSpeed ZeRO-{model.zero_optimization_stage()}"
    modules = model.modules() if isinstance(model, nn.Module) else ()
    classes = {base.__name__ for module in modules for base in type(module).__mro__}
    return "FSDP" if classes & {"FSDPModule", "FullyShardedDataParallel"} else None


def engine_of_trainer(trainer: Trainer) -> str | None:
    """The engine that a Trainer will put around its model, before it does so."""
    if trainer.is_deepspeed_enabled:
        return f"DeepSpeed ZeRO-{trainer.accelerator.state.deepspeed_plugin.zero_stage}"
    return "FSDP" if trainer.is_fsdp_enabled else None


def refuse_engine(engine: str | None, name: str, learned: Iterable[str], caches: bool) -> None:
    """Refuses a loss that an engine would train wrongly, or that would fail in it with another message.

    Args:
        engine: The engine, as `engine_of` names it.
        name: Name of the loss.
        learned: Names of what the loss learns: temperatures, exponents.
        caches: Whether the loss caches gradients.
    """
    if engine is None:
        return
    learned = set(learned)
    if "temperatures" in learned:
        # FSDP2 cannot find them among the model's parameters, and an optimizer of DeepSpeed's configuration lacks them.
        why = f"learns temperatures, which are not part of the model that {engine} trains"
        how = "pass fixed temperatures"
    elif "exponents" in learned and engine != "DeepSpeed ZeRO-2":
        # Scalars cannot be sharded, and a loss takes them outside of the model's forward.
        why = f"learns exponents, each of which is a single number, and {engine} shards all parameters"
        how = "train with fixed exponents, such as MagnitudeRankingLoss(model, stm.Similarity(1, 0.5))"
    elif caches and engine.startswith("DeepSpeed"):
        # "Gradient computed twice for this partition": sentence-transformers, issue 3173
        why = f"caches gradients, which takes several backward passes a step, and {engine} allows one"
        how = "leave mini_batch_size out"
    else:
        return
    raise ValueError(f"{name} {why}. Use DistributedDataParallel (torchrun, without {engine.split()[0]}), or {how}.")

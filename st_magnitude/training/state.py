"""What a loss finds out during a run, in the log and the checkpoints of a Trainer."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from st_magnitude.training.engines import engine_of_trainer
from st_magnitude.training.monitor import NormMonitor

__all__ = ["Remembering", "ResumeGuard", "attach"]

KEY = "st_magnitude"  # in TrainerState.stateful_callbacks, which checkpoints contain

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


class Remembering(nn.Module):
    """A module that finds a few numbers during a run and needs them again when the run resumes.

    A subclass returns them from ``get_extra_state`` and takes them back in ``set_extra_state``, as a dict of numbers.
    So they are part of the module's ``state_dict``, and :func:`attach` puts them into the checkpoints of a Trainer,
    which saves the model but not the loss. A number called ``auto_...`` goes to the Trainer's log once, and the numbers
    of ``get_log`` go to every line of it.
    """

    def get_log(self) -> dict[str, float]:
        return {}

    def get_extra_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def set_extra_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class ResumeGuard:
    """Refuses what a loss would start anew in a run that resumes.

    The sign of such a run is that weights are loaded into the model after the loss was built.
    """

    def __init__(self, model: nn.Module) -> None:
        self._is_loaded = False
        # The model of a test or of a loop of your own may be a function.
        self._hook = model.register_load_state_dict_post_hook(self) if isinstance(model, nn.Module) else None

    def __call__(self, _model: nn.Module, _incompatible_keys: Any) -> None:
        self._is_loaded = True

    def refuse(self, what: str, way_out: str) -> None:
        """Checks the first batch of a run.

        Args:
            what: The start of the message: what the first batch of a run does.
            way_out: What :func:`attach` keeps, and what else there is to do.

        Raises:
            ValueError: If weights were loaded.
        """
        if self._is_loaded:
            raise ValueError(
                f"{what}, but weights were loaded into the model after the loss was built. If the run resumes, call "
                "stm.attach(trainer) before train() in the first run and in the resumed one, which keeps "
                f"{way_out}. If this is a new run, load the weights before you build the loss."
            )

    def release(self) -> None:
        """Ends the watch: the run has begun, or what it needs was restored."""
        self._is_loaded = False
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def attach(trainer: AnyTrainer) -> AnyTrainer:
    """Lets a Trainer log, checkpoint and resume what the losses of this package find out during a run.

    sentence-transformers' Trainer saves the model and the optimizer, but not the loss. After this call its checkpoints
    also contain the automatic scale and the learned temperatures of a loss and the step counter of SIGReg, and a
    resumed run finds all of them again. Its log shows the automatic scale as ``auto_scale``, and a learned temperature
    as ``temperature`` and ``effective_temperature`` (:class:`~st_magnitude.LearnedTemperature`). These figures and
    those of a NormMonitor reach Weights & Biases, TensorBoard and others. Training itself does not change.

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

    ``st-magnitude train`` calls it. A loss also trains without it, in a Trainer, in ``fit`` and in a loop of your own:
    but when such a run resumes, a loss with ``scale="auto"`` or a learned temperature refuses the first batch, because
    it is not the first batch of the run.
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
            if path in saved.get(KEY, {}):
                module.set_extra_state(saved[KEY][path])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        saved: Any = state.stateful_callbacks
        before = saved.get(KEY, {})
        saved[KEY] = {path: module.get_extra_state() for path, (_name, module) in self._modules().items()}
        for path, (name, _module) in self._modules().items():
            for key, value in saved[KEY][path].items():
                if key.startswith("auto_") and value is not None and before.get(path, {}).get(key) is None:
                    self.trainer.log({_key(key, name): value})

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
    """The key of a figure in the log; ``name`` is that of one loss among several."""
    return f"{key}_{name}" if name else key

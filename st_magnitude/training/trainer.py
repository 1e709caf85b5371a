"""Around a Trainer: the one in whose step something is computed, and a run that a signal stops without loss."""

from __future__ import annotations

import inspect
import logging
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from st_magnitude._json import parse
from st_magnitude._upstream import has_cpu_bf16, load_checkpoint_into

__all__ = ["Stopped", "calling_trainer", "check_output", "has_fast_bf16", "once_in_a_run", "train_or_stop"]

logger = logging.getLogger(__name__)


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


class Stopped(KeyboardInterrupt):
    """A run was stopped by a signal; the message says what there is of it, and how to go on."""

    def __init__(self, number: int, message: str) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"Stopped by {self.signal.name} {message}")


class _StopOnSignal(TrainerCallback):
    """The first SIGINT or SIGTERM ends training behind the step that is being made, with a checkpoint of it.

    A second one does what it did before. Of several processes each would stop at a step of its own, so signals are left
    alone there, as they are outside the main thread, which alone may handle them.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if args.world_size == 1 and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in self.SIGNALS}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if control.should_training_stop:
            self.received = None  # it was the last step
        elif self.received is not None:
            control.should_save = control.should_training_stop = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.restore()


def _finished_state(checkpoint: Path, arguments: TrainingArguments) -> TrainerState | None:
    """That of a checkpoint if the run it is of has made all the steps that are asked for now."""
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if arguments.max_steps > 0:
        return state if state.global_step >= arguments.max_steps else None
    return state if (state.epoch or 0.0) > arguments.num_train_epochs - 1e-6 else None  # a quotient of whole numbers


def train_or_stop(trainer: Trainer, checkpoint: Path | None = None) -> None:
    """``trainer.train()`` that a signal ends with a checkpoint; afterwards the model encodes in its own precision.

    Args:
        trainer: Ready to train.
        checkpoint: To go on from.

    Raises:
        OSError: If a checkpoint cannot be written.
        Stopped: At SIGINT (Ctrl-C) and SIGTERM, when the checkpoint is on the disk.
    """
    stop = _StopOnSignal()
    trainer.add_callback(stop)
    try:
        if checkpoint is not None and (state := _finished_state(checkpoint, trainer.args)):
            load_checkpoint_into(trainer, checkpoint)  # train() would make one step more
            trainer.state = state
        else:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except (SafetensorError, RuntimeError) as error:
        if not re.search("I/O error|PytorchStreamWriter|inline_container", str(error)):
            raise
        raise OSError(
            f"Nothing could be written to {trainer.args.output_dir} ({error}). Make room, and go on from the last "
            "checkpoint with resume=True (--resume)."
        ) from error
    finally:
        stop.restore()
        trainer.remove_callback(stop)
    if stop.received is not None:
        step = trainer.state.global_step
        raise Stopped(stop.received, f"after step {step}, which is saved: go on with resume=True (--resume).")
    # accelerate leaves its autocast around forward, so that later encoding would go on in bfloat16
    trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)


def has_fast_bf16() -> bool:
    """Whether this machine has instructions for bfloat16: a GPU since Ampere, or a CPU with AVX-512 BF16 or AMX."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return has_cpu_bf16()


def check_output(output: Path, resume: bool) -> Path | None:
    """The checkpoint to go on from: the last that was written to its end. Refuses to overwrite anything."""
    if (output / "modules.json").exists():
        raise FileExistsError(f"{output} already holds a trained model. Choose another output folder.")
    found = sorted(
        (p for p in output.glob("checkpoints/checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)),
        key=lambda p: int(p.name.split("-")[1]),
    )
    if torn := [p.name for p in found if not _is_whole(p)]:
        logger.warning("Not written to the end, left aside: %s.", ", ".join(torn))
        found = [p for p in found if p.name not in torn]
    if found and not resume:
        raise FileExistsError(
            f"{output} holds an unfinished run (up to {found[-1].name}). Go on with resume=True (--resume), "
            "or choose another output folder."
        )
    if resume and not found:
        logger.warning("No checkpoint in %s: starting from the beginning.", output / "checkpoints")
    return found[-1] if found else None


def _is_whole(checkpoint: Path) -> bool:
    """Whether the Trainer wrote its state, which comes last."""
    try:
        state = parse((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and "global_step" in state

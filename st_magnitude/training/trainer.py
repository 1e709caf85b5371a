"""A training run that a signal stops without loss, and its output folder."""

from __future__ import annotations

import json
import logging
import re
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from st_magnitude._upstream import has_cpu_bf16, load_checkpoint_into
from st_magnitude.training.engines import engine_of_trainer
from st_magnitude.training.state import attach

__all__ = ["Stopped", "check_output", "has_fast_bf16", "train_or_stop"]

logger = logging.getLogger(__name__)


class Stopped(KeyboardInterrupt):
    """A signal stopped the run; the message says what was saved and how to continue."""

    def __init__(self, number: int, message: str) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"Stopped by {self.signal.name} {message}")


class _StopOnSignal(TrainerCallback):
    """The first SIGINT or SIGTERM ends training after the current step, with a checkpoint.

    A second signal has its usual effect. The callback ignores signals if there are several processes, because each
    process would stop at a different step, and outside the main thread, because only that thread may handle them.
    ``enable_jit_checkpoint`` of transformers does not replace it: that ignores Ctrl-C, waits three seconds for more
    signals, and ends ``train`` without telling its caller.
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
    """The state of a checkpoint, or None if its run has not yet made all the steps of these arguments."""
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if arguments.max_steps > 0:
        return state if state.global_step >= arguments.max_steps else None
    return state if (state.epoch or 0.0) > arguments.num_train_epochs - 1e-6 else None  # a quotient is not exact


def train_or_stop(trainer: Trainer, checkpoint: Path | None = None) -> None:
    """Runs ``trainer.train()``, which a signal ends with a checkpoint.

    The function attaches what losses need to resume (:func:`~st_magnitude.attach`). Afterwards the model encodes in its
    own precision.

    Args:
        trainer: Trainer that is ready to train.
        checkpoint: Folder of the checkpoint to continue from.

    Raises:
        OSError: If a checkpoint cannot be written.
        Stopped: At SIGINT (Ctrl-C) and SIGTERM, after the checkpoint is on the disk.
        ValueError: If the Trainer shards the weights.
    """
    if (engine := engine_of_trainer(trainer)) in ("FSDP", "DeepSpeed ZeRO-3"):
        raise ValueError(
            f"{engine} gives each process a part of the weights, and this command saves only the part of the first "
            "one. Use DistributedDataParallel or DeepSpeed ZeRO-2, or a script that gathers the weights "
            "(docs/devices.md)."
        )
    attach(trainer)
    stop = _StopOnSignal()
    trainer.add_callback(stop)
    try:
        if checkpoint is not None and (state := _finished_state(checkpoint, trainer.args)):
            load_checkpoint_into(trainer, checkpoint)  # train() would make one more step
            trainer.state = state
        else:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except (SafetensorError, RuntimeError) as error:
        if not re.search("I/O error|PytorchStreamWriter|inline_container", str(error)):
            raise
        raise OSError(
            f"Nothing could be written to {trainer.args.output_dir} ({error}). Free some space, and continue from the "
            "last checkpoint with resume=True (--resume)."
        ) from error
    finally:
        stop.restore()
        trainer.remove_callback(stop)
    if stop.received is not None:
        step = trainer.state.global_step
        raise Stopped(stop.received, f"after step {step}, which is saved. Continue with resume=True (--resume).")
    # accelerate leaves its autocast around forward: later encoding would still use bfloat16
    trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)


def has_fast_bf16() -> bool:
    """Whether this machine has instructions for bfloat16: a GPU since Ampere, or a CPU with AVX-512 BF16 or AMX."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return has_cpu_bf16()


def check_output(output: Path, resume: bool) -> Path | None:
    """The checkpoint to continue from: the last complete one.

    Raises:
        FileExistsError: If the folder holds a trained model, or an unfinished run and ``resume`` is False.
    """
    if (output / "modules.json").exists():
        raise FileExistsError(f"{output} already holds a trained model. Choose another output folder.")
    found = sorted(
        (p for p in output.glob("checkpoints/checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)),
        key=lambda p: int(p.name.split("-")[1]),
    )
    if torn := [p.name for p in found if not _is_whole(p)]:
        logger.warning("Ignoring incomplete checkpoints: %s.", ", ".join(torn))
        found = [p for p in found if p.name not in torn]
    if found and not resume:
        raise FileExistsError(
            f"{output} holds an unfinished run (up to {found[-1].name}). Continue it with resume=True (--resume), "
            "or choose another output folder."
        )
    if resume and not found:
        logger.warning("There is no checkpoint in %s; training starts from the beginning.", output / "checkpoints")
    return found[-1] if found else None


def _is_whole(checkpoint: Path) -> bool:
    """Whether the checkpoint holds the state of the Trainer, which is written last."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and "global_step" in state

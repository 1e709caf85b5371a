"""Training that saves a checkpoint when a signal stops it."""

from __future__ import annotations

import math
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import cast

from sentence_transformers import SentenceTransformerTrainer
from torch import nn
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from st_magnitude._checks import InputError
from st_magnitude._distributed import engine_of_trainer
from st_magnitude._upstream import load_checkpoint_into
from st_magnitude.training.attach import attach, refuse_without_negatives
from st_magnitude.training.run_folder import is_complete


class Stopped(KeyboardInterrupt):
    """A signal stopped the run; the message says what was saved and how to continue."""

    def __init__(self, number: int, message: str) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"Stopped by {self.signal.name} {message}")


class DivergedError(InputError):
    """A training that has changed nothing, or left weights that are not finite."""

    exit_code = 3


def refuse_diverged(trainer: Trainer) -> None:
    """Refuses (DivergedError) a model whose weights, or all logged gradients, are not finite."""
    rows = trainer.state.log_history
    norms = [row["grad_norm"] for row in rows if row.get("grad_norm") is not None]
    trained = [x for x in cast(nn.Module, trainer.model).parameters() if x.requires_grad]
    is_never_finite = bool(norms) and not any(map(math.isfinite, norms))
    if is_never_finite or not all(x.isfinite().all() for x in trained):
        raise DivergedError(
            "The training has diverged: gradients or weights are not finite, and nothing is saved."
            " Lower the learning rate, raise the temperature, or look for a loss of nan or infinity"
            " in the log. Then use another output folder."
        )


_STOPS = {signal.SIGINT, signal.SIGTERM}
if sys.platform != "win32":
    _STOPS |= {signal.SIGHUP}  # the terminal has closed


class _StopOnSignal(TrainerCallback):
    """The first of these signals ends training after the current step, with a checkpoint, and a
    second one has its usual effect. The callback is idle in several processes, of which each would
    stop at another step, and outside of the main thread, which alone may handle signals."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.handlers = ExitStack()  # which gives the signals their handlers back

    def on_train_begin(
        self, args: TrainingArguments, state: object, control: object, **_: object
    ) -> None:
        if args.world_size == 1 and threading.current_thread() is threading.main_thread():
            for number in _STOPS:
                if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                    before = signal.signal(number, self._receive)
                    self.handlers.callback(signal.signal, number, before)

    def on_step_end(
        self, args: object, state: object, control: TrainerControl, **_: object
    ) -> None:
        if control.should_training_stop:
            self.received = None  # it was the last step
        elif self.received is not None:
            control.should_save = True
            control.should_training_stop = True

    def _receive(self, number: int, frame: object) -> None:
        self.received = number
        self.handlers.close()


def _finished_state(checkpoint: Path, arguments: TrainingArguments) -> TrainerState | None:
    """The state of a checkpoint, or None if its run has still steps to make."""
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if arguments.max_steps > 0:
        is_finished = state.global_step >= arguments.max_steps
    else:  # the epoch is a quotient, and not exact
        is_finished = (state.epoch or 0.0) + 1e-6 >= arguments.num_train_epochs
    return state if is_finished else None


def train_or_stop(trainer: SentenceTransformerTrainer, checkpoint: Path | None = None) -> None:
    if (engine := engine_of_trainer(trainer)) in ("FSDP", "DeepSpeed ZeRO-3"):
        raise InputError(
            f"{engine} gives each process a part of the weights, and this command saves only the"
            " part of the first one. Use DistributedDataParallel or DeepSpeed ZeRO-2, or a script"
            " that gathers the weights (docs/train.md)."
        )
    attach(trainer)
    refuse_without_negatives(trainer)
    stop = _StopOnSignal()
    trainer.add_callback(stop)
    try:
        if checkpoint is not None and (state := _finished_state(checkpoint, trainer.args)):
            load_checkpoint_into(trainer, checkpoint)  # train() would make one more step
            trainer.state = state
        else:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except Exception as error:
        folder = Path(str(trainer.args.output_dir)) / f"checkpoint-{trainer.state.global_step}"
        if folder.exists() and not is_complete(folder):
            raise OSError(
                f"{folder} cannot be written ({error}). Free some space, and continue from the last"
                " checkpoint with --resume (in Python resume=True)."
            ) from error
        raise
    finally:
        stop.handlers.close()
        trainer.remove_callback(stop)
    if stop.received is not None:
        step = trainer.state.global_step
        how = f"after step {step}, which is saved. Continue with --resume (in Python resume=True)."
        raise Stopped(stop.received, how)
    # accelerate leaves its autocast around forward: later encoding would still use bfloat16
    trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    refuse_diverged(trainer)

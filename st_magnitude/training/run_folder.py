"""The folder of a training run, which a signal stops without loss, and which resumes."""

from __future__ import annotations

import json
import logging
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from st_magnitude._distributed import engine_of_trainer
from st_magnitude._files import OWN, is_moving, moved_in, with_remedy, written
from st_magnitude._upstream import has_cpu_bf16, load_checkpoint_into
from st_magnitude.losses.ranking import MagnitudeRankingLoss
from st_magnitude.result import to_plain
from st_magnitude.saving.export import write_model
from st_magnitude.training.attach import attach

logger = logging.getLogger(__name__)

RECORD = "checkpoints/run.json"  # the settings of a run, in its folder
_OURS = r"checkpoints/(run\.json|checkpoint-\d+)(/|$)"


class Stopped(KeyboardInterrupt):
    """A signal stopped the run; the message says what was saved and how to continue."""

    def __init__(self, number: int, message: str) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"Stopped by {self.signal.name} {message}")


class _StopOnSignal(TrainerCallback):
    """The first SIGINT or SIGTERM ends training after the current step, with a checkpoint.

    A second signal has its usual effect. Of several processes each would stop at another step, and
    only the main thread may handle signals: there the callback ignores them. transformers'
    ``enable_jit_checkpoint`` ignores Ctrl-C, and ends ``train`` without telling its caller.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.handlers = ExitStack()  # which gives the signals their handlers back

    def on_train_begin(
        self, args: TrainingArguments, state: object, control: object, **_: object
    ) -> None:
        if args.world_size == 1 and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers.callback(signal.signal, number, signal.signal(number, self._receive))

    def on_step_end(
        self, args: object, state: object, control: TrainerControl, **_: object
    ) -> None:
        if control.should_training_stop:
            self.received = None  # it was the last step
        elif self.received is not None:
            control.should_save = control.should_training_stop = True

    def _receive(self, number: int, frame: object) -> None:
        self.received = number
        self.handlers.close()


class _TimeLeft(TrainerCallback):
    """Says after a few steps how many there are and how long they take, if that is minutes."""

    FIRST = 5  # steps that are timed, after one that warms up

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.steps = 0
        self.began = 0.0

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        self.steps += 1
        if self.steps == 1:
            self.began = time.perf_counter()
        if self.steps == 1 + self.FIRST and state.is_world_process_zero:
            left = state.max_steps - state.global_step
            minutes = left * (time.perf_counter() - self.began) / self.FIRST / 60
            if minutes >= 1:
                self.say(f"Training: {state.max_steps:,} steps, about {minutes:,.0f} min left.")


def _finished_state(checkpoint: Path, arguments: TrainingArguments) -> TrainerState | None:
    """The state of a checkpoint, or None if its run has still steps to make."""
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if arguments.max_steps > 0:
        is_finished = state.global_step >= arguments.max_steps
    else:  # the epoch is a quotient, and not exact
        is_finished = (state.epoch or 0.0) + 1e-6 >= arguments.num_train_epochs
    return state if is_finished else None


def train_or_stop(
    trainer: SentenceTransformerTrainer,
    checkpoint: Path | None = None,
    say: Callable[[str], None] = logger.info,
) -> None:
    """Attaches and trains. Afterwards the model encodes in its own precision.

    ``say`` hears how long a run of minutes takes.
    """
    if (engine := engine_of_trainer(trainer)) in ("FSDP", "DeepSpeed ZeRO-3"):
        raise ValueError(
            f"{engine} gives each process a part of the weights, and this command saves only the"
            " part of the first one. Use DistributedDataParallel or DeepSpeed ZeRO-2, or a script"
            " that gathers the weights (docs/devices.md)."
        )
    if not any(weight.requires_grad for weight in trainer.model.parameters()):
        raise ValueError("The model has no weights that training could change; choose another one.")
    attach(trainer)
    refuse_without_negatives(trainer)
    stop = _StopOnSignal()
    trainer.add_callback(stop)
    trainer.add_callback(_TimeLeft(say))
    try:
        if checkpoint is not None and (state := _finished_state(checkpoint, trainer.args)):
            load_checkpoint_into(trainer, checkpoint)  # train() would make one more step
            trainer.state = state
        else:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except Exception as error:
        folder = Path(str(trainer.args.output_dir)) / f"checkpoint-{trainer.state.global_step}"
        if folder.exists() and not _is_complete(folder):
            raise OSError(
                f"{folder} cannot be written ({error}). Free some space, and continue from the last"
                " checkpoint with resume=True (--resume)."
            ) from error
        raise
    finally:
        stop.handlers.close()
        trainer.remove_callback(stop)
    if stop.received is not None:
        step = trainer.state.global_step
        how = f"after step {step}, which is saved. Continue with resume=True (--resume)."
        raise Stopped(stop.received, how)
    # accelerate leaves its autocast around forward: later encoding would still use bfloat16
    trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)


def refuse_without_negatives(trainer: SentenceTransformerTrainer, num_rows: int = 1024) -> None:
    """Refuses data in which most rows have no negative, as where all documents begin alike.

    It reads ``num_rows`` rows, but at least a batch, in random batches of the Trainer's.
    """
    loss, data = trainer.loss, trainer.train_dataset
    if not isinstance(loss, MagnitudeRankingLoss) or not isinstance(data, Dataset):
        return
    size = trainer.args.per_device_train_batch_size * trainer.args.world_size
    rows = data.shuffle(seed=0)
    shares = []
    for start in range(0, max(min(len(rows), num_rows) - size, 0) + 1, size):
        chosen = rows.select(range(start, min(start + size, len(rows))))
        batch = trainer.data_collator(list(chosen))
        features, _ = trainer.collect_features(batch)
        shares.append(loss.false_negatives.share_without_negatives(features))
    if (share := sum(shares) / len(shares)) > 0.5:
        raise ValueError(
            f"{share:.0%} of the rows have no negative in a batch of {size}, and would train with a"
            " loss of 0: all other documents have the text of the positive, as far as the model"
            f" reads (max_seq_length={trainer.model.max_seq_length}), or belong to the same query."
            " Read more tokens (max_length), leave out a prompt or letterhead that fills them,"
            " take a model whose tokenizer knows the language, or raise the batch size."
        )


def has_fast_bf16() -> bool:
    """Whether this machine computes in bfloat16, as GPUs since Ampere and CPUs with AMX do."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return has_cpu_bf16()


def check_output(output: Path, resume: bool) -> Path | None:
    """The checkpoint to continue from: the last complete one."""
    if (output / "modules.json").exists() and not is_moving(output, "modules.json"):
        raise FileExistsError(
            f"{output} already holds a trained model. Choose another output folder."
        )
    if (foreign := next(_foreign(output), None)) is not None:
        raise FileExistsError(
            f"{output} holds {foreign.relative_to(output)}, a link or a file that no training run"
            " wrote. Move it somewhere else, or choose a new or empty output folder."
        )
    folders = output.glob("checkpoints/*")
    numbered = (path for path in folders if re.fullmatch(r"checkpoint-\d+", path.name))
    checkpoints = sorted(numbered, key=lambda path: int(path.name.split("-")[1]))
    found = [path for path in checkpoints if _is_complete(path)]
    if torn := [path.name for path in checkpoints if path not in found]:
        logger.warning("Ignoring incomplete checkpoints: %s.", ", ".join(torn))
    if found and not resume:
        raise FileExistsError(
            f"{output} holds an unfinished run (up to {found[-1].name}). Continue it with"
            " resume=True (--resume), or choose another output folder."
        )
    if resume and not found:
        logger.warning("There is no checkpoint in %s/checkpoints: training starts anew.", output)
    return found[-1] if found else None


def _is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint has its state, which is written last."""
    return "global_step" in _json_of(checkpoint / "trainer_state.json")


def _foreign(output: Path) -> Iterator[Path]:
    """All links, which may lead to somebody's files, and the files that no training run wrote."""
    is_run, was_moved = (output / RECORD).is_file(), is_moving(output, "modules.json")
    for path in output.rglob("*"):
        place = path.relative_to(output).as_posix()
        is_ours = is_run and (was_moved or re.match(_OURS, place))
        is_ours = is_ours or path.is_dir() or f"/{OWN}" in f"/{place}"
        if path.is_symlink() or not is_ours:
            yield path


def remove_checkpoints(output: Path) -> None:
    """Removes what a run needs to resume, and no more."""
    folder = output / "checkpoints"
    for path in folder.iterdir():
        if re.match(_OURS, path.relative_to(output).as_posix()):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
    with suppress(OSError):  # somebody has put more there
        folder.rmdir()


def check_same_run(output: Path, settings: Mapping[str, object]) -> None:
    """Refuses (FileExistsError) to resume a run of other settings, such as the loss or the data."""
    before = _json_of(output / RECORD)
    if differences := list_differences(before, json.loads(json.dumps(to_plain(settings)))):
        raise FileExistsError(
            f"The run in {output} was started with other settings: {differences}. Resume with the"
            " same settings, or choose another output folder."
        )


def list_differences(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """The settings that an earlier run had with other values."""
    changed = (name for name, value in now.items() if before.get(name) != value)
    return ", ".join(f"{name} ({before.get(name)!r} there, {now[name]!r} now)" for name in changed)


def record_run(output: Path, settings: Mapping[str, object]) -> None:
    """Writes the settings of a run next to its checkpoints, before the first of them."""
    with written(output / RECORD) as file:
        file.write(json.dumps(to_plain(settings), indent=2) + "\n")


@contextmanager
def saved(
    model: SentenceTransformer, output: Path, name: str, record: Mapping[str, object]
) -> Iterator[Path]:
    """Moves a model and its record, a JSON file, into the folder of a run, after the block, which
    gets the new folder."""
    remedy = "Make room, and run it again (train and revela: with resume=True, --resume)."
    with with_remedy(output, remedy), moved_in(output, "modules.json") as folder:
        write_model(model, folder)
        text = json.dumps(to_plain(record), indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
        yield folder


def _json_of(file: Path) -> dict[str, object]:
    """The content of a file, or nothing if it is missing or incomplete."""
    try:
        content: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content

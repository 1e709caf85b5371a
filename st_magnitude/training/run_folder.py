"""The folder of a training run: what is in it, and from where the run resumes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from sentence_transformers import SentenceTransformer

from st_magnitude._files import OWN, is_moving, moved_in, refuse_used_folder, with_remedy, written
from st_magnitude.result import to_plain
from st_magnitude.saving.export import write_model

logger = logging.getLogger(__name__)

WORK = f"{OWN}work"  # in the folder of a run: its settings and its checkpoints
RUN_RECORD = f"{WORK}/run.json"


def last_checkpoint(output: Path, resume: bool, settings: Mapping[str, object]) -> Path | None:
    """The last complete checkpoint, or None. FileExistsError: other files, or another run."""
    if (work := output / WORK).is_symlink():
        raise FileExistsError(f"{work} is a link; remove it, or choose another output folder.")
    if not is_moving(output):
        refuse_used_folder(output)
    folders = work.glob("checkpoint-*")
    checkpoints = sorted(folders, key=lambda path: int(path.name.split("-")[1]))
    found = [path for path in checkpoints if is_complete(path)]
    if torn := [path.name for path in checkpoints if path not in found]:
        logger.warning(f"Ignoring incomplete checkpoints: {', '.join(torn)}.")
    if found and not resume:
        raise FileExistsError(
            f"{output} holds an unfinished run (up to {found[-1].name}). Continue it with"
            " resume=True, or choose another output folder."
        )
    if found:
        check_same_run(output, settings)
        return found[-1]
    if resume:
        logger.warning(f"There is no checkpoint in {work}: training starts anew.")
    return None


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint has its state, which is written last."""
    return "global_step" in _json_of(checkpoint / "trainer_state.json")


def check_same_run(output: Path, settings: Mapping[str, object]) -> None:
    """Refuses (FileExistsError) to resume a run of other settings, such as the loss or the data."""
    refuse_others(output, _json_of(output / RUN_RECORD), json.loads(json.dumps(to_plain(settings))))


def refuse_others(output: Path, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Refuses (FileExistsError) settings with other values than an earlier run had."""
    changed = [name for name, value in now.items() if before.get(name) != value]
    if changed:
        said = (f"{name} ({before.get(name)!r} there, {now[name]!r} now)" for name in changed)
        raise FileExistsError(
            f"The run in {output} was started with other settings: {', '.join(said)}. Continue it"
            " with the same settings, or choose another output folder."
        )


def record_run(output: Path, settings: Mapping[str, object]) -> None:
    """Writes the settings of a run next to its checkpoints, before the first of them."""
    with written(output / RUN_RECORD) as file:
        file.write(json.dumps(to_plain(settings), indent=2) + "\n")


@contextmanager
def saved(
    model: SentenceTransformer,
    output: Path,
    name: str,
    record: Mapping[str, object],
    texts: Sequence[str] = (),
) -> Iterator[Path]:
    """Writes a model and its record, a JSON file, into a new folder, which the block gets, and then
    moves it into the folder of a run. The model is compared on some texts (see `check_saved`)."""
    remedy = "Make room, and run it again (train: with resume=True)."
    with with_remedy(output, remedy), moved_in(output, "modules.json") as folder:
        write_model(model, folder, texts)
        text = json.dumps(to_plain(record), indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
        yield folder


def _json_of(file: Path) -> dict[str, object]:
    try:
        content: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content

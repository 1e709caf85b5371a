"""The folder of a training run: what is in it, and from where the run resumes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from sentence_transformers import SentenceTransformer

from st_magnitude._files import (
    WORK,
    checkpoints_of,
    is_complete,
    json_of,
    moved_in,
    refuse_used_run,
    with_remedy,
    written,
)
from st_magnitude.result import to_plain
from st_magnitude.saving.export import write_model

logger = logging.getLogger(__name__)

RUN_RECORD = f"{WORK}/run.json"


def last_checkpoint(output: Path, resume: bool, settings: Mapping[str, object]) -> Path | None:
    """The last complete checkpoint, or None. FileExistsError: other files, or another run."""
    refuse_used_run(output, resume)
    checkpoints = checkpoints_of(output)
    found = [path for path in checkpoints if is_complete(path)]
    if torn := [path.name for path in checkpoints if path not in found]:
        logger.warning(f"Ignoring incomplete checkpoints: {', '.join(torn)}.")
    if found:
        check_same_run(output, settings)
        return found[-1]
    if resume:
        logger.warning(f"There is no checkpoint in {output / WORK}: training starts anew.")
    return None


def check_same_run(output: Path, settings: Mapping[str, object]) -> None:
    """Refuses (FileExistsError) to resume a run of other settings, such as the loss or the data."""
    before = json_of(output / RUN_RECORD)
    now = json.loads(json.dumps(to_plain(settings)))
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
    remedy = "Make room, and run it again (train: with --resume, in Python resume=True)."
    with with_remedy(output, remedy), moved_in(output, "modules.json") as folder:
        write_model(model, folder, texts)
        text = json.dumps(to_plain(record), indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
        yield folder

"""Files and folders that are complete or absent, whatever ends the process that writes them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from filelock import FileLock, Timeout

OWN = ".st-magnitude."  # prefix of the names that only this package uses
OUR_PAGE = '<meta name="generator" content="st-magnitude">'  # of a report
WORK = f"{OWN}work"  # in the folder of a run: its settings and its checkpoints
_LOCK = f"{OWN}lock"
_NEW = f"{OWN}new"  # what is being written inside of a folder
_MOVING = f"{OWN}moving"  # all of it, while its files are moved into the folder


@contextmanager
def written(path: str | Path, mark: str = "") -> Iterator[TextIO]:
    """Yields a text file, which gets its name when all of it is on the disk. A file of that name is
    replaced (see `refuse_foreign`), and its folder is made."""
    path = Path(path)
    refuse_foreign(path, mark)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{OWN}{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    try:
        with new.open("x", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, new)
        new.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # the system names none if the disk is full
        raise
    finally:
        new.unlink(missing_ok=True)


def refuse_foreign(path: Path, mark: str = "") -> None:
    """Refuses (FileExistsError) to replace a link, a folder or a device by a file, or a file that
    does not begin with a mark of ours."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise FileExistsError(f"{path} is a link or no file; choose another place to write to.")
    if path.exists():
        with path.open("rb") as file:
            if mark.encode() not in file.read(1000):
                raise FileExistsError(f"{path} was not written by st-magnitude; choose a new file.")


@contextmanager
def locked_folder(output: str | Path, first_rank_only: bool = True) -> Iterator[None]:
    """Makes a folder and keeps other processes from writing to it within the block. Of one
    distributed run, the first process locks. The system frees the lock of a killed process."""
    if first_rank_only and os.environ.get("RANK", "0") != "0":
        yield
        return
    output = Path(output)
    is_new = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise OSError(f"Another process is writing to {output}; choose another output.") from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows does not remove a file that is locked
            (output / _LOCK).unlink()
        lock.release()
        if is_new:
            with suppress(OSError):  # the block has written something
                output.rmdir()


def refuse_used_folder(path: str | Path, overwrite: bool | None = None) -> None:
    """Refuses (OSError) a path at which no new folder can be written. ``overwrite`` is None where
    the caller cannot replace one."""
    path = Path(path)
    place = next(x for x in (path, *path.absolute().parents) if x.exists())
    if not os.access(place, os.W_OK) or not (place == path or place.is_dir()):
        raise OSError(f"{path} cannot be made, because {place} is no folder or read-only.")
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file; choose a new or empty folder.")
    if not path.is_dir() or all(file.name.startswith(OWN) for file in path.iterdir()):
        return
    if not overwrite:
        remedy = "" if overwrite is None else ", or pass overwrite=True to replace it all"
        raise FileExistsError(f"{path} is not empty; choose another folder{remedy}.")
    if Path.cwd().is_relative_to(path.resolve()):
        raise FileExistsError(
            f"{path} contains the working directory, which would be replaced with it; choose "
            "another folder, or change the directory."
        )


def refuse_used_run(output: Path, resume: bool) -> None:
    """Refuses (OSError) a folder in which no training can begin or, with ``resume``, go on."""
    if (work := output / WORK).is_symlink():
        raise FileExistsError(f"{work} is a link; remove it, or choose another output folder.")
    if not is_moving(output):
        refuse_used_folder(output)
    complete = [path.name for path in checkpoints_of(output) if is_complete(path)]
    if complete and not resume:
        raise FileExistsError(
            f"{output} holds an unfinished run (up to {complete[-1]}). Continue it with --resume"
            " (in Python resume=True), or choose another output folder."
        )


def checkpoints_of(output: Path) -> list[Path]:
    """The checkpoints of a run, in the order of their steps."""
    folders = (output / WORK).glob("checkpoint-*")
    return sorted(folders, key=lambda path: int(path.name.split("-")[1]))


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint has its state, which is written last."""
    return "global_step" in json_of(checkpoint / "trainer_state.json")


def json_of(file: Path) -> dict[str, object]:
    """The object in a file, empty if it is absent or torn."""
    try:
        content: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content


@contextmanager
def moved_in(path: Path, last: str, replace_all: bool = False) -> Iterator[Path]:
    """Yields a new folder inside of a folder, and moves its content there when the block ends.

    ``replace_all`` replaces the whole content of the folder; without it nothing is replaced
    (FileExistsError), except files that a killed process has moved there. The file ``last`` is
    moved last, but for config.json, without which no encoder loads. After an error, the folder is
    as it was.
    """
    new = path / _NEW
    moving = path / _MOVING
    _remove(new)
    new.mkdir(parents=True)
    try:
        yield new
        mode = new.stat().st_mode & 0o666  # as new files have them; safetensors leaves them out
        for file in filter(Path.is_file, new.rglob("*")):
            file.chmod(mode)
            with file.open("rb+") as opened:
                os.fsync(opened.fileno())
        names = {file.name for file in new.iterdir()}
        old = [x for x in path.iterdir() if not x.name.startswith(OWN)]
        old = [x for x in old if replace_all or x.name in names]
        if old and not (replace_all or is_moving(path)):
            raise FileExistsError(
                f"{path} holds {old[0].name}, which somebody else wrote and this would replace. "
                "Move it somewhere else."
            )
        _remove(moving)
        new.rename(moving)
    finally:
        _remove(new)

    def place(file: Path) -> tuple[bool, bool]:
        return file.name == "config.json", file.name == last

    for file in sorted(old, key=place, reverse=True):
        _remove(file)
    for source in sorted(moving.iterdir(), key=place):
        source.replace(path / source.name)
    moving.rmdir()


def is_moving(path: Path) -> bool:
    """Whether a process was killed while it moved files into a folder (see `moved_in`)."""
    return (path / _MOVING).exists()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def with_remedy(path: Path, remedy: str) -> Iterator[None]:
    """Adds the path and what to do to an error of the disk."""
    try:
        yield
    except (FileExistsError, FileNotFoundError, ConnectionError):
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise OSError(f"The model cannot be written to {path} ({reason}). {remedy}") from error

"""Files and folders that are complete or absent, whatever ends the process that writes them."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

_NEW = ".new"  # what is being written inside of a folder


@contextmanager
def locked_folder(output: str | Path) -> Iterator[None]:
    """Makes a folder and keeps other processes from writing to it within the block.

    Of the processes of one distributed run, the first one locks. The system frees the lock when the
    process is killed.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    output = Path(output)
    is_new = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise OSError(f"Another process is writing to {output}; choose another output.") from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows does not remove a file that is locked
            (output / ".lock").unlink()
        lock.release()
        if is_new:
            with suppress(OSError):  # the block has written something
                output.rmdir()


def refuse_used_folder(path: str | Path, overwrite: bool = False) -> None:
    """Refuses (FileExistsError) a path at which no new folder can be written."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file; choose a new or empty folder.")
    if not path.is_dir() or all(file.name == _NEW for file in path.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(
            f"{path} is not empty; choose another folder, or pass overwrite=True to replace it all."
        )
    if Path.cwd().is_relative_to(path.resolve()):
        raise FileExistsError(
            f"{path} contains the working directory, which would be replaced with it; choose "
            "another folder, or change the directory."
        )


@contextmanager
def moved_in(path: Path, last: str, replace_all: bool = False) -> Iterator[Path]:
    """Yields a new folder inside of a folder, and moves its content there when the block ends.

    A move takes no room on the disk. The file ``last`` comes last: it is there only when all of
    them are, whatever ends the process. Files and folders of the same names are replaced, or all
    that the folder contains. After an error, the folder is as it was.
    """
    new = path / _NEW
    is_new = not path.exists()
    _remove(new)
    new.mkdir(parents=True)
    try:
        yield new
        _flush(new)
        _remove(path / last)
        names = {file.name for file in new.iterdir()}
        for old in [*path.iterdir()]:
            if old.name in names or (replace_all and old != new):
                _remove(old)
        for source in sorted(new.iterdir(), key=lambda file: file.name == last):
            source.rename(path / source.name)
    finally:
        _remove(new)
        if is_new and not any(path.iterdir()):
            path.rmdir()


def _remove(path: Path) -> None:
    """Removes a file or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(folder: Path) -> None:
    """Waits until all files of a folder are on the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb+") as opened:
                os.fsync(opened.fileno())


@contextmanager
def one_line_about_the_disk(path: Path, remedy: str) -> Iterator[None]:
    """Turns errors of a disk, also of torch, safetensors and tokenizers, into an OSError."""
    try:
        yield
    except (FileExistsError, FileNotFoundError, ConnectionError):
        raise
    except Exception as error:
        found = re.search(r"(?:os error|Os \{ code:) (\d+)", str(error))
        number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
        if re.search("PytorchStreamWriter|inline_container", str(error)):
            number = errno.EIO
        if number is None:
            raise
        reason = os.strerror(number)
        failure = OSError(f"The model cannot be written to {path} ({reason}). {remedy}")
        failure.errno = number
        raise failure from error

"""Files and folders that are either complete or absent, whatever ends the process that writes them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def locked_folder(output: str | Path) -> Iterator[None]:
    """Makes a folder and keeps other processes from writing to it within the block.

    Of the processes of one distributed run, the first one locks. The system frees the lock when the process is killed.
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
        raise OSError(f"Another process is writing to {output}: wait for it, or choose another output.") from None
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
    """Refuses a path at which no new folder can be written."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file; choose a new or empty folder.")
    if not overwrite and path.is_dir() and any(path.iterdir()):
        raise FileExistsError(f"{path} is not empty; choose another folder, or pass overwrite=True to replace it all.")


@contextmanager
def whole_folder(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Yields a new folder next to the path, and gives it this path when the block ends.

    After an error, the path is as it was. After a kill, either the old or the new folder is at the path, or, between
    two renames, the old one is next to it as ``.NAME.old``; the next call puts it back and removes all leftovers.
    A folder that is not empty is refused, or replaced with all that it contains.
    """
    path = Path(path).resolve()
    new, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():
        old.rename(path)
    refuse_used_folder(path, overwrite)
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        for file in new.rglob("*"):
            if file.is_file():
                with file.open("rb+") as opened:
                    os.fsync(opened.fileno())
        if path.exists():
            path.rename(old)
        new.rename(path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)

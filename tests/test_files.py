"""Folders that one process at a time writes to."""

import contextlib
import errno
import itertools
import os
import subprocess
import sys

import pytest
from _kills import killed_at

from st_magnitude._files import locked_folder, moved_in, with_remedy, written

HOLD = """
import sys
from st_magnitude._files import locked_folder
with locked_folder(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_locked_against_another_process_until_that_process_ends(tmp_path, monkeypatch):
    output = tmp_path / "new" / "out"
    command = [sys.executable, "-c", HOLD, str(output)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(OSError, match="Another process is writing to"), locked_folder(output):
            pass
        with monkeypatch.context() as patch:
            patch.setenv("RANK", "1")  # of the same distributed run
            with locked_folder(output):
                pass
        process.kill()
    with locked_folder(output):
        (output / "model").write_text("weights")
    assert [path.name for path in output.iterdir()] == ["model"]


def move_in(folder):
    with moved_in(folder, "last") as new:
        (new / "part").mkdir()
        for name in ("last", "part/new"):
            (new / name).write_text("new")


def content(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_files_are_moved_in_only_when_all_are_there(tmp_path):
    (tmp_path / "checkpoint").write_text("old")
    with contextlib.suppress(KeyError), moved_in(tmp_path, "last") as new:
        (new / "last").write_text("new")
        raise KeyError
    assert content(tmp_path) == {"checkpoint": "old"}
    for step in itertools.count():
        code = killed_at(step, lambda: move_in(tmp_path))
        if code == 0:
            break
        if not (tmp_path / "last").exists():
            move_in(tmp_path)  # replaces what the killed one has moved
        assert content(tmp_path) == {"checkpoint": "old", "last": "new", "part/new": "new"}
        for path in ("last", "part/new"):
            (tmp_path / path).unlink()
        (tmp_path / "part").rmdir()
    assert step > 3


def test_an_encoder_loads_only_when_all_its_files_are_there(tmp_path):
    """Without modules.json, config.json alone would load as another model."""
    names = ("weights", "modules.json", "config.json")

    def save(text):
        with moved_in(tmp_path, "modules.json", replace_all=True) as new:
            for name in names:
                (new / name).write_text(text)

    for step in itertools.count():
        save("old")
        code = killed_at(step, lambda: save("new"))
        found = {(tmp_path / name).read_text() for name in names if (tmp_path / name).exists()}
        if (tmp_path / "config.json").exists():
            assert all((tmp_path / name).exists() for name in names)
            assert len(found) == 1
        if code == 0:
            break
    assert step > 5


def test_a_file_is_complete_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "new" / "file"
    for text in ("old", "new"):
        with written(path) as file:
            file.write(text)
        path.chmod(0o600)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"left on.*{path}"), written(path) as file:
        file.write("half")
    assert content(tmp_path) == {"new/file": "new"}
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(path)
    for place in ("link", "new"):
        with pytest.raises(FileExistsError, match=place), written(tmp_path / place):
            pass
    assert (tmp_path / "link").is_symlink()


def full(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.EFBIG, "cannot be written to .*File too large.*Make room"), (errno.ENOENT, "reason")],
)
def test_errors_of_the_disk_get_a_remedy(tmp_path, number, says):
    with pytest.raises(OSError, match=says), with_remedy(tmp_path, "Make room."):
        raise OSError(number, "reason")

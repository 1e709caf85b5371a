"""Folders that one process at a time writes to."""

import contextlib
import errno
import subprocess
import sys

import pytest

from st_magnitude._files import locked_folder, moved_in, one_line_about_the_disk

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


def test_an_empty_folder_is_not_left_behind(tmp_path):
    with pytest.raises(KeyError), locked_folder(tmp_path / "out"):
        raise KeyError
    assert not (tmp_path / "out").exists()


def test_files_are_moved_in_only_when_all_are_there(tmp_path):
    (tmp_path / "part").mkdir()
    for name in ("checkpoint", "last", "part/old"):
        (tmp_path / name).write_text("old")
    with contextlib.suppress(KeyError), moved_in(tmp_path, "last") as new:
        (new / "last").write_text("new")
        raise KeyError
    assert (tmp_path / "last").read_text() == "old"
    with moved_in(tmp_path, "last") as new:
        (new / "part").mkdir()
        for name in ("last", "part/new"):
            (new / name).write_text("new")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in files}
    assert found == {"checkpoint": "old", "last": "new", "part/new": "new"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EFBIG, "write"), "File too large"),
        # of tokenizers
        (Exception("No space left on device (os error 28)"), "No space left on device"),
        # of torch
        (RuntimeError("[enforce fail at inline_container.cc:664]"), "Input/output error"),
        (RuntimeError("CUDA out of memory"), None),
        (FileNotFoundError(errno.ENOENT, "read"), None),
    ],
)
def test_errors_of_the_disk_are_one_line(tmp_path, error, reason):
    expected = rf"cannot be written to .* \({reason}\)\. Make room\." if reason else str(error)[-9:]
    with pytest.raises(OSError if reason else type(error), match=expected):  # noqa: SIM117
        with one_line_about_the_disk(tmp_path, "Make room."):
            raise error

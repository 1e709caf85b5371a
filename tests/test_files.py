"""Folders that one process at a time writes to."""

import subprocess
import sys

import pytest

from st_magnitude._files import locked_folder

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
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
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

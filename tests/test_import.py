"""Importing the package asks no network, and loads no optional package."""

import subprocess
import sys

GUARDED = """
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError(f"network: {args}")

socket.getaddrinfo = socket.create_connection = refuse
socket.socket.connect = refuse
import st_magnitude
import st_magnitude.commands.app
loaded = {"open_clip", "mteb", "matplotlib", "faiss", "bm25s", "peft", "usearch", "ir_measures"} & set(sys.modules)
print(sorted(loaded))
"""


def test_import_is_offline_and_light():
    finished = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    theirs = "import sys, sentence_transformers; print(sorted({'peft', 'matplotlib'} & set(sys.modules)))"
    expected = subprocess.run([sys.executable, "-c", theirs], capture_output=True, text=True, check=True).stdout
    assert finished.stdout == expected  # what sentence-transformers itself loads, and no more

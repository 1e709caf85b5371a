"""matplotlib, where there is one."""

from __future__ import annotations

from typing import Any

__all__ = ["pyplot"]


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('A picture needs matplotlib: pip install "st-magnitude[plot]".') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt

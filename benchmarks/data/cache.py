"""The folder in which builders of data keep what they fetched or built."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$ST_MAGNITUDE_CACHE``, else ``st_magnitude`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if folder := os.environ.get("ST_MAGNITUDE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "st_magnitude"

"""benchmarks/ is no package: its scripts import one another from their own folder."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def load(name: str, folder: str = "") -> Any:
    """A script of benchmarks/, or of a folder in it."""
    path = str(ROOT / "benchmarks" / folder)
    sys.path.insert(0, path)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(path)

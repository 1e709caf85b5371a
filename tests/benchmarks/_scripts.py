"""benchmarks/ is no package: its scripts import one another from their own folder."""

import importlib
import random
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


def words(rng: random.Random, number: int) -> str:
    """Made-up words of three syllables."""
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    return " ".join("".join(rng.sample(syllables, 3)) for _ in range(number))

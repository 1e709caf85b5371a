"""The figures of the trainings of a study: one file a study, one line of JSON a cell."""

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Figures = dict[str, Any]


class Store:
    """The figures of the cells of a study by cell, which is a dataclass of settings.

    A line holds the settings, under "settings", and the figures. A field that a stored line does
    not have is the default of the class.
    """

    def __init__(self, file: Path, kind: type) -> None:
        self.file, self.kind = file, kind

    @cached_property
    def found(self) -> dict[Any, Figures]:
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.is_file() else []
        return {self.cell_of(x["settings"]): x for x in map(json.loads, lines)}

    def cell_of(self, settings: Mapping[str, Any]) -> Any:
        hashable = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        return self.kind(**hashable)

    def load(self, cell: Any) -> Figures | None:
        return self.found.get(cell)

    def of_seeds(self, cell: Any, number: int = 3) -> dict[int, Figures]:
        """The stored figures of the same settings by seed."""
        found = {seed: self.load(replace(cell, seed=seed)) for seed in range(number)}
        return {seed: x for seed, x in found.items() if x}

    def best(self, cells: Iterable[Any], *where: str) -> Any:
        """The stored cell whose figure on dev, which stands ``where``, is the highest, or None."""
        stored = [cell for cell in cells if cell in self.found]
        figures = [reduce(getitem, where or ("dev",), self.found[cell]) for cell in stored]
        return stored[figures.index(max(figures))] if stored else None

    def add(self, cell: Any, figures: Figures) -> None:
        self.found[cell] = {"settings": asdict(cell), **figures}
        line = json.dumps(self.found[cell], separators=(",", ":")) + "\n"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(line)

    def run(self, measure: Callable[[Any], Figures], cells: Iterable[Any]) -> None:
        """Measures the cells that are missing."""
        todo = [cell for cell in dict.fromkeys(cells) if cell not in self.found]
        for i, cell in enumerate(todo, 1):
            figures = measure(cell)
            self.add(cell, figures)
            print(f"[{i}/{len(todo)}] {cell}: {figures.get('seconds', '')} s", flush=True)


def seeds_of(cell: Any, number: int = 3) -> list[Any]:
    """The same settings with the seeds 0, 1, ..."""
    return [replace(cell, seed=seed) for seed in range(number)]


def seed_by_seed(cells: Sequence[Any], number: int = 3) -> list[Any]:
    """All cells with seed 0, then all with seed 1, ..."""
    return [replace(cell, seed=seed) for seed in range(number) for cell in cells]


def packed(values: NDArray[np.floating[Any]]) -> str:
    """Figures of all queries, to 1e-4, as text: zlib and base 64 of 16-bit integers.

    Example:
        >>> unpacked(packed(np.array([0.0, 0.63093, 1.0])))
        array([0.    , 0.6309, 1.    ])
    """
    integers = np.rint(1e4 * values).astype("<i2").tobytes()
    return base64.b64encode(zlib.compress(integers, 9)).decode()


def unpacked(text: str) -> NDArray[np.float64]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i2") / 1e4

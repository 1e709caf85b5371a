"""How long `load_splits` takes to read and split pairs in a CSV file.

    python benchmarks/speed/pairs.py

Queries of 9 words and documents of 40, drawn from 5,000 words. CPU seconds and peak memory of
Python, in one process.
"""

from __future__ import annotations

import csv
import random
import resource
import tempfile
import time
from pathlib import Path

from benchmarks.studies.estimates import markdown

from st_magnitude.data.pairs import load_splits
from st_magnitude.data.tables import read_rows

SIZES = (2_000, 20_000, 200_000)


def write(path: Path, number: int) -> None:
    draw, words = random.Random(0), [f"word{i}" for i in range(5000)]
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = ([" ".join(draw.choices(words, k=k)) for k in (9, 40)] for _ in range(number))
        csv.writer(file).writerows([["query", "document"], *rows])


def main() -> None:
    rows = []
    for number in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "pairs.csv")
            write(path, number)
            start = time.process_time()
            list(read_rows(path, []))
            read = time.process_time() - start
            load_splits(path)
            split = time.process_time() - start - 2 * read
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        rows.append([f"{number:,}", f"{read:.2f} s", f"{split:.2f} s", f"{peak:.1f} GiB"])
    print("\n".join(markdown(["pairs", "read", "split", "peak, with torch"], rows)))


if __name__ == "__main__":
    main()

"""CPU seconds that reading and splitting 200,000 pairs in a CSV file take, and the peak memory.

    python benchmarks/speed/pairs.py

Queries have 9 words and documents 40, of 5,000 words.
"""

import csv
import random
import resource
import tempfile
import time
from pathlib import Path

from st_magnitude.workbench.files.pairs import load_splits
from st_magnitude.workbench.files.rows import read_columns


def main() -> None:
    draw = random.Random(0)
    words = [f"word{i}" for i in range(5000)]
    rows = ([" ".join(draw.choices(words, k=k)) for k in (9, 40)] for _ in range(200_000))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pairs.csv")
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["query", "document"], *rows])
        phases = {"reading": lambda: read_columns([path], []), "both": lambda: load_splits(path)}
        for name, phase in phases.items():
            start = time.process_time()
            phase()
            print(f"{name}: {time.process_time() - start:.1f} s")
    print(f"peak: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")


if __name__ == "__main__":
    main()

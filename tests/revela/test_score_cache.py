"""ScoreCache: many keys, failed writes, several processes. What a loss makes of it is in test_replug.py."""

from __future__ import annotations

import multiprocessing
import sqlite3
import threading

import pytest

from st_magnitude.revela.score_cache import ScoreCache


def test_many_keys_are_looked_up_in_parts() -> None:
    cache = ScoreCache()
    values = {str(number).encode(): number / 7 for number in range(1201)}
    cache.put(values)
    assert cache.get([*values, b"other", *values]) == values
    assert len(cache) == 1201


def test_nothing_is_kept_of_a_failed_write(tmp_path) -> None:
    cache = ScoreCache(tmp_path)
    with pytest.raises(ValueError, match="cannot be used"):
        cache.put({b"a": 1.0, b"b": None})
    assert cache.get([b"a", b"b"]) == {}
    cache.put({b"a": 2.0})
    assert ScoreCache(tmp_path).get([b"a"]) == {b"a": 2.0}


def write(folder: str, rank: int) -> None:
    cache = ScoreCache(folder)
    for number in range(30):
        cache.put({f"{rank} {number} {k}".encode(): float(k) for k in range(5)} | {b"shared": 1.0})


def test_processes_write_at_once(tmp_path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=write, args=(str(tmp_path), rank)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    assert len(ScoreCache(tmp_path)) == 3 * 30 * 5 + 1


@pytest.mark.parametrize("new", [True, False])
def test_opening_and_writing_wait_for_others(new: bool, tmp_path) -> None:
    if not new:
        cache = ScoreCache(tmp_path)
    other = sqlite3.connect(tmp_path / ScoreCache.FILE, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    if new:
        other.execute("CREATE TABLE score (key BLOB PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID")
    other.execute("INSERT INTO score VALUES (?, ?)", (b"theirs", 2.0))
    timer = threading.Timer(0.3, other.execute, ("COMMIT",))
    timer.start()
    if new:
        cache = ScoreCache(tmp_path)
    cache.put({b"mine": 1.0})
    timer.join()
    assert cache.get([b"mine", b"theirs"]) == {b"mine": 1.0, b"theirs": 2.0}
    other.close()


def test_another_process_opens_the_file_itself(tmp_path, monkeypatch) -> None:
    cache = ScoreCache(tmp_path)
    cache.put({b"a": 1.0})
    here = cache._connection()
    assert cache._connection() is here
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert cache._connection() is not here
    assert cache.get([b"a"]) == {b"a": 1.0}

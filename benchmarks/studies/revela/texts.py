"""The texts of the Revela study: Python's documentation (Debian's python3.11-doc).

Of the library reference, 15 % of the pages are dev and 15 % test: their section titles ask for
their chunks. Pairs of neighbouring chunks of all other pages are for training.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.data.debian import fetch
from benchmarks.data.python_docs import read_pages, split_pages, title_task
from datasets import Dataset

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.revela import chunk

HTML = "usr/share/doc/python3.11/html"
FOLDERS = (
    *("library", "howto", "tutorial", "reference", "faq", "using"),
    *("c-api", "extending", "whatsnew"),
)
WORDS = 32  # of a chunk
PLACES = 4  # pairs in a group
WORK = Path("runs/revela_text")


def cached(name: str, make: Callable[[], Any]) -> Any:
    """The result of ``make``, from a file if this or another process has made it before."""
    path = WORK / f"{name}.pickle"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(pickle.dumps(make()))
        os.replace(temporary, path)
    return pickle.loads(path.read_bytes())


@dataclass
class Data:
    pairs: list[tuple[str, str]]  # neighbouring chunks to train on
    held_out: list[tuple[str, str]]  # of the dev pages
    dev: RetrievalData
    test: RetrievalData


@lru_cache(maxsize=1)
def data() -> Data:
    return cached("data", _read)


def _read() -> Data:
    root = fetch("python3.11-doc") / HTML
    train, others = split_pages(read_pages(root / FOLDERS[0]), held_out=0.3)
    dev, test = split_pages(others, held_out=0.5, seed=1)
    for folder in FOLDERS[1:]:
        train += read_pages(root / folder)
    tasks = [title_task(pages, max_words=40, max_queries=500) for pages in (dev, test)]
    return Data(list(_pairs(train)), list(_pairs(dev)), *tasks)


def _pairs(documents: Any) -> Iterator[tuple[str, str]]:
    for document in documents:
        chunks = [text for text in chunk(document.text, WORDS) if len(text.split()) >= 8]
        yield from zip(chunks[::2], chunks[1::2], strict=False)


def group_rows(pairs: Sequence[tuple[str, str]], seed: int, apart: bool = False) -> Dataset:
    """Groups of pairs from random places; partners are neighbours in the list, unless all chunks
    are shuffled."""
    rng = random.Random(seed)
    mixed = rng.sample(pairs, len(pairs))
    chunks = [text for pair in mixed for text in pair]
    chunks = rng.sample(chunks, len(chunks)) if apart else chunks
    size = 2 * PLACES
    rows = [chunks[i : i + size] for i in range(0, len(chunks) - size + 1, size)]
    return Dataset.from_dict({"chunks": [row for row in rows if len(set(row)) == size]})


def half_rows(pairs: Sequence[tuple[str, str]]) -> Dataset:
    """The rows of InfoNCE: the first half of a chunk, and its neighbour."""
    both = [x for a, b in pairs for x in ((a, b), (b, a))]
    halves = [" ".join(a.split()[: (len(a.split()) + 1) // 2]) for a, _ in both]
    return Dataset.from_dict({"anchor": halves, "positive": [b for _, b in both]})

"""Texts without labels as pairs of neighbouring chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path

from st_magnitude._checks import counted
from st_magnitude.data.beir import DataError
from st_magnitude.data.documents import PROSE, Document, chunk, count_words, files_of
from st_magnitude.workbench.files.rows import OTHER_SUFFIXES, SUFFIXES, Columns, num_held_out

MOST_WORDS = 40  # of a chunk
FEWEST_WORDS = 8
MOST_PAIRS = 2000  # of dev, and of test
LONG = 10_000  # characters of a document


def remarks(texts: Collection[str]) -> list[str]:
    """A sentence on documents that models read in part, if there are any."""
    number = sum(len(text) > LONG for text in texts)
    if not number:
        return []
    return [
        f"The data have {counted(number, 'document')} of more than {LONG:,} characters."
        " Encoders read the first words, and tables average all: cut them, as"
        " st_magnitude.data.documents.chunk does."
    ]


def holds_texts(path: Path) -> bool:
    """Whether a path is a text, or a folder with texts and without pairs. Next to one text, which
    may be a README, spreadsheets and JSON are pairs, too."""
    texts, others = files_of(path, PROSE)
    kinds = SUFFIXES if len(texts) > 1 else (*SUFFIXES, *OTHER_SUFFIXES)
    return bool(texts) and not any(file.name.lower().endswith(kinds) for file in others)


def neighbours(documents: Iterable[Document], seed: int) -> list[Columns]:
    """Pairs of each chunk and each of its neighbours. All chunks of a document are in one split.

    Fewer than three documents are not split.
    """
    chunked: list[list[str]] = []
    for document in documents:
        pieces = chunk(document["text"], MOST_WORDS, code=document["code"])
        chunked.append([piece for piece in pieces if count_words(piece) >= FEWEST_WORDS])
    chunked = [pieces for pieces in chunked if len(pieces) > 1]
    if not chunked:
        raise DataError(
            f"The texts have no labels, and none of them has two chunks of {FEWEST_WORDS} words."
        )
    chunked.sort(key=lambda pieces: hashlib.sha256(f"{seed} {pieces}".encode()).digest())
    number = num_held_out(len(chunked))
    tables = []
    for part in ("test", "dev", "train"):
        left = number if part != "train" else len(chunked)
        pairs: list[tuple[str, str]] = []
        while left and (part == "train" or len(pairs) < MOST_PAIRS):
            left -= 1
            for before, after in pairwise(chunked.pop()):
                pairs += [(before, after), (after, before)]
        queries, answers = zip(*pairs, strict=True) if pairs else ((), ())
        cells = {"query": queries, "document": answers}
        place = partial("{} {}".format, f"pair of {part}")
        tables.append(Columns(cells, "", place, part))
    return tables

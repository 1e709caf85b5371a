"""The texts of a corpus, read one by one from memory or from files, and cut into shards."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from datasets import Dataset

from st_magnitude.data.beir import DataError, id_and_text, json_lines

__all__ = ["columns_of", "documents_of", "read_through", "shards_of", "texts_of"]

Documents = Callable[[], Iterator[tuple[str, str]]]  # every call yields ids and texts from the first one on

_IDS = ("_id", "id")
_CORPORA = (
    "a mapping of ids to texts, a datasets.Dataset with the columns _id (or id), text and perhaps title, a .jsonl or "
    ".parquet file of such rows, a folder of either, or a folder in BEIR's layout"
)


def documents_of(corpus: Mapping[str, str] | Dataset | str | Path) -> Documents:
    """Checks the kind of a corpus without reading it, and returns a function that reads it."""
    if isinstance(corpus, (str, Path)):
        return _documents_in(Path(corpus))
    if isinstance(corpus, Mapping):
        return lambda: _texts("corpus", ({"_id": key, "text": text} for key, text in corpus.items()))
    if isinstance(corpus, Dataset):
        plain = corpus.with_format(None).select_columns(columns_of(corpus.column_names, "the Dataset"))
        return lambda: _texts("Dataset", plain)
    raise TypeError(f"A corpus is {_CORPORA}; got {type(corpus).__name__}.")


def _documents_in(path: Path) -> Documents:
    files = [path] if path.is_file() else sorted(path.glob("corpus.jsonl*")) or sorted(path.glob("*"))
    files = [file.absolute() for file in files if file.name.endswith((".jsonl", ".jsonl.gz", ".parquet"))]
    if len({".parquet" in file.name for file in files}) != 1:
        found = "both .jsonl and .parquet files" if files else "neither a .jsonl nor a .parquet file"
        raise DataError(f"{path} has {found}. A corpus is {_CORPORA}.")
    if files[0].suffix == ".parquet":
        columns = [columns_of(pq.read_schema(file).names, str(file)) for file in files]
        tables = list(zip(files, columns, strict=True))
        return lambda: (text for file, names in tables for text in _texts(file.name, _parquet_rows(file, names)))
    return lambda: (id_and_text(row, where, _IDS) for file in files for where, row in json_lines(file))


def texts_of(columns: Mapping[str, list[Any]]) -> tuple[list[str], list[str]]:
    """Ids and texts of a batch of documents, given as columns."""
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    pairs = list(_texts("batch", rows))
    return [key for key, _ in pairs], [text for _, text in pairs]


def columns_of(names: Sequence[str], where: str) -> list[str]:
    """The names of the columns that a document needs."""
    key = next((name for name in _IDS if name in names), None)
    if key is None or "text" not in names:
        raise DataError(f"{where} has the columns {sorted(names)}: it needs _id (or id) and text; rename them.")
    return [key, "text", *({"title"} & set(names))]


def _parquet_rows(file: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(file) as table:
        for batch in table.iter_batches(1000, columns=columns):
            yield from batch.to_pylist()


def _texts(where: str, rows: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for number, row in enumerate(rows):
        yield id_and_text(row, f"{where}, row {number} (the first is 0)", _IDS)


def read_through(documents: Documents, shard_size: int, update: Callable[[int], Any]) -> tuple[list[str], int]:
    """Reads a corpus once: the digest of all texts up to the end of every shard, and the number of documents.

    It keeps a hash of every id, 8 bytes each, and reads the corpus again only where two hashes are equal.
    """
    digests: list[str] = []
    hashes = array("q")
    for ids, _, digest in _batches(documents, shard_size):
        digests.append(digest)
        hashes.extend(map(hash, ids))
        update(len(ids))
    if not digests:
        raise DataError(f"The corpus has no documents. A corpus is {_CORPORA}.")
    in_order = np.sort(np.frombuffer(hashes, dtype=np.int64))
    suspects = set(in_order[1:][in_order[1:] == in_order[:-1]].tolist())
    seen: dict[str, int] = {}
    for number, (key, _) in enumerate(documents() if suspects else ()):
        if hash(key) in suspects and seen.setdefault(key, number) != number:
            raise DataError(
                f"Documents {seen[key]} and {number} (the first is 0) have the same id, {key!r}: make ids unique."
            )
    return digests, len(hashes)


def _batches(documents: Documents, size: int) -> Iterator[tuple[list[str], list[str], str]]:
    """Ids and texts of every shard, and the digest of all ids and texts up to its end."""
    digest = hashlib.sha256()
    remaining = documents()
    while batch := list(islice(remaining, size)):
        for key, text in batch:
            digest.update(f"{len(key)}:{key}{len(text)}:{text}".encode(errors="surrogatepass"))
        yield [key for key, _ in batch], [text for _, text in batch], digest.hexdigest()


def shards_of(
    documents: Documents, size: int, digests: list[str], wanted: Container[int]
) -> Iterator[tuple[int, list[str], list[str]]]:
    """Reads a corpus again: number, ids and texts of the wanted shards, after a check that no text has changed."""
    for shard, (batch, digest) in enumerate(zip_longest(_batches(documents, size), digests)):
        if batch is None or batch[2] != digest:
            raise DataError(f"The corpus has changed in shard {shard} while it was encoded: restore it, and run again.")
        if shard in wanted:
            yield shard, batch[0], batch[1]

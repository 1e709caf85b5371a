"""Groups of chunks from documents, and batches from groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import TypedDict

import torch
from datasets import Dataset, Features, Value
from datasets import Sequence as ListOf
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from st_magnitude._checks import at_least
from st_magnitude.data.documents import (
    Documents,
    as_document,
    chunk,
    count_words,
    first_half,
    fold,
    read_documents,
)

Chunk = tuple[str, bool]  # the text, and whether its document is code


class Group(TypedDict, total=False):
    chunks: Sequence[str]
    code: Sequence[bool]


def build_groups(
    documents: Documents, *, group_size: int = 16, max_words: int = 120, min_words: int = 5
) -> Dataset:
    """Builds groups of chunks to train on: one row, one group (Revela, section 4.1).

    The chunks of every two documents come in the order d11, d21, d12, d22, ... (Fig. 7), and the
    sequence of all chunks is cut into groups. Of two chunks with the same words (in any case) the
    second waits for the next group.

    Args:
        documents: A path (see :func:`read_documents`), or an iterable of strings or of mappings
            with ``text`` and optionally ``code``, such as a ``datasets.Dataset``.
        group_size: Number of chunks in a group, B in the paper.
        max_words: Largest number of words in a chunk, see :func:`chunk`.
        min_words: Smallest number of words in a chunk; shorter chunks are left out.

    Returns:
        A dataset with the columns ``chunks`` (a list of ``group_size`` strings; the last group may
        have fewer, but at least two) and ``code`` (a list of as many bools).

    Raises:
        FileNotFoundError: If there is nothing to read at the path.
        ValueError: If a number is out of range, a file cannot be read, or no group is found.

    Example:
        >>> texts = ["Cats purr a lot. Cats sleep all day.", "Dogs bark. Dogs run very fast."]
        >>> groups = build_groups(texts, group_size=3, max_words=4, min_words=1)
        >>> groups["chunks"][0]  # the fourth chunk alone is not a group
        ['Cats purr a lot.', 'Dogs bark.', 'Cats sleep all day.']
    """
    at_least("group_size", group_size, 2)
    if isinstance(documents, str | Path):
        found = read_documents(documents)
    else:
        found = (as_document(row, f"documents[{i}]") for i, row in enumerate(documents))
    chunked: list[list[Chunk]] = []
    for document in tqdm(found, "Chunking", unit=" documents", disable=None, delay=2):
        pieces = chunk(document["text"], max_words, code=document["code"])
        kept = [piece for piece in pieces if count_words(piece) >= min_words]
        chunked.append([(piece, document["code"]) for piece in kept])
    rows = list(_group(_interleave(chunked), group_size))
    if not rows:
        raise ValueError(
            f"A group needs at least 2 different chunks of {min_words} words, but the "
            f"{len(chunked):,} documents have {sum(map(len, chunked))} of them. Pass more text, or "
            "lower min_words or max_words."
        )
    chunks = [[text for text, _ in row] for row in rows]
    flags = [[code for _, code in row] for row in rows]
    types = Features(chunks=ListOf(Value("string")), code=ListOf(Value("bool")))
    return Dataset.from_dict({"chunks": chunks, "code": flags}, features=types)


def _interleave(documents: Iterable[list[Chunk]]) -> Iterator[Chunk]:
    remaining = (document for document in documents if document)
    while pair := list(islice(remaining, 2)):
        for row in zip_longest(*pair):
            yield from (piece for piece in row if piece is not None)


def _group(chunks: Iterable[Chunk], size: int) -> Iterator[list[Chunk]]:
    """Cuts a sequence into groups of different chunks; a repeated chunk waits for the next group,
    where it comes first."""
    remaining = iter(chunks)
    waiting: dict[str, list[Chunk]] = {}  # equal chunks by their folded text
    while True:
        group: dict[str, Chunk] = {}
        for key in list(islice(waiting, size)):
            group[key] = waiting[key].pop()
            if not waiting[key]:
                del waiting[key]
        while len(group) < size and (piece := next(remaining, None)) is not None:
            key = fold(piece[0])
            if key in group:
                waiting.setdefault(key, []).append(piece)
            else:
                group[key] = piece
        if len(group) < 2:  # no two different chunks are left
            return
        yield list(group.values())


class GroupCollator:
    """Turns groups into a batch, as a ``data_collator`` of sentence-transformers' Trainer.

    For the N chunks of all groups there are ``query_*``, what the retriever's ``preprocess``
    returns for their query parts (see `RevelaLoss`), ``passage_*``, the same for the whole chunks,
    and ``lm_*``: ``input_ids`` and ``attention_mask`` (N, L) of chunks without prefix, padded at
    the end, and ``group`` (N,), the number of each chunk's group in this batch.
    """

    def __init__(
        self,
        preprocess: Callable[..., dict[str, Tensor]],
        lm_tokenizer: PreTrainedTokenizerBase,
        *,
        prefixes: tuple[str, str] = ("Query: ", "Passage: "),
        max_length: int = 160,
    ) -> None:
        self.preprocess = preprocess
        self.lm_tokenizer = lm_tokenizer
        self.prefixes = prefixes
        self.max_length = max_length
        self.valid_label_columns: list[str] = []  # which the Trainer reads; groups have no labels

    def __call__(self, rows: Sequence[Group]) -> dict[str, Tensor]:
        """The batch of rows with ``chunks`` and optionally ``code``; other columns are ignored."""
        parts = zip(("query", "passage", "lm"), self.features(rows), strict=True)
        return {f"{name}_{key}": value for name, part in parts for key, value in part.items()}

    def features(self, rows: Sequence[Group]) -> list[dict[str, Tensor]]:
        for row in rows:
            if not isinstance(row.get("chunks"), list | tuple) or len(row["chunks"]) < 2:
                raise ValueError(
                    f"A row has the columns {sorted(map(str, row))}, but a row must be one group: "
                    "'chunks', a list of at least two strings, as build_groups makes it. The "
                    "trainer would mix rows of single chunks, which ruins training."
                )
        texts = [text for row in rows for text in row["chunks"]]
        sizes = [len(row["chunks"]) for row in rows]
        marks = [row.get("code") or [False] * len(row["chunks"]) for row in rows]
        is_code = [mark for row in marks for mark in row]
        queries = [
            text if whole else first_half(text) for text, whole in zip(texts, is_code, strict=True)
        ]
        before_query, before_passage = self.prefixes
        most = self.max_length
        query = self.preprocess(queries, prompt=before_query, task="query", max_length=most)
        passage = self.preprocess(texts, prompt=before_passage, task="document", max_length=most)
        tokens = self.lm_tokenizer(texts, truncation=True, max_length=most)
        ids = [torch.tensor(row, dtype=torch.long) for row in tokens["input_ids"]]
        masks = [torch.ones_like(row) for row in ids]
        lm = {
            "input_ids": pad_sequence(ids, batch_first=True),
            "attention_mask": pad_sequence(masks, batch_first=True),
            "group": torch.repeat_interleave(torch.tensor(sizes)),
        }
        return [query, passage, lm]

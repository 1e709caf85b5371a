"""Groups of chunks from documents, and batches from groups.

One row of the dataset is one group: chunks that are contextually related (section 4.1 of the paper). A loss sees whole
groups, so a trainer may shuffle rows in any way. It would mix rows of single chunks, which is the paper's "random"
ablation: an nDCG@10 of 3.9 instead of 33.6 (Table 3).
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any

import torch
from datasets import Dataset, Features, IterableDataset, Value
from datasets import Sequence as ListOf
from tqdm import tqdm

from st_magnitude.corpus.chunking import chunk, count_words, fold, split_words
from st_magnitude.corpus.documents import Document, Documents, Files, document_source, iterate_documents
from st_magnitude.data.beir import DataError

__all__ = ["GroupCollator", "build_groups", "split_batch"]

_FEATURES = Features({"chunks": ListOf(Value("string")), "code": ListOf(Value("bool"))})  # type: ignore[arg-type]

Chunk = tuple[str, bool]  # the text, and whether its document is code


@dataclass(frozen=True)
class _Settings:
    group_size: int
    max_words: int
    interleave: int
    min_words: int

    def __post_init__(self) -> None:
        for name, least in (("group_size", 2), ("max_words", 1), ("interleave", 1), ("min_words", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        if self.min_words > self.max_words:
            raise ValueError(
                f"min_words is {self.min_words}, above max_words ({self.max_words}), so no chunk is left; lower it."
            )


def build_groups(
    documents: Documents,
    *,
    group_size: int = 16,
    max_words: int = 120,
    interleave: int = 2,
    min_words: int = 5,
    shuffle_documents: bool = False,
    shuffle_chunks: bool = False,
    seed: int = 0,
    streaming: bool = False,
    num_shards: int = 1,
    progress: bool = True,
) -> Dataset | IterableDataset:
    """Builds groups of chunks to train on: one row, one group (Revela, section 4.1).

    The function takes ``interleave`` documents at a time, puts their chunks in the order d11, d21, ..., dn1, d12, d22,
    ..., and cuts the sequence of all chunks into groups; a group spans several documents where these are short. Two
    chunks with the same words (in any case) are never in one group: the second one waits for the next group.

    Args:
        documents: A path (see :func:`read_documents`), a ``datasets`` dataset with the column ``text``, or an iterable
            of strings, :class:`Document` objects or mappings with a ``text``.
        group_size: Number of chunks in a group, B in the paper.
        max_words: Largest number of words in a chunk, see :func:`chunk`.
        interleave: Number n of documents whose chunks alternate; the paper's example (Fig. 7) has 2.
        min_words: Smallest number of words in a chunk; shorter chunks are left out.
        shuffle_documents: Whether to shuffle the documents first. By default neighbours stay neighbours.
        shuffle_chunks: Whether to put all chunks in a random order, which ruins training (section 5.2).
        seed: Seed for both kinds of shuffling.
        streaming: Whether to return an ``IterableDataset``, which reads, chunks and groups during iteration, in bounded
            memory. With one shard its rows are those of the other kind of dataset. A trainer then needs ``max_steps``
            and, under DDP, ``accelerator_config={"dispatch_batches": False}``.
        num_shards: Number of parts that are grouped separately when streaming, for as many workers.
        progress: Whether to show a progress bar after two seconds.

    Returns:
        A dataset with the columns ``chunks`` (a list of ``group_size`` strings; the last group may have fewer, but is
        left out if it has only one) and ``code`` (a list of as many bools, the same for all chunks of a document).

    Raises:
        ValueError: If a number is out of range, or shuffling is combined with streaming.
        DataError: If a file cannot be read, or fewer than 2 different chunks are left.

    Example:
        >>> cats, dogs = "Cats purr a lot. Cats sleep all day.", "Dogs bark at night. Dogs run very fast."
        >>> groups = build_groups([cats, dogs], group_size=3, max_words=4, min_words=1)
        >>> groups[0]
        {'chunks': ['Cats purr a lot.', 'Dogs bark at night.', 'Cats sleep all day.'], 'code': [False, False, False]}
        >>> len(groups)  # the fourth chunk alone is not a group
        1
    """
    settings = _Settings(group_size, max_words, interleave, min_words)
    if num_shards < 1 or (num_shards > 1 and not streaming):
        raise ValueError(f"num_shards must be 1, or more with streaming=True; got {num_shards}.")
    if streaming and (shuffle_documents or shuffle_chunks):
        raise ValueError(
            "Shuffling needs all documents in memory; use streaming=False, or shuffle the documents first."
        )
    source = document_source(documents)
    if streaming:
        shards = _shards(source, num_shards)
        return IterableDataset.from_generator(
            _stream_rows, features=_FEATURES, gen_kwargs={"shards": shards, "settings": settings}
        )

    counts: Counter[str] = Counter()
    rng = random.Random(seed)
    items: Iterable[Document] = iterate_documents(source)
    items = _shuffled(items, rng) if shuffle_documents else items
    items = tqdm(items, desc="Chunking", unit=" documents", disable=None if progress else True, delay=2)
    chunked = _chunk_documents(items, settings, counts)
    ordered = _shuffled(chain.from_iterable(chunked), rng) if shuffle_chunks else _interleave(chunked, interleave)
    rows = [_columns(row) for row in _group(ordered, group_size)]
    counts["groups"] = len(rows)
    _check_counts(counts, settings)
    return Dataset.from_dict({name: [row[name] for row in rows] for name in _FEATURES}, features=_FEATURES)


def _shuffled(items: Iterable[Any], rng: random.Random) -> list[Any]:
    return rng.sample(kept := list(items), len(kept))


def _columns(group: Sequence[Chunk]) -> dict[str, list[Any]]:
    return {"chunks": [text for text, _ in group], "code": [code for _, code in group]}


def _shards(source: Iterable[Any], number: int) -> list[Iterable[Any]]:
    """Parts of the source, each of which can be iterated over several times."""
    if isinstance(source, Iterator):
        raise DataError(
            f"A {type(source).__name__} is exhausted after one epoch; for streaming, pass a path, a list, or "
            "datasets.IterableDataset.from_generator(your_function)."
        )
    if number == 1:
        return [source]
    if isinstance(source, IterableDataset):
        if source.num_shards < number:
            raise ValueError(f"num_shards={number}, but documents has {source.num_shards} shards; lower it.")
        return [source.shard(number, i) for i in range(number)]
    units = source.names if isinstance(source, Files) else source
    if not isinstance(units, Sequence | Dataset):
        raise ValueError(f"A {type(source).__name__} cannot be split into {number} shards; leave num_shards at 1.")
    if len(units) < number:
        raise ValueError(f"num_shards={number}, but there are {len(units)} documents or files; lower it.")
    if isinstance(units, Dataset):
        return [units.shard(number, i, contiguous=True) for i in range(number)]
    parts = [units[len(units) * i // number : len(units) * (i + 1) // number] for i in range(number)]
    return [Files(source.root, tuple(part), source.strict) if isinstance(source, Files) else part for part in parts]


def _stream_rows(shards: Sequence[Iterable[Any]], settings: _Settings) -> Iterator[dict[str, list[Any]]]:
    for shard in shards:
        counts: Counter[str] = Counter()
        chunked = _chunk_documents(iterate_documents(shard), settings, counts)
        for row in _group(_interleave(chunked, settings.interleave), settings.group_size):
            counts["groups"] += 1
            yield _columns(row)
        _check_counts(counts, settings)


def _chunk_documents(documents: Iterable[Document], settings: _Settings, counts: Counter[str]) -> Iterator[list[Chunk]]:
    for document in documents:
        counts["documents"] += 1
        if not document.text.strip():
            counts["blank"] += 1
            continue
        code = document.is_code
        pieces = chunk(document.text, settings.max_words, code=code)
        kept: list[Chunk] = [(piece, code) for piece in pieces if count_words(piece) >= settings.min_words]
        counts["chunks"] += len(pieces)
        counts["short"] += len(pieces) - len(kept)
        if kept:
            yield kept


def _interleave(documents: Iterable[list[Chunk]], number: int) -> Iterator[Chunk]:
    """Yields d11, d21, ..., dn1, d12, d22, ... of every n documents."""
    remaining = iter(documents)
    while window := list(islice(remaining, number)):
        for row in zip_longest(*window):
            yield from (piece for piece in row if piece is not None)


def _group(chunks: Iterable[Chunk], size: int) -> Iterator[list[Chunk]]:
    """Cuts a sequence into groups without equal chunks; a chunk that is already in the group waits for the next one.

    Waiting chunks come first in the next group, each once. Therefore fewer than two groups of different chunks ever
    wait, however often a chunk repeats, and memory is bounded.
    """
    remaining = iter(chunks)
    waiting: dict[str, tuple[Chunk, int]] = {}  # folded text to chunk and number of copies
    while True:
        group: dict[str, Chunk] = {}
        for key in list(islice(waiting, size)):
            group[key], copies = waiting.pop(key)
            if copies > 1:
                waiting[key] = (group[key], copies - 1)
        while len(group) < size and (piece := next(remaining, None)) is not None:
            key = fold(piece[0])
            if key in group:
                waiting[key] = (piece, waiting[key][1] + 1 if key in waiting else 1)
            else:
                group[key] = piece
        if len(group) < 2:  # no two different chunks are left
            return
        yield list(group.values())


def _check_counts(counts: Counter[str], settings: _Settings) -> None:
    documents, chunks, short = counts["documents"], counts["chunks"], counts["short"]
    if not documents:
        raise DataError("There are no documents; pass at least one text.")
    if counts["blank"] == documents:
        raise DataError(f"All of the {documents:,} texts are empty; check what 'text' holds.")
    if short == chunks:
        raise DataError(
            f"None of the {chunks:,} chunks has {settings.min_words} words; lower min_words, or pass longer texts."
        )
    if not counts["groups"]:
        raise DataError(
            f"A group needs at least 2 different chunks, but the {documents:,} documents have fewer; pass more text, "
            f"or lower max_words (it is {settings.max_words})."
        )
    if short > chunks / 2:
        warnings.warn(
            f"{short:,} of {chunks:,} chunks have fewer than {settings.min_words} words and are left out; "
            "lower min_words to keep them.",
            stacklevel=3,
        )


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------


class GroupCollator:
    """Turns groups into a batch with three sets of features: query, passage and language model.

    Pass the collator as ``data_collator`` to a ``SentenceTransformerTrainer``, whose ``collect_features`` splits the
    batch into [query, passage, lm] for the loss. n groups of B_1, ..., B_n chunks give N = B_1 + ... + B_n texts:

    - ``query_*``: ``query_input_ids`` (N, L) and so on, from ``preprocess`` on the query texts after ``prefixes[0]``.
    - ``passage_*``: the same for the whole chunks after ``prefixes[1]``.
    - ``lm_input_ids``, ``lm_attention_mask`` (N, L): the chunks without prefix, padded on the right.
    - ``lm_group`` (N,): the number of each chunk's group in this batch.

    The query text is the first half of the chunk, as in REPLUG, or the whole chunk if it is code (section 4.1).

    Args:
        preprocess: ``SentenceTransformer.preprocess`` of the retriever.
        lm_tokenizer: Tokenizer of the language model, which is not changed. Without a pad token, its eos token pads.
        prefixes: Prefixes of queries and of passages.
        query_part: ``"half"`` takes the first half of the words (rounded up) of prose and all words of code; ``"full"``
            takes all words of both.
        max_length: Largest number of tokens of a text, including the prefix; models that cannot truncate see all.

    Raises:
        ValueError: If ``query_part`` or ``max_length`` is out of range, or the tokenizer has nothing to pad with.

    Example:
        >>> collator = GroupCollator(model.preprocess, lm_tokenizer)  # doctest: +SKIP
        >>> batch = collator([groups[0], groups[1]])  # doctest: +SKIP
        >>> batch["lm_group"].bincount()  # doctest: +SKIP
        tensor([16, 16])
    """

    def __init__(
        self,
        preprocess: Callable[..., Mapping[str, Any]],
        lm_tokenizer: Any,
        *,
        prefixes: tuple[str, str] = ("Query: ", "Passage: "),
        query_part: str = "half",
        max_length: int = 160,
    ) -> None:
        if query_part not in ("half", "full"):
            raise ValueError(f"query_part must be 'half' or 'full', got {query_part!r}.")
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}.")
        if isinstance(prefixes, str) or len(prefixes) != 2:
            raise ValueError(f"prefixes must be two strings, for queries and for passages, got {prefixes!r}.")
        pad = lm_tokenizer.pad_token_id
        if pad is None:
            pad = lm_tokenizer.eos_token_id
        if pad is None:
            raise ValueError(
                "The tokenizer of the language model has neither a pad nor an eos token; set lm_tokenizer.pad_token."
            )
        self.preprocess = preprocess
        self.lm_tokenizer = lm_tokenizer
        self.prefixes = prefixes
        self.query_part = query_part
        self.max_length = max_length
        self.valid_label_columns: list[str] = []  # the trainer reads this attribute; groups have no labels
        self._pad = int(pad)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The batch of some rows with ``chunks`` and optionally ``code``; other columns are ignored."""
        for number, row in enumerate(features):
            chunks = row.get("chunks")
            if not isinstance(chunks, list | tuple) or len(chunks) < 2 or not all(isinstance(c, str) for c in chunks):
                found = "no 'chunks'" if chunks is None else f"chunks={repr(chunks)[:80]}"
                raise DataError(
                    f"Row {number} of the batch has {found} (its columns: {sorted(map(str, row))}). One row must be "
                    "one group: 'chunks', a list of at least two strings, as build_groups makes it. The trainer would "
                    "mix rows of single chunks, which ruins training."
                )
        code = [row.get("code") or [False] * len(row["chunks"]) for row in features]
        return self.texts_to_batch([list(row["chunks"]) for row in features], code)

    def texts_to_batch(self, chunks: list[list[str]], code: list[list[bool]] | None = None) -> dict[str, Any]:
        """The batch of n groups of texts; ``code`` tells which chunks are code, by default none."""
        sizes = [len(group) for group in chunks]
        if code is not None and [len(group) for group in code] != sizes:
            raise DataError(
                f"code has {[len(group) for group in code]} values per group, but chunks has {sizes}; give one per "
                "chunk."
            )
        texts = list(chain.from_iterable(chunks))
        is_code = list(chain.from_iterable(code)) if code is not None else [False] * len(texts)
        whole = self.query_part == "full"
        queries = [
            text if whole or whole_code else _first_half(text) for text, whole_code in zip(texts, is_code, strict=True)
        ]
        batch: dict[str, Any] = {}
        for name, inputs, prefix in (("query", queries, self.prefixes[0]), ("passage", texts, self.prefixes[1])):
            batch |= {f"{name}_{key}": value for key, value in self._retriever_features(inputs, prefix).items()}
        batch["lm_input_ids"], batch["lm_attention_mask"] = self._lm_features(texts)
        batch["lm_group"] = torch.repeat_interleave(torch.tensor(sizes))
        return batch

    def _retriever_features(self, texts: list[str], prefix: str) -> Mapping[str, Any]:
        try:
            return self.preprocess(texts, prompt=prefix, max_length=self.max_length)
        except TypeError:  # a custom module may not accept max_length
            return self.preprocess(texts, prompt=prefix)

    def _lm_features(self, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        side = getattr(self.lm_tokenizer, "truncation_side", "right")
        try:
            self.lm_tokenizer.truncation_side = "right"  # the call itself has no such argument
            ids = self.lm_tokenizer(texts, truncation=True, max_length=self.max_length, padding=False)["input_ids"]
        finally:
            self.lm_tokenizer.truncation_side = side
        lengths = torch.tensor([len(row) for row in ids])
        width = int(lengths.max())
        input_ids = torch.tensor([[*row, *[self._pad] * (width - len(row))] for row in ids])  # (N, L)
        return input_ids, (torch.arange(width) < lengths[:, None]).long()  # both (N, L)


def split_batch(batch: Mapping[str, Any], device: torch.device | str | None = None) -> list[dict[str, Any]]:
    """Splits a collator's batch into the features of query, passage and language model, as a trainer does for a loss.

    Example:
        >>> split_batch({"query_input_ids": [5], "passage_input_ids": [6], "lm_input_ids": [7], "lm_group": [0]})
        [{'input_ids': [5]}, {'input_ids': [6]}, {'input_ids': [7], 'group': [0]}]
    """
    return [
        {
            key.removeprefix(name): value.to(device) if isinstance(value, torch.Tensor) else value
            for key, value in batch.items()
            if key.startswith(name)
        }
        for name in ("query_", "passage_", "lm_")
    ]


def _first_half(text: str) -> str:
    """The first ceil(n / 2) of n words, with the whitespace before and between them."""
    words = list(split_words(text, (0, len(text))))
    return text[: words[(len(words) - 1) // 2][1]] if words else text

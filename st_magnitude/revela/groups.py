"""Groups of chunks from documents, and batches from groups.

One row of the dataset is one group: chunks that are contextually related (section 4.1 of the paper). A loss sees whole
groups, so a trainer may shuffle rows in any way. It would mix rows of single chunks, which is the paper's "random"
ablation: an nDCG@10 of 3.9 instead of 33.6 (Table 3).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any

import torch
from datasets import Dataset, Features, Value
from datasets import Sequence as ListOf
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from st_magnitude._checks import at_least, one_of
from st_magnitude.revela.documents import Documents, chunk, count_words, fold, iterate_documents, split_words

__all__ = ["GroupCollator", "build_groups", "split_batch"]

_FEATURES = Features({"chunks": ListOf(Value("string")), "code": ListOf(Value("bool"))})  # type: ignore[arg-type]

Chunk = tuple[str, bool]  # the text, and whether its document is code


def build_groups(documents: Documents, *, group_size: int = 16, max_words: int = 120, min_words: int = 5) -> Dataset:
    """Builds groups of chunks to train on: one row, one group (Revela, section 4.1).

    The function takes two documents at a time, puts their chunks in the order d11, d21, d12, d22, ... (Fig. 7), and
    cuts the sequence of all chunks into groups; a group spans several documents where these are short. Two chunks with
    the same words (in any case) are never in one group: the second one waits for the next group.

    Args:
        documents: A path (see :func:`read_documents`), or an iterable of strings or of mappings with ``text`` and
            optionally ``code``, such as a ``datasets.Dataset``.
        group_size: Number of chunks in a group, B in the paper.
        max_words: Largest number of words in a chunk, see :func:`chunk`.
        min_words: Smallest number of words in a chunk; shorter chunks are left out.

    Returns:
        A dataset with the columns ``chunks`` (a list of ``group_size`` strings; the last group may have fewer, but is
        left out if it has only one) and ``code`` (a list of as many bools, the same for all chunks of a document).

    Raises:
        FileNotFoundError: If there is nothing to read at the path.
        ValueError: If a number is out of range, a file cannot be read, or fewer than 2 different chunks are left.

    Example:
        >>> cats, dogs = "Cats purr a lot. Cats sleep all day.", "Dogs bark at night. Dogs run very fast."
        >>> groups = build_groups([cats, dogs], group_size=3, max_words=4, min_words=1)
        >>> groups[0]
        {'chunks': ['Cats purr a lot.', 'Dogs bark at night.', 'Cats sleep all day.'], 'code': [False, False, False]}
        >>> len(groups)  # the fourth chunk alone is not a group
        1
    """
    at_least("group_size", group_size, 2)
    chunked = [
        [(piece, document["code"]) for piece in chunk(document["text"], max_words, code=document["code"])]
        for document in tqdm(iterate_documents(documents), desc="Chunking", unit=" documents", disable=None, delay=2)
    ]
    kept = [[piece for piece in pieces if count_words(piece[0]) >= min_words] for pieces in chunked]
    rows = list(_group(_interleave(kept), group_size))
    number = sum(map(len, chunked))
    short = number - sum(map(len, kept))
    if not rows:
        raise ValueError(
            f"A group needs at least 2 different chunks of {min_words} words, but the {len(chunked):,} documents have "
            f"fewer: {number:,} chunks, {short:,} of them shorter. Pass more text, or lower min_words or max_words."
        )
    if short > number / 2:
        warnings.warn(
            f"{short:,} of {number:,} chunks have fewer than {min_words} words and are left out; lower min_words to "
            "keep them.",
            stacklevel=2,
        )
    columns = {
        "chunks": [[text for text, _ in row] for row in rows],
        "code": [[code for _, code in row] for row in rows],
    }
    return Dataset.from_dict(columns, features=_FEATURES)


def _interleave(documents: Iterable[list[Chunk]]) -> Iterator[Chunk]:
    """Yields d11, d21, d12, d22, ... of every two documents that have chunks."""
    remaining = (document for document in documents if document)
    while pair := list(islice(remaining, 2)):
        for row in zip_longest(*pair):
            yield from (piece for piece in row if piece is not None)


def _group(chunks: Iterable[Chunk], size: int) -> Iterator[list[Chunk]]:
    """Cuts a sequence into groups without equal chunks; a chunk that is already in the group waits for the next one.

    Waiting chunks come first in the next group, each once, so fewer than two groups of different chunks ever wait.
    """
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
    """Turns groups into a batch with three sets of features: query, passage and language model.

    Pass the collator as ``data_collator`` to a ``SentenceTransformerTrainer``, whose ``collect_features`` splits the
    batch into [query, passage, lm] for the loss. n groups of B_1, ..., B_n chunks give N = B_1 + ... + B_n texts:

    - ``query_*``: ``query_input_ids`` (N, L) and so on, from ``preprocess`` on the query texts after ``prefixes[0]``.
    - ``passage_*``: the same for the whole chunks after ``prefixes[1]``.
    - ``lm_input_ids``, ``lm_attention_mask`` (N, L): the chunks without prefix, padded on the right with 0.
    - ``lm_group`` (N,): the number of each chunk's group in this batch.

    The query text is the first half of the chunk, as in REPLUG, or the whole chunk if it is code (section 4.1).

    Args:
        preprocess: ``SentenceTransformer.preprocess`` of the retriever.
        lm_tokenizer: Tokenizer of the language model, which needs no padding token.
        prefixes: Prefixes of queries and of passages.
        query_part: ``"half"`` takes the first half of the words (rounded up) of prose; ``"full"`` takes all words.
        max_length: Largest number of tokens of a text, including the prefix; models that cannot truncate see all.

    Raises:
        ValueError: If ``query_part`` is neither; at a batch, if a row is not a group.
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
        one_of("query_part", query_part, ("half", "full"))
        self.preprocess = preprocess
        self.lm_tokenizer = lm_tokenizer
        self.prefixes = prefixes
        self.query_part = query_part
        self.max_length = max_length
        self.valid_label_columns: list[str] = []  # the trainer reads this attribute; groups have no labels

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The batch of some rows with ``chunks`` and optionally ``code``; other columns are ignored."""
        for row in features:
            if not isinstance(row.get("chunks"), list | tuple) or len(row["chunks"]) < 2:
                raise ValueError(
                    f"A row has the columns {sorted(map(str, row))}, but one row must be one group: 'chunks', a list "
                    "of at least two strings, as build_groups makes it. The trainer would mix rows of single chunks, "
                    "which ruins training."
                )
        texts = [text for row in features for text in row["chunks"]]
        is_code = [flag for row in features for flag in row.get("code") or [False] * len(row["chunks"])]
        queries = [
            text if whole or self.query_part == "full" else _first_half(text)
            for text, whole in zip(texts, is_code, strict=True)
        ]
        batch: dict[str, Any] = {}
        columns = (("query", "query", queries), ("passage", "document", texts))
        for (name, task, inputs), prefix in zip(columns, self.prefixes, strict=True):
            encoded = self.preprocess(inputs, prompt=prefix, task=task, max_length=self.max_length)
            batch |= {f"{name}_{key}": value for key, value in encoded.items()}
        rows = self.lm_tokenizer(texts, truncation=True, max_length=self.max_length, padding=False)["input_ids"]
        ids = [torch.tensor(row, dtype=torch.long) for row in rows]
        batch["lm_input_ids"] = pad_sequence(ids, batch_first=True)
        batch["lm_attention_mask"] = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        batch["lm_group"] = torch.repeat_interleave(torch.tensor([len(row["chunks"]) for row in features]))
        return batch


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

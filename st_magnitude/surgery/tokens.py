"""A tokenizer of a static table that reads a text once."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer

MOST_KNOWN = 500_000  # texts whose tokens are remembered, about 200 MB
OPTIONS = {"add_special_tokens": False}  # with which a static table reads


@contextmanager
def remembered_tokens(model: SentenceTransformer) -> Iterator[None]:
    """Within the block, static tables of a model and of its copies tokenize a text once."""
    with ExitStack() as stack:
        for static in (part for part in model.modules() if isinstance(part, StaticEmbedding)):
            if not isinstance(static.tokenizer, _Remembering):
                stack.callback(setattr, static, "tokenizer", static.tokenizer)
                static.tokenizer = cast(Tokenizer, _Remembering(static.tokenizer))
        yield


class _Encoding(NamedTuple):
    """The ids of a text; what else an encoding has is computed when it is asked for."""

    ids: array[int]
    text: str
    tokenizer: Tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer.encode_batch([self.text], **OPTIONS)[0], name)


class _Remembering:
    """A tokenizer of the package tokenizers that reads a text once, though each epoch, fold and
    candidate has it. Copies share what it remembers, and pickles are the tokenizer itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.known: dict[str, _Encoding] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __deepcopy__(self, _memo: object) -> _Remembering:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self.tokenizer,)

    def encode_batch(self, texts: list[str], *args: Any, **options: Any) -> list[Any]:
        if args or options != OPTIONS:
            return self.tokenizer.encode_batch(texts, *args, **options)
        if len(self.known) > MOST_KNOWN:
            self.known = {}
        new = [text for text in dict.fromkeys(texts) if text not in self.known]
        encoded = self.tokenizer.encode_batch(new, **OPTIONS)
        for text, encoding in zip(new, encoded, strict=True):
            self.known[text] = _Encoding(array("i", encoding.ids), text, self.tokenizer)
        return [self.known[text] for text in texts]

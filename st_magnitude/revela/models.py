"""Language models and decoder retrievers, loaded from folders and from the hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.util import is_sentence_transformer_model
from tokenizers.processors import Sequence as Processors
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["load_lm", "load_retriever"]

_NO_CODE: dict[str, Any] = {"trust_remote_code": False}  # without it, transformers asks at the terminal


@contextmanager
def _named(what: str, name: str | Path) -> Iterator[None]:
    """Puts the model into an error of loading, which does not always name it."""
    try:
        yield
    except OSError as error:
        raise OSError(f"The {what} {str(name)!r} could not be loaded. {error}") from error


def load_lm(name: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal decoder in float32, which leaves the precision to autocast, and its tokenizer.

    Args:
        name: A name on the hub or a folder.

    Raises:
        OSError: If there is no such model.
        ValueError: If the model needs code of its own (``trust_remote_code``); load such a model yourself.
    """
    with _named("language model", name):
        lm = AutoModelForCausalLM.from_pretrained(str(name), dtype=torch.float32, **_NO_CODE)
        return lm, AutoTokenizer.from_pretrained(str(name), **_NO_CODE)


def load_retriever(name: str | Path, max_length: int = 160) -> SentenceTransformer:
    """Loads a SentenceTransformer, or makes one of a bare decoder as the paper does.

    A decoder gets an end-of-text token after each text, whose state is the embedding (section 4.1, as in RepLLaMA).

    Args:
        name: A name on the hub or a folder.
        max_length: Largest number of tokens of a text, for a bare decoder.

    Raises:
        OSError: If there is no such model.
        ValueError: If the tokenizer of a bare decoder has no end-of-text token.
    """
    path = str(name)
    with _named("retriever", name):
        is_whole = is_sentence_transformer_model(path)
        architectures = [] if is_whole else AutoConfig.from_pretrained(path, **_NO_CODE).architectures or []
        if not any(architecture.endswith("ForCausalLM") for architecture in architectures):
            return SentenceTransformer(path)
        transformer = Transformer(path, max_seq_length=max_length)
    _end_texts(transformer.tokenizer)
    return SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension(), "lasttoken")])


def _end_texts(tokenizer: Any) -> None:
    """Makes the tokenizer append its end-of-text token: this is saved, and truncation leaves room for it."""
    if tokenizer.eos_token is None:
        raise ValueError("The decoder's tokenizer has no end-of-text token, whose state would be the embedding.")
    if tokenizer("x")["input_ids"][-1] == tokenizer.eos_token_id:
        return
    end = TemplateProcessing(
        single=f"$A:0 {tokenizer.eos_token}:0",
        pair=f"$A:0 {tokenizer.eos_token}:0 $B:1 {tokenizer.eos_token}:1",
        special_tokens=[(tokenizer.eos_token, tokenizer.eos_token_id)],
    )
    core = tokenizer.backend_tokenizer
    core.post_processor = Processors([core.post_processor, end]) if core.post_processor else end
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

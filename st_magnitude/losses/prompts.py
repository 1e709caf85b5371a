"""Whether the texts of a batch have the prompts of the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sentence_transformers.base.model import BaseModel
from torch import nn

from st_magnitude._upstream import batch_size_of, tokenizer_of
from st_magnitude.losses.keys import Features, tokens_of
from st_magnitude.surgery.raw import prompt_of, unwrapped

logger = logging.getLogger(__name__)


def spelled(features: Features, model: BaseModel) -> list[str]:
    """The B texts of a column of tokens as the model spells them; waits for the device."""
    rows: list[list[int]] = [[] for _ in range(batch_size_of(features))]
    tokens = tokens_of(features)
    assert tokens is not None
    for token, text, place in zip(*(x.tolist() for x in tokens), strict=True):
        if place >= 0:
            rows[text].append(token)
    tokenizer = tokenizer_of(model, features.get("task"))  # of transformers, or of tokenizers
    decode = getattr(tokenizer, "batch_decode", None) or tokenizer.decode_batch
    found: list[str] = decode(rows, skip_special_tokens=True)
    return found


def begins_with_prompt(features: Features, model: BaseModel) -> bool:
    """Whether all texts of a column of tokens begin with the same prompt of the model."""
    texts = spelled(features, model)
    for prompt in filter(None, model.prompts.values()):
        two = model.preprocess(["", "x"], prompt=prompt, task=features.get("task"))
        empty, other = spelled(two, model)
        differ = (i for i, (x, y) in enumerate(zip(empty, other, strict=False)) if x != y)
        place = next(differ, len(empty))  # where a text stands in a chat template
        # empty if all its tokens are special or unknown, which texts do not show either
        begin = empty[:place].strip()
        if all(text.startswith(begin) for text in texts):
            return True
    return False


def warn_without_prompts(columns: Sequence[Features], model: nn.Module, who: str) -> None:
    """Warns if a model puts prompts before texts, and columns, the queries first, have none."""
    model = unwrapped(model)
    if not isinstance(model, BaseModel):
        return
    for number, features in enumerate(columns, start=1):
        role = "query" if number == 1 else "document"
        prompt = prompt_of(model, role)
        # A Transformer notes the length of a prompt; a prompt may also stand in the data.
        if not prompt or "prompt_length" in features or tokens_of(features) is None:
            continue
        if not begins_with_prompt(features, model):
            logger.warning(
                f"encode_{role} puts the prompt {prompt!r} before a text, but text column {number}"
                f" of a batch of {who} begins with no prompt of the model: it trains on other texts"
                " than it will be used with. Give SentenceTransformerTrainingArguments"
                " prompts={column: prompt} for each column of each data set."
            )

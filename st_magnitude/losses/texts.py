"""The texts of a batch, read back from its tokens, and its labels."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from sentence_transformers.base.model import BaseModel
from sentence_transformers.util import get_rank
from torch import Tensor, nn

from st_magnitude._upstream import batch_size_of, tokenizer_of
from st_magnitude.surgery.raw import prompt_of, unwrapped

logger = logging.getLogger(__name__)

Features = Mapping[str, Any]
Labels = Literal["weights", "classes", "teacher"]


@dataclass(frozen=True)
class Texts:
    """The texts and labels of a batch, column by column, as far as the loss depends on them."""

    keys: Sequence[Tensor] = ()  # (B,) each, equal for equal texts; empty if nothing needs them
    bare: Sequence[Tensor] = ()  # (B,) each, keys of the texts without prompts; empty like keys
    guide: Sequence[Tensor] = ()  # (B, Dg) each, the guide's embeddings; empty without a guide
    teacher: Sequence[Tensor] = ()  # (B, T) each, the teacher's embeddings; empty without them
    scores: Tensor | None = None  # (B, n), a teacher's scores of the documents of each row
    classes: Tensor | None = None  # (B,)
    weights: Tensor | None = None  # (B,)
    log_q: Sequence[Tensor] = ()  # (B,) each, of the columns of documents; empty without a prior

    @property
    def numbers(self) -> list[Tensor]:
        """What labels or a teacher say, all of which has to be finite."""
        return [x for x in (self.weights, self.scores, *self.teacher) if x is not None]


def check_labels(
    name: str, kind: Labels | None, labels: Tensor | None, sizes: Sequence[int]
) -> None:
    """Checks that the labels of a batch, with columns of these sizes, are what a loss takes."""
    if kind is None:
        if labels is None:
            return
        raise ValueError(
            f"{name} would train every pair as relevant, whatever its label, but the dataset has a"
            f" column of labels ({labels.dtype}). Train on scores, and on labels 0 and 1, with"
            " SimilarityMSELoss. Or keep the relevant pairs, give texts that are not relevant as a"
            " further column of negatives, and remove the labels:"
            ' dataset.remove_columns("label"). A ranking loss can also read labels as weights of'
            " rows, as classes, or as scores of a teacher: labels='weights', 'classes' or"
            " 'teacher'."
        )
    if labels is None:
        raise ValueError(
            f"{name} has labels={kind!r}, but the dataset has no column 'label' or 'score'."
        )
    shapes: list[tuple[int, ...]] = [(sizes[0],)]
    if kind == "teacher":
        shapes = [(sizes[0], len(sizes) - 1), (sizes[0], len(sizes), labels.shape[-1])]
    fits_type = labels.is_floating_point() == (kind != "classes")
    if tuple(labels.shape) not in shapes or not fits_type:
        what = "whole numbers" if kind == "classes" else "numbers"
        raise ValueError(
            f"{name} with labels={kind!r} takes {what} of shape {' or '.join(map(str, shapes))} for"
            f" this batch; got {labels.dtype} of shape {tuple(labels.shape)}."
        )


def sizes_without_lists(name: str, columns: Sequence[Features], takes_lists: bool) -> list[int]:
    """The numbers of texts of all columns but those of lists, which hold any number of negatives.

    :func:`~st_magnitude.attach` marks such columns, and lays their lists end to end.
    """
    noted = [features.get("num_texts") for features in columns]
    sizes = [batch_size_of(features) for features in columns]
    are_cut = any(number not in (None, x) for number, x in zip(noted, sizes, strict=True))
    has_lists = any(number is not None for number in noted)
    if noted[0] or noted[1] or are_cut or (has_lists and not takes_lists):
        raise ValueError(
            f"{name} takes lists of texts as negatives, in columns after the positives; not of a"
            " stream, not with labels='teacher' or 'doc_to_doc', which ask whose negatives they"
            " are, and on several processes with gather_across_devices='ring' or False. Give each"
            " text a column of its own: negative_1, negative_2, and so on."
        )
    return [size for number, size in zip(noted, sizes, strict=True) if number is None]


def read_labels(texts: Texts, kind: Labels | None, labels: Tensor | None) -> Texts:
    """The texts of a batch with its labels."""
    if kind is None or labels is None:
        return texts
    if kind == "weights":
        return replace(texts, weights=labels)
    if kind == "classes":  # a negative number is no class, and like no other
        return replace(texts, classes=labels.where(labels >= 0, -1 - unlike_all(labels, 0)))
    if labels.ndim == 2:
        return replace(texts, scores=labels)
    return replace(texts, teacher=labels.unbind(dim=1))


def is_plain_text(features: Features) -> bool:
    """Whether a column holds token ids of texts alone, in a chat template or not.

    Images and sound come as numbers with a fraction, next to the tokens that stand for them.
    """
    if "input_ids" not in features or features.get("modality", "text") not in ("text", "message"):
        return False
    media = (name for name, x in features.items() if torch.is_tensor(x) and x.is_floating_point())
    return all("embedding" in name for name in media)  # which a model has added


def tokens_of(features: Features) -> tuple[Tensor, Tensor, Tensor] | None:
    """For each token its id, the number of its text, and its place or -1 for padding: (N,) each.

    None for inputs that are not plain text, and for models without token ids.
    """
    if not is_plain_text(features):
        return None
    ids = features["input_ids"]
    # a StaticEmbedding, or a batch for FlashAttention
    if "offsets" in features or "cu_seq_lens_q" in features:
        starts = features["offsets"] if "offsets" in features else features["cu_seq_lens_q"][:-1]
        tokens = torch.arange(ids.numel(), device=ids.device)
        texts = torch.searchsorted(starts.long(), tokens, right=True) - 1
        return ids.flatten(), texts, tokens - starts[texts]
    if "attention_mask" not in features:
        return None
    mask = features["attention_mask"].long()  # (B, L)
    texts = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
    return ids.flatten(), texts.flatten(), (mask.cumsum(dim=1) * mask - 1).flatten()


def text_keys(features: Features, column: int = 0, start: int | Tensor = 0) -> Tensor:
    """A 64-bit hash of the tokens of each text of a column from place ``start`` on, (B,): padding
    does not change it.

    Inputs without token ids get keys that no other input has, on this rank and all others.
    """
    tokens = tokens_of(features)
    if tokens is None:
        return unlike_all(torch.empty(batch_size_of(features), device=device_of(features)), column)
    ids, texts, places = tokens
    places = places - start
    # A sum over tokens of a mix of id and place: products with odd numbers modulo 2^64, and shifts
    mixed = (ids.long() + 1) * 0x1E3779B97F4A7C15 + places * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 32)) * 0x14D049BB133111EB
    mixed = (mixed ^ (mixed >> 29)).masked_fill(places < 0, 0)
    return mixed.new_zeros(batch_size_of(features)).index_add_(0, texts, mixed)


def bare_keys(columns: Sequence[Features], keys: list[Tensor], model: nn.Module) -> list[Tensor]:
    """The keys of the texts of columns without the prompts whose length a Transformer notes."""
    if not any("prompt_length" in features for features in columns):
        return keys
    found = []
    for column, features in enumerate(columns):
        start = features.get("prompt_length", 0)
        if "prompt_length" not in features and is_plain_text(features):
            # the special tokens with which every text begins, as a prompt does
            tokenizer = tokenizer_of(cast(BaseModel, unwrapped(model)), features.get("task"))
            mask = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
            start = [*mask, 0].index(0)
        elif isinstance(start, Tensor):
            start = start.flatten()[0]
        found.append(text_keys(features, column, start))
    return found


def unlike_all(rows: Tensor, column: int) -> Tensor:
    """Numbers (B,) that nothing else has in the batches of all ranks."""
    return torch.arange(len(rows), device=rows.device) + ((get_rank() << 10 | column) << 32)


def device_of(features: Features) -> torch.device:
    return next(value.device for value in features.values() if isinstance(value, Tensor))


def spelled(features: Features, model: BaseModel) -> list[str]:
    """The B texts of a column as the tokens of the model spell them; waits for the device."""
    tokens = tokens_of(features)
    if tokens is None:
        raise ValueError(
            "A guide with another tokenizer reads texts, but a column of the batch holds other"
            " inputs."
        )
    rows: list[list[int]] = [[] for _ in range(batch_size_of(features))]
    for token, text, place in zip(*(x.tolist() for x in tokens), strict=True):
        if place >= 0:
            rows[text].append(token)
    tokenizer = tokenizer_of(model, features.get("task"))  # of transformers, or of tokenizers
    decode = getattr(tokenizer, "batch_decode", None) or tokenizer.decode_batch
    found: list[str] = decode(rows, skip_special_tokens=True)
    return found


def split_prompt(features: Features, model: BaseModel) -> tuple[str, list[str]]:
    """The prompt of the model with which all texts begin, or "", and the B texts without it and
    without a chat template."""
    texts = spelled(features, model)
    for prompt in sorted({"", *filter(None, model.prompts.values())}, key=len, reverse=True):
        two = model.preprocess(["", "x"], prompt=prompt or None, task=features.get("task"))
        empty, other = spelled(two, model)
        differ = (i for i, (x, y) in enumerate(zip(empty, other, strict=False)) if x != y)
        place = next(differ, len(empty))  # where a text stands in a chat template
        # empty if all its tokens are special or unknown, which texts do not show either
        begin, end = empty[:place].strip(), empty[place:].rstrip()
        if all(text.startswith(begin) for text in texts):
            found = [text[len(begin) :].strip().removesuffix(end) for text in texts]
            return prompt, [text.strip() for text in found]
    return "", texts


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
        if not split_prompt(features, model)[0]:
            logger.warning(
                "encode_%s puts the prompt %r before a text, but text column %d of a batch of %s"
                " begins with no prompt of the model: it trains on other texts than it will be"
                " used with. Give SentenceTransformerTrainingArguments prompts={column: prompt}"
                " for each column of each data set.",
                role,
                prompt,
                number,
                who,
            )

"""What servers do to a model, done here: other poolings, no prompt, modules that are skipped, fewer tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from st_magnitude.modules import ExponentNorm
from st_magnitude.serving.probes import prompt_of
from st_magnitude.surgery.raw import encode_raw, normalizes_output, raw_end

__all__ = ["Change", "LocalModel", "pool_tokens"]

Array = NDArray[np.float64]
POOLINGS = ("mean", "cls", "lasttoken", "max")


@dataclass(frozen=True)
class Change:
    """One way in which a served model differs from the saved one; empty fields mean as saved.

    Attributes:
        prompt: ``"missing"``, ``"twice"`` or ``"other role"``.
        pooling: Pooling mode that is used instead.
        skipped: Names of the modules after the pooling that are left out.
    """

    prompt: str = ""
    pooling: str = ""
    skipped: str = ""


class LocalModel:
    """Embeddings of a model as it was saved, and raw embeddings under a `Change`."""

    def __init__(self, model: SentenceTransformer, batch_size: int = 32) -> None:
        self.model = model
        self._batch_size = batch_size
        self._modules = list(model.children())
        last = self._modules[-1]
        self.exponents = last.similarity.exponents if isinstance(last, ExponentNorm) else None
        self.normalizes = normalizes_output(model, all)
        self._pooling = next((module for module in self._modules if isinstance(module, Pooling)), None)

    @property
    def pooling(self) -> str:
        """The pooling mode; empty without one Pooling of one mode."""
        mode = getattr(self._pooling, "pooling_mode", "")
        return mode if isinstance(mode, str) else ""

    def expected(self, texts: Sequence[str], role: str) -> Array:
        """What ``encode_query`` and ``encode_document`` return: n texts -> (n, D)."""
        encode = self.model.encode_query if role == "query" else self.model.encode_document
        found = encode(list(texts), batch_size=self._batch_size, show_progress_bar=False, convert_to_tensor=True)
        return found.double().cpu().numpy()

    def raw(self, texts: Sequence[str], role: str, change: Change = Change()) -> Array:
        """Raw embeddings of texts under a change: n texts -> (n, D)."""
        own, other = prompt_of(self.model, role), prompt_of(self.model, "document" if role == "query" else "query")
        prompt = {"": own, "missing": "", "twice": own + own, "other role": other}[change.prompt]
        model = self.model
        if self._pooling is not None and (change.pooling or change.skipped):
            place, pooling = self._modules.index(self._pooling), self._pooling
            if change.pooling:
                mode = cast(Any, change.pooling)
                pooling = Pooling(pooling.embedding_dimension, mode, pooling.include_prompt)
            rest = [] if change.skipped else self._modules[place + 1 :]
            model = SentenceTransformer(
                modules=[*self._modules[:place], pooling, *rest],
                device=str(self.model.device),
                truncate_dim=self.model.truncate_dim,
            )
        return encode_raw(model, list(texts), role, self._batch_size, False, prompt=prompt).double().cpu().numpy()

    def changes(self, role: str) -> Iterator[Change]:
        """Changes to try, the likely ones first."""
        own, other = prompt_of(self.model, role), prompt_of(self.model, "document" if role == "query" else "query")
        prompts = [""]
        if own:
            prompts += ["missing", "twice"]
        if other and other != own:
            prompts += ["other role"]
        poolings = ["", *(mode for mode in POOLINGS if mode != self.pooling)] if self.pooling else [""]
        skips = [""]
        if self._pooling is not None:
            middle = self._modules[self._modules.index(self._pooling) + 1 : raw_end(self._modules)]
            skips += [name] if (name := ", ".join(type(module).__name__ for module in middle)) else []
        for skipped in skips:
            yield from (Change(prompt, "", skipped) for prompt in prompts)
            yield from (Change(prompt, pooling, skipped) for pooling in poolings[1:] for prompt in prompts)

    def norm_laws(self, raw_norms: Array, role: str) -> dict[str, Array]:
        """Norms that a served embedding can have, by the name of the finding; the model's own under an empty name."""
        side = 0 if role == "query" else 1
        own = np.ones_like(raw_norms) if self.normalizes else raw_norms
        laws = {"norms lost": np.ones_like(raw_norms)}
        if self.exponents is not None:
            own = raw_norms ** (1 - self.exponents[side])
            laws["role ignored"] = raw_norms ** (1 - self.exponents[1])
            laws["exponent not applied"] = raw_norms
        elif self.normalizes:
            laws["not normalised"] = raw_norms
        return {"": own} | laws

    @contextmanager
    def reading(self, tokens: int) -> Iterator[None]:
        """Within the block, the model reads so many tokens."""
        before = self.model.max_seq_length
        self.model.max_seq_length = tokens
        try:
            yield
        finally:
            self.model.max_seq_length = before


def pool_tokens(mode: str) -> Callable[[Array], Array]:
    """The function that pools the vectors of all tokens of a text, as the model pools them: (tokens, D) -> (D,).

    Raises:
        ValueError: If the mode is not mean, cls, lasttoken or max.
    """
    functions: dict[str, Callable[[Array], Array]] = {
        "mean": lambda rows: rows.mean(axis=0),
        "cls": lambda rows: rows[0],
        "lasttoken": lambda rows: rows[-1],
        "max": lambda rows: rows.max(axis=0),
    }
    if mode not in functions:
        raise ValueError(
            f"This model pools by {mode or 'no Pooling module'!r}, so the vectors of tokens cannot be compared; check "
            "a route that returns pooled embeddings, such as /embed."
        )
    return functions[mode]

"""From served and local vectors to findings: the model is changed here as servers change it.

A change is named only if it explains nearly all texts; otherwise the cause is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from st_magnitude.geometry import norms
from st_magnitude.geometry.arrays import unit_rows
from st_magnitude.serving.fixes import Finding, finding
from st_magnitude.surgery.raw import prompt_of

__all__ = ["LocalModel", "Side", "explain"]

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
SHORT = 24  # tokens; shorter texts are cut nowhere
MODES = ("mean", "cls", "lasttoken", "max")
NEARLY_ALL = 0.9  # share of the short texts that a change has to explain
UNLIKE = 0.05  # relative error beyond weights in int8 (MiniLM: 0.017 to 0.032)
EQUAL = 2e-3  # relative error of texts that are certainly read alike


@dataclass(frozen=True)
class Side:
    """The n texts of one role that the target embedded, without their prompts."""

    role: str
    texts: Sequence[str]
    tokens: NDArray[np.int64]  # number of tokens that the model reads of each text, (n,)
    served: Array  # (n, dimensions of the target)
    expected: Array  # (n, D)


@dataclass(frozen=True)
class Change:
    """One way in which a server can change the model."""

    model: SentenceTransformer
    prompt: str  # before each text
    name: str = ""  # of the finding; empty if all modules run as they were saved
    served: str = ""  # pooling mode that is used, or the modules or the token that are left out


class LocalModel:
    """Embeddings of a model as it was saved, and as servers change it."""

    def __init__(self, model: SentenceTransformer) -> None:
        self.model = model
        limit = getattr(model, "max_seq_length", None)
        self.limit = int(limit) if limit and limit < 10**9 else None  # tokens; None: reads all

    def expected(self, texts: Sequence[str], role: str) -> Array:
        """The result of ``encode_query`` or ``encode_document``: n texts -> (n, D)."""
        return _encode(self.model, texts, role)

    def scores(self, queries: Array, documents: Array) -> Array:
        """The model's similarity: (n, D), (m, D) -> (n, m)."""
        return self.model.similarity(queries, documents).cpu().double().numpy()

    def num_tokens(self, text: str) -> int:
        """The number of tokens that the model reads of a text."""
        features = self.model.preprocess([text])
        if "attention_mask" in features:
            return int(features["attention_mask"].sum())
        return features["input_ids"].numel() if "input_ids" in features else len(text.split())

    def changes(self, role: str) -> Iterator[Change]:
        """The model as it is, and then the changes to try."""
        own = prompt_of(self.model, role)
        prompts = dict.fromkeys([own, "", own + own, *self.model.prompts.values()])
        for changed in self._changed_models():
            yield from (Change(changed[0], prompt or "", *changed[1:]) for prompt in prompts)

    def _changed_models(self) -> Iterator[tuple[SentenceTransformer, str, str]]:
        """The model, and models that differ in their modules, each with its finding."""
        yield self.model, "", ""
        modules: list[Any] = list(self.model.children())

        def made(changed: list[Any]) -> SentenceTransformer:
            return SentenceTransformer(modules=changed, device=str(self.model.device))

        for place, module in enumerate(modules):
            if isinstance(module, Pooling):
                for mode in MODES:
                    dim: int = module.embedding_dimension
                    other = Pooling(dim, mode, module.include_prompt)
                    changed = [*modules[:place], other, *modules[place + 1 :]]
                    if mode != module.pooling_mode:
                        yield made(changed), "pooling", mode
        for end in range(1, len(modules)):
            if not any(isinstance(module, Pooling) for module in modules[end:]):
                left_out = ", ".join(type(module).__name__ for module in modules[end:])
                yield made(modules[:end]), "modules skipped", left_out
        if token := self._end_token():
            yield self.model, "end token missing", token

    @property
    def pooling(self) -> str:
        """The mode of the model's Pooling; empty without one."""
        found = (m.pooling_mode for m in self.model.children() if isinstance(m, Pooling))
        return str(next(found, ""))

    def _end_token(self) -> str:
        """The special token at the end of every text; empty if there is none."""
        tokenizer: Any = getattr(self.model, "tokenizer", None)
        ids = self.model.preprocess(["a"]).get("input_ids")
        if not hasattr(tokenizer, "all_special_ids") or ids is None:
            return ""
        last = int(ids.flatten()[-1])
        return str(tokenizer.decode([last])) if last in tokenizer.all_special_ids else ""


def _encode(model: SentenceTransformer, texts: Sequence[str], role: str, **options: Any) -> Array:
    """Embeddings of texts in a role: n texts -> (n, D)."""
    encode = model.encode_query if role == "query" else model.encode_document
    found = encode(list(texts), convert_to_tensor=True, show_progress_bar=False, **options)
    return found.cpu().double().numpy()


def embed(change: Change, texts: Sequence[str], role: str) -> Array:
    """Embeddings of all dimensions under a change: n texts -> (n, D)."""
    if change.name == "end token missing":
        return np.stack([_without_end(change.model, change.prompt + text) for text in texts])
    with change.model.truncate_embeddings(None):
        return _encode(change.model, texts, role, prompt=change.prompt)


@torch.no_grad()
def _without_end(model: SentenceTransformer, text: str) -> Array:
    """The embedding of a text without its last token: (D,)."""
    read = model.preprocess([text])
    shape = read["input_ids"].shape
    for key, x in read.items():
        if isinstance(x, torch.Tensor):
            read[key] = (x[..., :-1] if x.shape == shape else x).to(model.device)
    return model(read)["sentence_embedding"][0].cpu().double().numpy()


def relative_errors(served: Array, local: Array, by_direction: bool) -> Array:
    """|s - l| / |l| on the dimensions that are served, or of directions; 2 without them: (n,)."""
    if local.shape[1] < served.shape[1]:
        return np.full(len(served), 2.0)
    local = local[:, : served.shape[1]]
    if by_direction:
        served = unit_rows(served)
        local = unit_rows(local)
    return norms(served - local) / np.maximum(norms(local), 1e-30)


def explain(
    local: LocalModel, sides: Sequence[Side], server: str, tolerance: float
) -> tuple[list[Finding], float]:
    """The findings, and the median relative error that is left when all of them are considered."""
    explained = [_explain_side(local, side, server) for side in sides]
    # One finding of each name: the documents, which decide rankings, replace the queries.
    found = [f for findings, _ in explained for f in findings]
    findings = list({(f.name, f.text if f.name == "prompt" else ""): f for f in found}.values())
    errors = np.concatenate([errors for _, errors in explained])
    error = float(np.median(errors))
    if error > tolerance and not any(f.name == "cause unknown" for f in findings):
        findings.append(finding("precision", server, median=error, most=errors.max()))
    return findings, error


def _explain_side(local: LocalModel, side: Side, server: str) -> tuple[list[Finding], Array]:
    """The findings about one role, and the relative errors that they leave of the other texts."""
    change, by_direction, least = _nearest_change(local, side)
    errors = relative_errors(side.served, embed(change, side.texts, side.role), by_direction)
    # More than the precision of the others: cut elsewhere, or read in another way.
    allowed = max(6 * float(np.quantile(errors[side.tokens <= SHORT], 0.25)), EQUAL)
    equal = errors <= min(allowed, UNLIKE)
    if least >= UNLIKE or not equal.any():
        how = f"the relative error is {np.median(errors):.3f} (median of all)."
        return [_unknown(side, equal, how, server)], errors
    # The norm of a query changes no ranking, and cosine sees none.
    count = side.role == "document" and local.model.similarity_fn_name != "cosine"
    norms_lost = by_direction and count
    return _findings(local, side, change, norms_lost, equal, server), errors[equal]


def _nearest_change(local: LocalModel, side: Side) -> tuple[Change, bool, float]:
    """The change that explains the short texts, whether of directions only, and its error."""
    short = side.tokens <= SHORT  # long texts can be cut elsewhere
    served = side.served[short]
    texts = [text for text, is_short in zip(side.texts, short, strict=True) if is_short]
    lengths = norms(served)
    lengths = lengths[lengths > 0]  # a text of unknown words alone may have a zero vector
    are_unit = len(lengths) and np.quantile(np.abs(lengths - 1), NEARLY_ALL) < EQUAL
    ways = [side.role == "query"]  # the norm of a query changes no ranking
    if side.role == "document" and are_unit:
        ways.append(True)
    own = Change(local.model, prompt_of(local.model, side.role))
    nearest = (own, ways[0], 4.0)
    for change in local.changes(side.role):
        vectors = embed(change, texts, side.role)
        for by_direction in ways:
            errors = relative_errors(served, vectors, by_direction)
            error = float(np.quantile(errors, NEARLY_ALL))
            if error < nearest[2] / 2:
                nearest = (change, by_direction, error)
        if nearest[2] < EQUAL / 2:
            break
    return nearest if nearest[2] < UNLIKE else (own, ways[0], nearest[2])


def _unknown(side: Side, equal: Mask, how: str, server: str) -> Finding:
    """The finding about the texts that are not ``equal``."""
    who = "queries" if side.role == "query" else "documents"
    counts = {"count": int((~equal).sum()), "total": len(equal), "who": who}
    example = side.texts[int((~equal).argmax())][:40]
    return finding("cause unknown", server, example=example, how=how, **counts)


def _findings(
    local: LocalModel, side: Side, change: Change, norms_lost: bool, equal: Mask, server: str
) -> list[Finding]:
    """The findings about a role that a change explains where ``equal``."""
    expected = norms(side.expected)
    first = int(side.tokens[~equal].min(initial=10**9))
    details: dict[str, Any] = {
        "who": "queries" if side.role == "query" else "documents",
        "role": side.role,
        "prompt": prompt_of(local.model, side.role),
        "sent": change.prompt,
        "served": change.served,
        "pooling": local.pooling,
        "dim": side.served.shape[1],
        "full": side.expected.shape[1],
        "expected": f"{expected.min():.3f} to {expected.max():.3f}",
        "median": np.median(norms(side.served)),
        "limit": local.limit,
        "first": first,
    }
    names = [change.name] if change.name else []
    if change.prompt != details["prompt"]:
        names.append("prompt")
    if details["dim"] != details["full"] and change.name != "modules skipped":
        names.append("dimensions")
    if norms_lost:
        names.append("norms lost")
    unknown = []
    if not equal.all():
        if not local.limit or first < max(SHORT + 1, side.tokens[equal].max()):
            unknown.append(_unknown(side, equal, "the others agree.", server))
        elif change.name != "end token missing" or first < local.limit:  # which leaves room for one
            names.append("truncation")
    return [finding(name, server, **details) for name in names] + unknown

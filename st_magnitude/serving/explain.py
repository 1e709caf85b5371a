"""From served and local vectors to findings: the model is changed here as servers change it.

A change is named only if it explains nearly all texts; otherwise the cause is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from st_magnitude.evaluation.metrics import are_unit
from st_magnitude.geometry import norms
from st_magnitude.geometry.arrays import unit_rows
from st_magnitude.modules import ExponentNorm
from st_magnitude.serving.fixes import Finding, finding
from st_magnitude.surgery.raw import (
    encode_raw,
    normalizes_output,
    prompt_of,
    raw_embeddings,
    raw_end,
)

__all__ = ["LocalModel", "Side", "explain"]

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
SHORT = 24  # tokens; shorter texts are cut nowhere
MODES = ("mean", "cls", "lasttoken", "max")
NEARLY_ALL = 0.9  # share of the short texts that a change has to explain
UNLIKE = 0.05  # error of directions beyond weights in int8 (MiniLM: 0.017 to 0.032)
EQUAL = 2e-3  # error of directions that texts have which are certainly read alike


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

    prompt: str  # before each text
    name: str = ""  # of the finding about the modules; empty if all run as they were saved
    served: str = ""  # pooling mode that is used, or the modules or the token that are left out


class LocalModel:
    """Embeddings of a model as it was saved, and raw embeddings under a `Change`."""

    def __init__(self, model: SentenceTransformer) -> None:
        self.model = model
        self._modules = modules = list(model.children())
        last = modules[-1]
        self.exponents = last.similarity.exponents if isinstance(last, ExponentNorm) else None
        limit = getattr(model, "max_seq_length", None)
        self.limit = int(limit) if limit and limit < 10**9 else None  # tokens; None: reads all
        places = [i for i, module in enumerate(modules) if isinstance(module, Pooling)]
        self._place = places[0] if places else len(modules)
        mode = getattr(modules[places[0]], "pooling_mode", "") if places else ""
        self.pooling = mode if isinstance(mode, str) else ""  # empty without a Pooling of one mode

    def expected(self, texts: Sequence[str], role: str) -> Array:
        """The result of ``encode_query`` or ``encode_document``: n texts -> (n, D)."""
        encode = self.model.encode_query if role == "query" else self.model.encode_document
        return encode(texts, convert_to_tensor=True, show_progress_bar=False).cpu().double().numpy()

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
        prompts = dict.fromkeys([own, "", own + own, *(self.model.prompts.values())])
        kinds = [("", "")]
        if self.pooling:
            kinds += [("pooling", mode) for mode in MODES if mode != self.pooling]
        after = self._modules[self._place + 1 : raw_end(self._modules)]
        if after:
            kinds.append(("modules skipped", ", ".join(type(m).__name__ for m in after)))
        if token := self._end_token():
            kinds.append(("end token missing", token))
        return (Change(prompt or "", *kind) for kind in kinds for prompt in prompts)

    def _end_token(self) -> str:
        """The special token at the end of every text; empty if there is none."""
        tokenizer: Any = getattr(self.model, "tokenizer", None)
        ids = self.model.preprocess(["a"]).get("input_ids")
        if not hasattr(tokenizer, "all_special_ids") or ids is None:
            return ""
        last = int(ids.flatten()[-1])
        return str(tokenizer.decode([last])) if last in tokenizer.all_special_ids else ""

    def raw(self, texts: Iterable[str], role: str, change: Change) -> Array:
        """Raw embeddings of all dimensions under a change: n texts -> (n, D)."""
        if change.name == "end token missing":
            return self._raw_without_end(texts, change.prompt)
        model = self.model
        if change.name:
            before, rest = self._modules[: self._place], self._modules[self._place + 1 :]
            pooling: Any = self._modules[self._place]
            if change.name == "pooling":
                mode: Any = change.served
                pooling = Pooling(pooling.embedding_dimension, mode, pooling.include_prompt)
            else:
                rest = []
            model = SentenceTransformer(modules=[*before, pooling, *rest], device=str(model.device))
        options: Any = {"prompt": change.prompt, "show_progress_bar": False}
        with model.truncate_embeddings(None):
            return encode_raw(model, list(texts), role, **options).cpu().double().numpy()

    @torch.no_grad()
    def _raw_without_end(self, texts: Iterable[str], prompt: str) -> Array:
        """Raw embeddings of texts without their last token, each alone: n texts -> (n, D)."""
        rows = []
        with raw_embeddings(self.model):
            for text in texts:
                read = self.model.preprocess([prompt + text])
                shape = read["input_ids"].shape
                tensors = {key: x for key, x in read.items() if isinstance(x, torch.Tensor)}
                for key, x in tensors.items():
                    x = x[..., :-1] if x.shape == shape else x
                    read[key] = x.to(self.model.device)
                rows.append(self.model(read)["sentence_embedding"][0].cpu().double().numpy())
        return np.stack(rows)

    def norm_laws(self, raw: Array, side: Side) -> dict[str, Array]:
        """Norms of what is served, by finding: (n, D) -> (n,) each; the model's own under ""."""
        ones = np.ones(len(raw))
        came = norms(raw[:, : side.served.shape[1]])
        laws = {"": came, "norms lost": ones}
        if self.exponents is not None:
            own = came ** (1 - self.exponents[side.role == "document"])
            role_ignored = came ** (1 - self.exponents[1])
            laws |= {"": own, "role ignored": role_ignored, "exponent not applied": came}
        elif normalizes_output(self.model, all):
            cut = came / np.maximum(norms(raw), 1e-30)  # truncate_dim cuts after Normalize
            own = ones if are_unit(norms(side.expected)) else cut
            laws |= {"": own, "dimensions": cut, "not normalised": came}
        return laws


def direction_errors(served: Array, local: Array) -> Array:
    """|s / |s| - l / |l||, on the dimensions that are served: (n, D), (n, >= D) -> (n,)."""
    return norms(unit_rows(served) - unit_rows(local[:, : served.shape[1]]))


def norm_law(served: Array, laws: Mapping[str, Array]) -> str | None:
    """The law that nearly all norms follow: a finding, "" for the model's own, None for no law.

    Example:
        >>> norm_law(np.array([1.0, 1.0]), {"": np.array([4.0, 6.0]), "norms lost": np.ones(2)})
        'norms lost'
    """
    alive = laws[""] > 1e-12  # a text without a known word has a zero vector
    if not alive.any():
        return ""
    errors = {
        name: float(np.quantile(np.abs(served[alive] / law[alive] - 1), NEARLY_ALL))
        for name, law in laws.items()
    }
    nearest = min(errors, key=errors.__getitem__)
    if errors[nearest] >= UNLIKE:
        return None
    return "" if errors[""] < EQUAL else nearest


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
    served, role = side.served, side.role
    dim, full = served.shape[1], side.expected.shape[1]
    own = Change(prompt_of(local.model, role))
    if dim > local.raw(side.texts[:1], role, own).shape[1]:
        how = f"they have {dim} dimensions, the model has {full}."
        return [_unknown(side, np.zeros(len(served), bool), how, server)], np.full(len(served), 2.0)

    short = side.tokens <= SHORT  # long texts can be cut elsewhere
    texts = [text for text, is_short in zip(side.texts, short, strict=True) if is_short]
    change, least = own, 4.0
    for tried in local.changes(role):
        errors = direction_errors(served[short], local.raw(texts, role, tried))
        error = float(np.quantile(errors, NEARLY_ALL))
        if error < least / 2:
            change, least = tried, error
        if least < EQUAL / 2:
            break
    change = change if least < UNLIKE else own
    raw = local.raw(side.texts, role, change)
    errors = direction_errors(served, raw)
    # More than the precision of the others: cut elsewhere, or read in another way.
    allowed = max(6 * float(np.quantile(errors[short], 0.25)), EQUAL)
    equal = errors <= min(allowed, UNLIKE)
    if least >= UNLIKE or not equal.any():
        how = f"directions differ by {np.median(errors):.3f} (median of all)."
        return [_unknown(side, equal, how, server)], errors

    laws = {name: rows[equal] for name, rows in local.norm_laws(raw, side).items()}
    law = norm_law(norms(served[equal]), laws)
    findings = _findings(local, side, change, equal, law, server)
    if law is None:
        return findings, errors[equal]
    target = unit_rows(raw[equal, :dim]) * laws[law][:, None]
    return findings, norms(served[equal] - target) / np.maximum(laws[law], 1e-30)


def _unknown(side: Side, equal: Mask, how: str, server: str) -> Finding:
    """The finding about the texts that are not ``equal``."""
    who = "queries" if side.role == "query" else "documents"
    counts = {"count": int((~equal).sum()), "total": len(equal), "who": who}
    example = side.texts[int((~equal).argmax())][:40]
    return finding("cause unknown", server, example=example, how=how, **counts)


def _findings(
    local: LocalModel, side: Side, change: Change, equal: Mask, law: str | None, server: str
) -> list[Finding]:
    """The findings about a role that a change and a law of norms explain where ``equal``."""
    came, own = norms(side.served), norms(side.expected)
    details: dict[str, Any] = {
        "who": "queries" if side.role == "query" else "documents",
        "role": side.role,
        "prompt": prompt_of(local.model, side.role),
        "sent": change.prompt,
        "served": change.served,
        "pooling": local.pooling,
        "dim": side.served.shape[1],
        "full": side.expected.shape[1],
        "norms": f"{came.min():.3f} to {came.max():.3f}",
        "expected": f"{own.min():.3f} to {own.max():.3f}",
        "median": np.median(came),
        "exponents": local.exponents or (0.0, 0.0),
        "limit": local.limit,
    }
    names = [change.name] if change.name else []
    if change.prompt != details["prompt"]:
        names.append("prompt")
    if details["dim"] != details["full"] and change.name != "modules skipped":
        names.append("dimensions")
    if law and law != "dimensions":
        names.append(law)
    unknown = []
    if law is None:
        how = f"norms are {details['norms']}, the model's {details['expected']}."
        unknown.append(_unknown(side, np.zeros_like(equal), how, server))
    elif not equal.all():
        first = details["first"] = int(side.tokens[~equal].min())
        if not local.limit or first < max(SHORT + 1, side.tokens[equal].max()):
            unknown.append(_unknown(side, equal, "the others agree.", server))
        elif change.name != "end token missing" or first < local.limit:  # which leaves room for one
            names.append("truncation")
    findings = [finding(name, server, **details) for name in names] + unknown
    if local.model.similarity_fn_name != "cosine":
        return findings
    seen = " The model is scored by cosine, which does not see norms."
    return [
        Finding(f.name, f.text + seen, "", matters=False) if f.name == "norms lost" else f
        for f in findings
    ]

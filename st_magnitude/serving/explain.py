"""From served and local vectors to findings: the model is changed here as servers change it, and compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from st_magnitude.geometry import norms
from st_magnitude.geometry.arrays import unit_rows
from st_magnitude.modules import ExponentNorm
from st_magnitude.serving.advice import POOLING_NAMES, Finding, describe
from st_magnitude.surgery.raw import encode_raw, normalizes_output, prompt_of, raw_end

__all__ = ["LocalModel", "Side", "explain"]

Array = NDArray[np.float64]
SHORT = 24  # tokens; shorter texts are truncated nowhere
POOLINGS = ("mean", "cls", "lasttoken", "max")
CLOSE = 0.02  # error of directions that numbers of few digits explain
UNLIKE = 0.05  # error of directions beyond weights in int8 (MiniLM: 0.017 to 0.032; three steps of training: 0.036)
MOVED = 0.01  # shift of norms that training leaves at such an error of directions, and rounding does not
PROMPTS = {"missing": "prompt missing", "twice": "prompt twice", "other": "prompt of the other role"}


@dataclass(frozen=True)
class Side:
    """The n texts of one role without their prompts, and their vectors from the target and from the model."""

    role: str
    texts: NDArray[np.object_]  # (n,)
    tokens: NDArray[np.int64]  # number of tokens that the model reads of each text, (n,)
    served: Array  # nan where the target refused a text, (n, dimensions of the target)
    expected: Array  # (n, D)

    @property
    def who(self) -> str:
        return "queries" if self.role == "query" else "documents"

    @property
    def came(self) -> NDArray[np.bool_]:
        """Whether the target embedded each text: (n,)."""
        return np.asarray(np.isfinite(self.served).all(axis=1))

    def answered(self) -> Side:
        """This side without the texts that were refused."""
        came = self.came
        return Side(self.role, self.texts[came], self.tokens[came], self.served[came], self.expected[came])


@dataclass(frozen=True)
class Change:
    """One way in which a served model differs from the saved one; empty fields mean as saved."""

    prompt: str = ""  # a key of PROMPTS
    pooling: str = ""  # mode that is used instead
    skipped: str = ""  # names of the modules after the pooling, which are left out


class LocalModel:
    """Embeddings of a model as it was saved, and raw embeddings under a `Change`."""

    def __init__(self, model: SentenceTransformer) -> None:
        modules = list(model.children())
        self.model, self._modules, last = model, modules, modules[-1]
        self.exponents = last.similarity.exponents if isinstance(last, ExponentNorm) else None
        self.normalizes = normalizes_output(model, all)
        limit = getattr(model, "max_seq_length", None)
        self.limit = int(limit) if limit and limit < 10**9 else None  # tokens that it reads; None if it reads all
        self._place = next((i for i, module in enumerate(modules) if isinstance(module, Pooling)), len(modules))
        mode = getattr(modules[self._place], "pooling_mode", "") if self._place < len(modules) else ""
        self.pooling = mode if isinstance(mode, str) else ""  # empty without one Pooling of one mode

    def expected(self, texts: Iterable[str], role: str) -> Array:
        """The result of ``encode_query`` or ``encode_document``: n texts -> (n, D)."""
        encode = self.model.encode_query if role == "query" else self.model.encode_document
        return encode(list(texts), convert_to_tensor=True, show_progress_bar=False).cpu().double().numpy()

    def scores(self, queries: Array, documents: Array) -> Array:
        """The model's similarity: (n, D), (m, D) -> (n, m)."""
        return self.model.similarity(queries, documents).cpu().double().numpy()

    def raw(self, texts: Iterable[str], role: str, change: Change) -> Array:
        """Raw embeddings of texts under a change: n texts -> (n, D)."""
        model, place = self.model, self._place
        if change.pooling or change.skipped:
            pooling: Any = self._modules[place]
            if change.pooling:
                mode: Any = change.pooling
                pooling = Pooling(pooling.embedding_dimension, mode, pooling.include_prompt)
            modules = [*self._modules[:place], pooling, *([] if change.skipped else self._modules[place + 1 :])]
            model = SentenceTransformer(modules=modules, device=str(model.device), truncate_dim=model.truncate_dim)
        prompt = self._prompts(role)[change.prompt]
        return encode_raw(model, list(texts), role, prompt=prompt, show_progress_bar=False).cpu().double().numpy()

    def changes(self, role: str) -> Iterator[Change]:
        """Changes to try, the likely ones first."""
        poolings = ["", *(mode for mode in POOLINGS if mode != self.pooling)] if self.pooling else [""]
        after = self._modules[self._place + 1 : raw_end(self._modules)]
        skips = ["", ", ".join(type(module).__name__ for module in after)] if after else [""]
        return (Change(prompt, pool, skip) for skip in skips for pool in poolings for prompt in self._prompts(role))

    def _prompts(self, role: str) -> dict[str, str]:
        own = prompt_of(self.model, role)
        other = prompt_of(self.model, "document" if role == "query" else "query")
        found = {"": own} | ({"missing": "", "twice": own + own} if own else {})
        return found | ({"other": other} if other and other != own else {})

    def norm_laws(self, raw_norms: Array, role: str) -> dict[str, Array]:
        """Norms that a served embedding can have, by the name of the finding; the model's own under an empty name."""
        own = np.ones_like(raw_norms) if self.normalizes else raw_norms
        laws = {"norms lost": np.ones_like(raw_norms)}
        if self.exponents is not None:
            own = raw_norms ** (1 - self.exponents[role == "document"])
            laws["role ignored"] = raw_norms ** (1 - self.exponents[1])
            laws["exponent not applied"] = raw_norms
        elif self.normalizes:
            laws["not normalised"] = raw_norms
        return {"": own} | laws


def direction_errors(served: Array, local: Array) -> Array:
    """|s / |s| - l / |l||, on the dimensions that are served: (n, D), (n, >= D) -> (n,) in [0, 2]."""
    return norms(unit_rows(served) - unit_rows(local[:, : served.shape[1]]))


def nearest_change(served: Array, candidates: Iterable[tuple[Change, Array]]) -> Change | None:
    """The change whose directions are nearest by the median error; None if all have too few dimensions.

    The first candidate is the model as it is. It is taken if it is close, and another candidate must halve its error.
    """
    best: Change | None = None
    least = 4.0
    for change, rows in candidates:
        if rows.shape[1] < served.shape[1]:
            continue
        error = float(np.median(direction_errors(served, rows)))
        if error < least / 2 or best is None:
            best, least = change, error
        if least < CLOSE:
            break
    return best


def norm_law(served: Array, laws: Mapping[str, Array]) -> tuple[str, float]:
    """The law that norms follow, and its factor: "" for the model's own, or "norms scaled" or "norms differ".

    Example:
        >>> norm_law(np.array([1.0, 1.0]), {"": np.array([4.0, 6.0]), "norms lost": np.array([1.0, 1.0])})
        ('norms lost', 1.0)
    """
    alive = laws[""] > 1e-12  # a text without a known word has a zero vector
    if not alive.any():
        return "", 1.0
    served, laws = served[alive], {name: law[alive] for name, law in laws.items()}
    errors = {name: float(np.median(np.abs(served / law - 1))) for name, law in laws.items()}
    nearest = min(errors, key=errors.__getitem__)
    if errors[nearest] < 0.03:
        return ("" if errors[""] < 1e-3 else nearest), 1.0
    ratios = served / laws[""]
    factor = float(np.median(ratios))
    if factor > 0 and float(np.median(np.abs(ratios / factor - 1))) < 0.01:
        return "norms scaled", factor
    return "norms differ", 1.0


def explain(
    local: LocalModel, sides: Sequence[Side], server: str, tolerance: float, refusal: str
) -> tuple[list[Finding], float]:
    """The findings, and the median relative error that is left when all of them are taken into account.

    ``server`` is its kind, and ``refusal`` its message for the first text that it refused; both may be empty.
    """
    explained = [_explain_side(local, side.answered(), server) for side in sides]
    # One finding of each name: the documents, which decide rankings, come last and replace the queries.
    found = [finding for side, _ in explained for finding in side]
    findings = list({(f.name, f.text if "prompt" in f.name else ""): f for f in found}.values())
    if refusal:
        tokens = np.concatenate([side.tokens[~side.came] for side in sides])
        texts = f"{len(tokens)} of {sum(len(side.texts) for side in sides)} texts"
        details = {"texts": texts, "shortest": tokens.min(), "said": refusal, "limit": local.limit or tokens.min()}
        findings.append(describe("refused", server, **details))
    errors = np.concatenate([errors for _, errors in explained])
    error = float(np.median(errors))
    if error > tolerance and not any(finding.name == "another model" for finding in findings):
        findings.append(describe("precision", server, median=error, most=errors.max()))
    return findings, error


def _explain_side(local: LocalModel, side: Side, server: str) -> tuple[list[Finding], Array]:
    """The findings, and the errors of the texts that they explain: relative, or of directions for another model."""
    served, role, dim, short = side.served, side.role, side.served.shape[1], side.tokens <= SHORT

    # Long texts can be cut elsewhere, so the short ones say what else the server does to the model.
    candidates = ((change, local.raw(side.texts[short], role, change)) for change in local.changes(role))
    change = nearest_change(served[short], candidates)
    if change is None:
        how = f"they have {dim} dimensions, the model {side.expected.shape[1]}."
        return [describe("another model", server, who=side.who, how=how)], np.full(len(served), 2.0)
    raw = local.raw(side.texts, role, change)[:, :dim]
    errors = direction_errors(served, raw)
    # Rows whose error is not explained by the precision of the others: cut elsewhere, or split into other tokens.
    equal = errors <= max(6 * float(np.quantile(errors[short], 0.25)), 2e-3)
    laws = local.norm_laws(norms(raw), role)
    law, factor = norm_law(norms(served)[equal], {name: rows[equal] for name, rows in laws.items()})
    ratio = float(np.median(norms(served)[equal]) / max(np.median(laws[""][equal]), 1e-30))
    # Rounding of the weights turns directions a little and leaves the norms. Training changes both.
    error, moved = np.median(errors[equal]), law in ("", "norms scaled", "norms differ") and abs(ratio - 1) > MOVED
    if error >= UNLIKE or (error >= CLOSE and moved):
        more = f", and norms are {ratio:.3f} times the model's." if moved else f"; weights in int8 explain {UNLIKE}."
        how = f"directions differ by {error:.3f} (median){more}"
        return [describe("another model", server, who=side.who, how=how)], errors

    findings = _findings(local, side, change, equal, law, factor, server)
    target = unit_rows(raw) * (laws[law] if law in laws else laws[""] * factor)[:, None]
    relative = errors if law == "norms differ" else norms(served - target) / np.maximum(norms(target), 1e-30)
    return findings, relative[equal]


def _findings(
    local: LocalModel, side: Side, change: Change, equal: NDArray[np.bool_], law: str, factor: float, server: str
) -> list[Finding]:
    """The findings about a side whose vectors a change and a law of norms explain, but for the texts not ``equal``."""
    came, own, limit = norms(side.served), norms(side.expected), local.limit
    query, document = local.exponents or (0.0, 0.0)
    dim, full = side.served.shape[1], side.expected.shape[1]
    details: dict[str, Any] = {"who": side.who, "role": side.role, "prompt": prompt_of(local.model, side.role)}
    details |= {"served": change.pooling, "pooling": local.pooling, "skipped": change.skipped, "dim": dim, "full": full}
    details |= {"norms": f"{came.min():.3f} to {came.max():.3f}", "expected": f"{own.min():.3f} to {own.max():.3f}"}
    details |= {"median": np.median(came), "factor": factor, "gamma_query": query, "gamma_document": document}
    names = [PROMPTS[change.prompt]] if change.prompt else []
    names += ["modules skipped"] if change.skipped else ["dimensions"] if dim < full else []
    if not equal.all():  # long texts because of another limit, others because of another tokenizer
        first, example = int(side.tokens[~equal].min()), side.texts[equal.argmin()][:40]
        is_limit = limit is not None and side.tokens[equal].max(initial=0) <= first and first > SHORT
        names.append("truncation" if is_limit else "tokenizer")
        details |= {"first": first, "limit": limit, "example": example, "count": (~equal).sum(), "total": len(equal)}
    names += [law] if law else []
    findings = [describe(name, server, **details) for name in names]
    if change.pooling:
        known = POOLING_NAMES.get(local.pooling, {})
        findings.insert(0, describe("pooling", server if known else "", **details, **known))
    if law == "norms lost" and local.model.similarity_fn_name == "cosine":
        text = findings[-1].text + " The model is scored by cosine, which does not see norms."
        findings[-1] = Finding(law, text, fix="", matters=False)
    return findings

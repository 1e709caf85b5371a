"""From served and local vectors to findings: the model is changed here as servers change it, and compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from st_magnitude.geometry import norms
from st_magnitude.geometry.arrays import unit_rows
from st_magnitude.modules import ExponentNorm
from st_magnitude.serving.advice import POOLING_NAMES, Finding, describe
from st_magnitude.surgery.raw import encode_raw, normalizes_output, raw_end

__all__ = ["LocalModel", "Probe", "Side", "explain", "max_tokens", "prompt_of"]

Array = NDArray[np.float64]
SHORT = 24  # tokens; shorter texts are truncated nowhere
POOLINGS = ("mean", "cls", "lasttoken", "max")
CLOSE = 0.02  # error of directions that numbers of few digits explain
UNLIKE = 0.05  # error of directions beyond weights in int8 (MiniLM: 0.017 to 0.032; three steps of training: 0.036)
MOVED = 0.01  # shift of norms that training leaves at such an error of directions, and rounding does not
PROMPTS = {"": "as saved", "missing": "prompt missing", "twice": "prompt twice", "other": "prompt of the other role"}


@dataclass(frozen=True)
class Probe:
    """A text without its prompt, its role, and the number of tokens that the model reads of it."""

    text: str
    role: str
    tokens: int


@dataclass(frozen=True)
class Side:
    """The n probes of one role, and their vectors: those of the target, nan where it refused a text, and our own."""

    role: str
    probes: Sequence[Probe]
    served: Array  # (n, dimensions of the target)
    expected: Array  # (n, D)

    @property
    def came(self) -> NDArray[np.bool_]:
        """Whether the target embedded each text: (n,)."""
        return np.asarray(np.isfinite(self.served).all(axis=1))

    def answered(self) -> Side:
        """This side without the texts that were refused."""
        probes = [probe for probe, came in zip(self.probes, self.came, strict=True) if came]
        return Side(self.role, probes, self.served[self.came], self.expected[self.came])


@dataclass(frozen=True)
class Change:
    """One way in which a served model differs from the saved one; empty fields mean as saved.

    Attributes:
        prompt: A key of `PROMPTS`.
        pooling: Pooling mode that is used instead.
        skipped: Names of the modules after the pooling that are left out.
    """

    prompt: str = ""
    pooling: str = ""
    skipped: str = ""

    def __str__(self) -> str:
        parts = [PROMPTS[self.prompt], f"{self.pooling} pooling" if self.pooling else ""]
        parts += [f"without {self.skipped}" if self.skipped else ""]
        return ", ".join(part for part in parts if part)


class LocalModel:
    """Embeddings of a model as it was saved, and raw embeddings under a `Change`."""

    def __init__(self, model: SentenceTransformer) -> None:
        self.model = model
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
        """The result of ``encode_query`` or ``encode_document``: n texts -> (n, D)."""
        encode = self.model.encode_query if role == "query" else self.model.encode_document
        return encode(list(texts), convert_to_tensor=True, show_progress_bar=False).cpu().double().numpy()

    def raw(self, texts: Sequence[str], role: str, change: Change) -> Array:
        """Raw embeddings of texts under a change: n texts -> (n, D)."""
        model = self.model
        if self._pooling is not None and (change.pooling or change.skipped):
            place, pooling = self._modules.index(self._pooling), self._pooling
            if change.pooling:
                mode: Any = change.pooling
                pooling = Pooling(pooling.embedding_dimension, mode, pooling.include_prompt)
            rest = [] if change.skipped else self._modules[place + 1 :]
            model = SentenceTransformer(
                modules=[*self._modules[:place], pooling, *rest],
                device=str(self.model.device),
                truncate_dim=self.model.truncate_dim,
            )
        prompt = self._prompts(role)[change.prompt]
        return encode_raw(model, list(texts), role, prompt=prompt, show_progress_bar=False).cpu().double().numpy()

    def changes(self, role: str) -> Iterator[Change]:
        """Changes to try, the likely ones first."""
        poolings = ["", *(mode for mode in POOLINGS if mode != self.pooling)] if self.pooling else [""]
        skips = [""]
        if self._pooling is not None:
            middle = self._modules[self._modules.index(self._pooling) + 1 : raw_end(self._modules)]
            skips += [", ".join(type(module).__name__ for module in middle)] if middle else []
        return (Change(prompt, pool, skip) for skip in skips for pool in poolings for prompt in self._prompts(role))

    def _prompts(self, role: str) -> dict[str, str]:
        own, other = prompt_of(self.model, role), prompt_of(self.model, "document" if role == "query" else "query")
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


def max_tokens(model: SentenceTransformer) -> int | None:
    """The number of tokens that a model reads, or None if it reads all."""
    limit = getattr(model, "max_seq_length", None)
    return int(limit) if limit and limit < 10**9 else None


def prompt_of(model: SentenceTransformer, role: str) -> str:
    """The prompt that ``encode_query`` or ``encode_document`` puts before a text; empty without one."""
    names = ("query",) if role == "query" else ("document", "passage", "corpus")
    name = next((name for name in names if name in model.prompts), model.default_prompt_name)
    return (model.prompts.get(name) or "") if name else ""


# ---- comparisons of arrays


def direction_errors(served: Array, local: Array) -> Array:
    """|s / |s| - l / |l||, on the dimensions that are served: (n, D), (n, >= D) -> (n,) in [0, 2].

    Example:
        >>> direction_errors(np.array([[2.0, 0.0]]), np.array([[0.0, 1.0]])).round(3)
        array([1.414])
    """
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


# ---- findings


class _Explained(NamedTuple):
    findings: list[Finding]
    relative: Array  # relative errors of the texts that are explained, (n,)
    directions: Array  # errors of the directions of all texts


def explain(
    local: LocalModel, sides: Sequence[Side], server: str, tolerance: float, refusal: str
) -> tuple[list[Finding], float]:
    """The findings, and the median relative error that is left when all of them are taken into account.

    Args:
        local: The model.
        sides: Queries and documents with their vectors.
        server: Kind of the server; may be empty.
        tolerance: Median relative error that counts as rounding.
        refusal: The server's message for the first text that it refused.
    """
    explained = [_explain_side(local, side.answered(), server) for side in sides]
    # One finding of each name: the documents, which decide rankings, come last and replace the queries.
    found = [finding for side in explained for finding in side.findings]
    findings = list({(f.name, f.text if "prompt" in f.name else ""): f for f in found}.values())
    if refusal:
        tokens = [
            probe.tokens for side in sides for probe, came in zip(side.probes, side.came, strict=True) if not came
        ]
        texts = f"{len(tokens)} of {sum(len(side.probes) for side in sides)} texts"
        limit = max_tokens(local.model) or min(tokens)
        findings.append(describe("refused", server, texts=texts, shortest=min(tokens), said=refusal, limit=limit))
    errors = np.concatenate([side.relative for side in explained])
    if any(finding.name == "another model" for finding in findings) or not len(errors):
        return findings, float(np.median(np.concatenate([side.directions for side in explained])))
    error = float(np.median(errors))
    if error > tolerance:
        findings.append(describe("precision", server, median=error, most=errors.max()))
    return findings, error


def _explain_side(local: LocalModel, side: Side, server: str) -> _Explained:
    served, role = side.served, side.role
    texts, short = [probe.text for probe in side.probes], np.array([probe.tokens <= SHORT for probe in side.probes])
    short_texts = [probe.text for probe in side.probes if probe.tokens <= SHORT]
    who = "queries" if role == "query" else "documents"
    dim, full = served.shape[1], side.expected.shape[1]

    # Long texts can be cut elsewhere, so the short ones say what else the server does to the model.
    candidates = ((change, local.raw(short_texts, role, change)) for change in local.changes(role))
    change = nearest_change(served[short], candidates)
    if change is None:
        finding = describe("another model", server, who=who, how=f"they have {dim} dimensions, the model {full}.")
        return _Explained([finding], np.empty(0), np.full(len(served), 2.0))
    raw = local.raw(texts, role, change)[:, :dim]
    errors = direction_errors(served, raw)
    # Rows whose error is not explained by the precision of the others: cut elsewhere, or split into other tokens.
    equal = errors <= max(6 * float(np.quantile(errors[short], 0.25)), 2e-3)
    laws = local.norm_laws(norms(raw), role)
    law, factor = norm_law(norms(served)[equal], {name: rows[equal] for name, rows in laws.items()})
    ratio = float(np.median(norms(served)[equal]) / max(np.median(laws[""][equal]), 1e-30))
    if how := _unlike(float(np.median(errors[equal])), ratio, law, change):
        finding = describe("another model", server, who=who, how=how)
        return _Explained([finding], np.empty(0), errors)

    findings = _change_findings(local, change, role, who, server)
    if dim < full and not change.skipped:
        findings.append(describe("dimensions", server, dim=dim, full=full))
    if not equal.all():
        findings.append(_unequal_finding(local, side, ~equal, server))
    if law:
        findings.append(_norm_finding(local, law, factor, side, server))
    target = unit_rows(raw) * (laws[law] if law in laws else laws[""] * factor)[:, None]
    relative = errors if law == "norms differ" else norms(served - target) / np.maximum(norms(target), 1e-30)
    return _Explained(findings, relative[equal], errors)


def _unlike(error: float, ratio: float, law: str, change: Change) -> str:
    """How vectors differ by more than rounding of numbers or weights explains; empty if they do not.

    Args:
        error: Error of the directions.
        ratio: Norms of the target over norms of the model.
        law: The law that the norms follow.
        change: The change that explains the vectors best.
    """
    # Rounding of the weights turns directions a little and leaves the norms. Training changes both.
    moved = law in ("", "norms scaled", "norms differ") and abs(ratio - 1) > MOVED
    if error < CLOSE or (error < UNLIKE and not moved):
        return ""
    best = f", at best with the model {change}" if change != Change() else ""
    more = f", and norms are {ratio:.3f} times the model's." if moved else f"; weights in int8 explain {UNLIKE}."
    return f"directions differ by {error:.3f} (median){best}{more}"


def _change_findings(local: LocalModel, change: Change, role: str, who: str, server: str) -> list[Finding]:
    findings = []
    if change.pooling:
        names = POOLING_NAMES.get(local.pooling, {})
        known = server if names else ""
        findings.append(describe("pooling", known, served=change.pooling, pooling=local.pooling, **names))
    if change.prompt:
        prompt = prompt_of(local.model, role)
        findings.append(describe(PROMPTS[change.prompt], server, who=who, role=role, prompt=prompt))
    if change.skipped:
        findings.append(describe("modules skipped", server, skipped=change.skipped))
    return findings


def _unequal_finding(local: LocalModel, side: Side, unequal: NDArray[np.bool_], server: str) -> Finding:
    """The finding if some texts differ: long ones because of another limit, others because of another tokenizer."""
    tokens = np.array([probe.tokens for probe in side.probes])
    limit, first = max_tokens(local.model), int(tokens[unequal].min())
    if limit is None or tokens[~unequal].max(initial=0) > first or first <= SHORT:
        example = side.probes[int(unequal.argmax())].text[:40]
        return describe("tokenizer", server, count=int(unequal.sum()), total=len(tokens), example=example)
    return describe("truncation", server, first=first, limit=limit)


def _norm_finding(local: LocalModel, law: str, factor: float, side: Side, server: str) -> Finding:
    came, own = norms(side.served), norms(side.expected)
    query, document = local.exponents or (0.0, 0.0)
    details = {
        "who": "queries" if side.role == "query" else "documents",
        "median": np.median(came),
        "norms": f"{came.min():.3f} to {came.max():.3f}",
        "expected": f"{own.min():.3f} to {own.max():.3f}",
        "factor": factor,
    }
    finding = describe(law, server, **details, gamma_query=query, gamma_document=document)
    if law == "norms lost" and local.model.similarity_fn_name == "cosine":
        text = finding.text + " The model is scored by cosine, which does not see norms."
        return Finding(law, text, fix="", matters=False)
    return finding

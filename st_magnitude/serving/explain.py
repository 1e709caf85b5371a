"""From served and local vectors to findings: the model is changed here as servers change it, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from st_magnitude.geometry import norms
from st_magnitude.geometry.arrays import unit_rows
from st_magnitude.modules import ExponentNorm
from st_magnitude.serving.advice import Finding, fix_of
from st_magnitude.surgery.raw import encode_raw, normalizes_output, raw_end

__all__ = ["LocalModel", "Probe", "changed_rankings", "explain", "finite_rows", "max_tokens", "prompt_of"]

Array = NDArray[np.float64]
Key = TypeVar("Key")
SHORT = 24  # tokens; shorter texts are truncated nowhere
LIMITS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 2048)
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
        """The result of ``encode_query`` or ``encode_document``: n texts -> (n, D)."""
        encode = self.model.encode_query if role == "query" else self.model.encode_document
        found = encode(list(texts), batch_size=self._batch_size, show_progress_bar=False, convert_to_tensor=True)
        return found.double().cpu().numpy()

    def raw(self, texts: Sequence[str], role: str, change: Change = Change()) -> Array:
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
        return (
            encode_raw(model, list(texts), role, batch_size=self._batch_size, show_progress_bar=False, prompt=prompt)
            .double()
            .cpu()
            .numpy()
        )

    def changes(self, role: str) -> Iterator[Change]:
        """Changes to try, the likely ones first."""
        poolings = ["", *(mode for mode in POOLINGS if mode != self.pooling)] if self.pooling else [""]
        skips = [""]
        if self._pooling is not None:
            middle = self._modules[self._modules.index(self._pooling) + 1 : raw_end(self._modules)]
            skips += [name] if (name := ", ".join(type(module).__name__ for module in middle)) else []
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


def finite_rows(x: Array) -> NDArray[np.bool_]:
    """Rows without nan: (n, D) -> (n,)."""
    return np.asarray(np.isfinite(x).all(axis=1))


def direction_errors(served: Array, local: Array) -> Array:
    """|s / |s| - l / |l||, on the dimensions that are served: (n, D), (n, >= D) -> (n,) in [0, 2].

    Example:
        >>> direction_errors(np.array([[2.0, 0.0]]), np.array([[0.0, 1.0]])).round(3)
        array([1.414])
    """
    return norms(unit_rows(served) - unit_rows(local[:, : served.shape[1]]))


def nearest_change(served: Array, candidates: Iterable[tuple[Key, Callable[[], Array]]]) -> Key | None:
    """The candidate whose directions are nearest by the median error; None if all have too few dimensions.

    The first candidate is the model as it is. It is taken if it is close, and another candidate must halve its error.
    """
    best: tuple[Key | None, float] = (None, 4.0)
    for key, local in candidates:
        rows = local()
        if rows.shape[1] < served.shape[1]:
            continue
        error = float(np.median(direction_errors(served, rows)))
        if error < best[1] / 2 or best[0] is None:
            best = (key, error)
        if best[1] < CLOSE:
            break
    return best[0]


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


def precision_of(served: Array, errors: Array, tolerance: float) -> str:
    """The number format that explains relative errors; empty if they are rounding of float32.

    Example:
        >>> x = np.random.default_rng(0).standard_normal((5, 8))
        >>> precision_of(x.astype(np.float16).astype(float), np.full(5, 3e-4), tolerance=1e-4)
        'float16'
    """
    if not len(errors) or np.median(errors) <= tolerance:
        return ""
    single = np.ascontiguousarray(served, dtype=np.float32)
    if not (single.view(np.uint32) & 0xFFFF).any():  # most of these numbers are float16 as well
        return "bfloat16"
    if (np.abs(single) < 6e4).all() and np.array_equal(single.astype(np.float16).astype(np.float32), single):
        return "float16"
    level = float(np.median(errors))
    near = "int8 weights or by a checkpoint very near this one"
    return "float16" if level < 2e-3 else "bfloat16" if level < 2e-2 else near


def changed_rankings(served: Array, local: Array, k: int = 10) -> NDArray[np.bool_]:
    """Whether the first k ranks of a query differ by more than ties: two score matrices (n, m) -> (n,).

    Example:
        >>> local = np.array([[3.0, 2.0, 1.0], [1.0, 1.0, 0.0]])
        >>> changed_rankings(np.array([[1.0, 2.0, 3.0], [0.1, 0.2, 0.0]]), local)
        array([ True, False])
    """
    order = np.argsort(-served, axis=1, kind="stable")[:, :k]
    ranked = np.take_along_axis(local, order, axis=1)
    best = -np.sort(-local, axis=1)[:, :k]
    tolerance = 1e-5 * np.abs(local).max(axis=1, keepdims=True)
    return (best - ranked > tolerance).any(axis=1)


# ---- findings


class _Role(NamedTuple):
    findings: list[Finding]
    relative: Array  # relative errors of the texts that are explained, (n,)
    vectors: Array  # their served vectors, (n, D)
    directions: Array  # errors of the directions of all texts


def explain(
    local: LocalModel,
    probes: Sequence[Probe],
    served: Mapping[str, Array],
    kind: str,
    tolerance: float,
    refusal: str,
) -> tuple[list[Finding], float]:
    """The findings, and the median relative error that is left when all of them are taken into account.

    Args:
        local: The model.
        probes: All probes.
        served: Vectors by role, with rows of nan for texts that were refused.
        kind: Kind of the server; may be empty.
        tolerance: Median relative error that counts as rounding.
        refusal: The server's message for the first text that it refused.
    """
    roles = [_explain_role(local, _of(probes, role), role, served[role], kind) for role in served]
    # One finding of each name: the documents, which decide rankings, come last and replace the queries.
    found = [finding for role in roles for finding in role.findings]
    findings = list({(f.name, f.text if "prompt" in f.name else ""): f for f in found}.values())
    if refusal:
        refused = [
            probe.tokens
            for role, rows in served.items()
            for probe, came in zip(_of(probes, role), finite_rows(rows), strict=True)
            if not came
        ]
        shortest = f"the shortest of {min(refused)} or more tokens"
        text = f"The target refuses {len(refused)} of {len(probes)} texts, {shortest}: {refusal}"
        fix = fix_of("refused", kind, limit=max_tokens(local.model) or min(refused))
        findings.append(Finding("refused", text, fix))
    errors = np.concatenate([role.relative for role in roles])
    if any(finding.name == "another model" for finding in findings) or not len(errors):
        return findings, float(np.median(np.concatenate([role.directions for role in roles])))
    if name := precision_of(np.concatenate([role.vectors for role in roles]), errors, tolerance):
        text = f"Vectors have a relative error of {np.median(errors):.1e} (at most {errors.max():.1e}), as by {name}."
        findings.append(Finding("precision", text, fix_of("precision", kind)))
    return findings, float(np.median(errors))


def _of(probes: Sequence[Probe], role: str) -> list[Probe]:
    return [probe for probe in probes if probe.role == role]


def _explain_role(local: LocalModel, probes: Sequence[Probe], role: str, served: Array, kind: str) -> _Role:
    came = finite_rows(served)
    mine, served = [probe for probe, is_there in zip(probes, came, strict=True) if is_there], served[came]
    texts, short = [probe.text for probe in mine], np.array([probe.tokens <= SHORT for probe in mine])
    short_texts = [text for text, is_short in zip(texts, short, strict=True) if is_short]
    who, expected = "queries" if role == "query" else "documents", local.expected(texts, role)
    dim, full = served.shape[1], expected.shape[1]

    # Long texts can be cut elsewhere, so the short ones say what else the server does to the model.
    candidates = [
        (change, lambda change=change: local.raw(short_texts, role, change)) for change in local.changes(role)
    ]
    change = nearest_change(served[short], candidates)
    if change is None:
        text = f"The {who} come from another model: they have {dim} dimensions, the model {full}."
        finding = Finding("another model", text, fix_of("another model", kind))
        return _Role([finding], np.empty(0), served[:0], np.full(len(served), 2.0))
    raw = local.raw(texts, role, change)[:, :dim]
    errors = direction_errors(served, raw)
    # Rows whose error is not explained by the precision of the others: cut elsewhere, or split into other tokens.
    equal = errors <= max(6 * float(np.quantile(errors[short], 0.25)), 2e-3)
    laws = local.norm_laws(norms(raw), role)
    law, factor = norm_law(norms(served)[equal], {name: rows[equal] for name, rows in laws.items()})
    if another := _another_model(who, errors[equal], norms(served)[equal], laws[""][equal], law, change, kind):
        return _Role([another], np.empty(0), served[:0], errors)

    findings = _change_findings(local, change, role, who, kind)
    if dim < full and not change.skipped:
        text = f"Vectors have {dim} dimensions; the model has {full}, and its first {dim} have the same directions."
        findings.append(Finding("dimensions", text, fix_of("dimensions", kind, dim=dim)))
    if not equal.all():
        findings.append(_unequal_finding(local, mine, served, ~equal, role, change, kind))
    if law:
        findings.append(_norm_finding(local, law, factor, norms(served), norms(expected), role, kind))
    target = unit_rows(raw) * (laws[law] if law in laws else laws[""] * factor)[:, None]
    relative = errors if law == "norms differ" else norms(served - target) / np.maximum(norms(target), 1e-30)
    return _Role(findings, relative[equal], served[equal], errors)


def _another_model(
    who: str, errors: Array, came: Array, own: Array, law: str, change: Change, kind: str
) -> Finding | None:
    """The finding if directions differ by more than rounding of numbers or weights explains; None otherwise."""
    error, ratio = float(np.median(errors)), float(np.median(came) / max(np.median(own), 1e-30))
    # Rounding of the weights turns directions a little and leaves the norms. Training changes both.
    moved = law in ("", "norms scaled", "norms differ") and abs(ratio - 1) > MOVED
    if error < CLOSE or (error < UNLIKE and not moved):
        return None
    best = f", at best with the model {change}" if change != Change() else ""
    more = f", and norms are {ratio:.3f} times the model's." if moved else f"; weights in int8 explain {UNLIKE}."
    text = (
        f"The {who} come from another model or checkpoint, or from a prompt that the model does not have: directions "
        f"differ by {error:.3f} (median){best}{more}"
    )
    return Finding("another model", text, fix_of("another model", kind))


def _change_findings(local: LocalModel, change: Change, role: str, who: str, kind: str) -> list[Finding]:
    findings = []
    if change.pooling:
        text = f"The target pools by {change.pooling}; the model pools by {local.pooling}."
        names = {"mean": "MEAN", "cls": "CLS", "lasttoken": "LAST"}
        fix = fix_of(
            "pooling",
            kind if local.pooling in names else "",  # no server of its own code pools by max
            pooling=names.get(local.pooling),
            tei_pooling={"lasttoken": "last-token"}.get(local.pooling, local.pooling),
            llama_pooling={"lasttoken": "last"}.get(local.pooling, local.pooling),
            own_pooling=local.pooling,
        )
        findings.append(Finding("pooling", text, fix))
    if change.prompt:
        name, prompt = PROMPTS[change.prompt], prompt_of(local.model, role)
        how = {
            "missing": f"without their prompt {prompt!r}",
            "twice": f"with the prompt {prompt!r} twice",
            "other": "with the prompt of the other role",
        }[change.prompt]
        fix = fix_of(name, kind, prompt=prompt, role=role)
        findings.append(Finding(name, f"The {who} were encoded {how}.", fix))
    if change.skipped:
        text = f"The target leaves out what follows the pooling: {change.skipped}."
        findings.append(Finding("modules skipped", text, fix_of("modules skipped", kind)))
    return findings


def _unequal_finding(
    local: LocalModel,
    mine: Sequence[Probe],
    served: Array,
    unequal: NDArray[np.bool_],
    role: str,
    change: Change,
    kind: str,
) -> Finding:
    """The finding if some texts differ: long ones because of another limit, others because of another tokenizer."""
    tokens = np.array([probe.tokens for probe in mine])
    rows = [probe.text for probe, differs in zip(mine, unequal, strict=True) if differs]
    limit, first = max_tokens(local.model), int(tokens[unequal].min())
    if limit is None or tokens[~unequal].max(initial=0) > first or first <= SHORT:
        text = f"{len(rows)} of {len(mine)} texts differ, such as {rows[0][:40]!r}; all others agree."
        return Finding("tokenizer", text, fix_of("tokenizer", kind))
    most = getattr(getattr(local.model[0], "config", None), "max_position_embeddings", None) or max(LIMITS)
    errors = {}
    try:
        for tried in (n for n in (*LIMITS, most) if n != limit and n <= most):
            local.model.max_seq_length = tried
            errors[tried] = float(direction_errors(served[unequal], local.raw(rows, role, change)).max())
    finally:
        local.model.max_seq_length = limit
    nearest = min(errors, key=errors.__getitem__)
    more = "at least " if nearest > limit else ""  # the text may be shorter than what the target reads
    reads = f"the target reads {more}{nearest} tokens" if errors[nearest] < CLOSE else "the target cuts elsewhere"
    text = f"Texts from {first} tokens on differ: {reads}, the model {limit}."
    return Finding("truncation", text, fix_of("truncation", kind, limit=limit))


def _norm_finding(local: LocalModel, law: str, factor: float, came: Array, own: Array, role: str, kind: str) -> Finding:
    who = "queries" if role == "query" else "documents"
    has, should = (f"{x.min():.3f} to {x.max():.3f}" for x in (came, own))
    unseen = law == "norms lost" and local.model.similarity_fn_name == "cosine"
    text = {
        "norms lost": f"All norms are {np.median(came):.3f}; the model's {who} have {should}.",
        "not normalised": f"Norms are {has}; the model ends in Normalize.",
        "exponent not applied": f"Norms are {has}, as without ExponentNorm; the model's are {should}.",
        "role ignored": f"Queries are divided by the document exponent: norms {has}, the model's {should}.",
        "norms scaled": f"Vectors are {factor:.4g} times the model's.",
        "norms differ": f"Norms are {has}; the model's are {should}, and do not explain them.",
    }[law]
    if unseen:
        return Finding(law, text + " The model is scored by cosine, which does not see norms.", "", False)
    gammas = local.exponents or (0.0, 0.0)
    fix = fix_of(law, kind, gamma_query=gammas[0], gamma_document=gammas[1])
    return Finding(law, text, fix, law not in ("role ignored", "norms scaled"))

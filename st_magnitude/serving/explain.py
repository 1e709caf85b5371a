"""From served and local vectors to findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from st_magnitude.geometry import norms
from st_magnitude.geometry.arrays import unit_rows
from st_magnitude.serving.advice import fix_of
from st_magnitude.serving.compare import (
    CLOSE,
    MOVED,
    UNLIKE,
    direction_errors,
    finite_rows,
    nearest_change,
    norm_law,
    precision_of,
    unequal_rows,
)
from st_magnitude.serving.probes import Probe, max_tokens, prompt_of
from st_magnitude.serving.result import Finding
from st_magnitude.serving.variants import Change, LocalModel

__all__ = ["explain"]

Array = NDArray[np.float64]
SHORT = 24  # tokens; what is at most so long is truncated nowhere
LIMITS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 2048)
NAMES = {"": "as saved", "missing": "prompt missing", "twice": "prompt twice", "other role": "prompt of the other role"}


def explain(
    local: LocalModel,
    probes: Sequence[Probe],
    served: Mapping[str, Array],
    expected: Mapping[str, Array],
    kind: str,
    tolerance: float,
    refusal: str,
) -> tuple[list[Finding], float]:
    """The findings, and the median relative error that is left when all of them are taken into account.

    Args:
        local: The model.
        probes: All probes.
        served: Vectors by role, with rows of nan for texts that were refused.
        expected: The model's own vectors by role.
        kind: Kind of the server; may be empty.
        tolerance: Median relative error that counts as rounding.
        refusal: The server's message for the first text that it refused.
    """
    explained = [_explain_role(local, probes, role, served[role], expected[role], kind) for role in served]
    findings = _merged([finding for one in explained for finding in one[0]])
    limit = max_tokens(local.model)
    if refusal:
        refused = [p.tokens for role in served for p in _of(probes, role, ~finite_rows(served[role]))]
        shortest = f"the shortest of {min(refused)} or more tokens"
        text = f"The target refuses {len(refused)} of {len(probes)} texts, {shortest}: {refusal}"
        findings.append(Finding("refused", text, fix_of("refused", kind, limit=limit or min(refused))))
    errors = np.concatenate([one[1] for one in explained])
    vectors = np.concatenate([one[2] for one in explained])
    if any(finding.name == "another model" for finding in findings) or not len(errors):
        return findings, float(np.median(np.concatenate([one[3] for one in explained])))
    if name := precision_of(vectors, errors, tolerance):
        text = f"Vectors have a relative error of {np.median(errors):.1e} (at most {errors.max():.1e}), as by {name}."
        findings.append(Finding("precision", text, fix_of("precision", kind)))
    return findings, float(np.median(errors))


def _explain_role(
    local: LocalModel, probes: Sequence[Probe], role: str, served: Array, expected: Array, kind: str
) -> tuple[list[Finding], Array, Array, Array]:
    """Findings of one role; relative errors and vectors of the texts that are explained; all direction errors."""
    came = finite_rows(served)
    mine, served, expected = _of(probes, role, came), served[came], expected[came]
    texts = [probe.text for probe in mine]
    short = np.array([probe.tokens <= SHORT for probe in mine])
    short_texts = [text for text, is_short in zip(texts, short, strict=True) if is_short]
    who, dim, full = f"{role.replace('query', 'querie')}s", served.shape[1], expected.shape[1]
    findings: list[Finding] = []

    candidates = [
        (change, lambda change=change: local.raw(short_texts, role, change)) for change in local.changes(role)
    ]
    change, error = nearest_change(served[short], candidates)
    if change is None:
        text = f"The {who} come from another model: they have {dim} dimensions, the model {full}."
        finding = Finding("another model", text, fix_of("another model", kind))
        return [finding], np.empty(0), served[:0], np.full(len(served), error)
    raw = local.raw(texts, role, change)[:, :dim]
    errors = direction_errors(served, raw)
    unequal = unequal_rows(errors, float(np.quantile(errors[short], 0.25)))
    laws = local.norm_laws(norms(raw), role)
    law, factor = norm_law(norms(served)[~unequal], {name: rows[~unequal] for name, rows in laws.items()})
    if another := _another_model(who, errors[~unequal], norms(served)[~unequal], laws[""][~unequal], law, change, kind):
        return [another], np.empty(0), served[:0], errors

    findings += _change_findings(local, change, role, who, kind)
    if dim < full and not change.skipped:
        text = f"Vectors have {dim} dimensions; the model has {full}, and its first {dim} have the same directions."
        findings.append(Finding("dimensions", text, fix_of("dimensions", kind, dim=dim)))
    if unequal.any():
        findings.append(_unequal_finding(local, mine, served, unequal, role, change, kind))
    if law:
        findings.append(_norm_finding(local, law, factor, norms(served), norms(expected), role, kind))
    target = unit_rows(raw) * (laws[law] if law in laws else laws[""] * factor)[:, None]
    relative = norms(served - target) / np.maximum(norms(target), 1e-30)
    if law == "norms differ":
        relative = errors
    return findings, relative[~unequal], served[~unequal], errors


def _another_model(
    who: str, errors: Array, came: Array, own: Array, law: str, change: Change, kind: str
) -> Finding | None:
    """The finding if directions differ by more than rounding of numbers or weights explains; None otherwise."""
    error, ratio = float(np.median(errors)), float(np.median(came) / max(np.median(own), 1e-30))
    # Rounding of the weights turns directions a little and leaves the norms. Training changes both.
    moved = law in ("", "norms scaled", "norms differ") and abs(ratio - 1) > MOVED
    if error < CLOSE or (error < UNLIKE and not moved):
        return None
    text = f"The {who} come from another model or checkpoint, or from a prompt that the model does not have: directions"
    text += f" differ by {error:.3f} (median)" + (
        f", at best with the model {_words(change)}" if change != Change() else ""
    )
    text += f", and norms are {ratio:.3f} times the model's." if moved else f"; weights in int8 explain {UNLIKE}."
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
        name, prompt = NAMES[change.prompt], prompt_of(local.model, role)
        text = {
            "missing": f"The {who} were encoded without their prompt {prompt!r}.",
            "twice": f"The {who} were encoded with the prompt {prompt!r} twice.",
            "other role": f"The {who} were encoded with the prompt of the other role.",
        }[change.prompt]
        findings.append(Finding(name, text, fix_of(name, kind, prompt=prompt, role=role)))
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
    """Some texts differ: the long ones, because they are cut elsewhere, or others, because they are tokenized so."""
    tokens = np.array([probe.tokens for probe in mine])
    limit = max_tokens(local.model)
    first = int(tokens[unequal].min())
    if limit is None or tokens[~unequal].max(initial=0) > first or first <= SHORT:
        quoted = next(probe.text for probe, differs in zip(mine, unequal, strict=True) if differs)
        text = f"{unequal.sum()} of {len(mine)} texts differ, such as {quoted[:40]!r}; all others agree."
        return Finding("tokenizer", text, fix_of("tokenizer", kind))
    rows = [probe.text for probe, differs in zip(mine, unequal, strict=True) if differs]
    config = getattr(local.model[0], "config", None)
    most = getattr(config, "max_position_embeddings", None) or max(LIMITS)
    errors = {}
    for tried in (n for n in (*LIMITS, most) if n != limit and n <= most):
        with local.reading(tried):
            errors[tried] = float(direction_errors(served[unequal], local.raw(rows, role, change)).max())
    nearest = min(errors, key=errors.__getitem__, default=0)
    more = "at least " if nearest > limit else ""  # the text may be shorter than what the target reads
    known = errors and errors[nearest] < 0.02
    reads = f"the target reads {more}{nearest} tokens" if known else "the target cuts elsewhere"
    text = f"Texts from {first} tokens on differ: {reads}, the model {limit}."
    return Finding("truncation", text, fix_of("truncation", kind, limit=limit))


def _norm_finding(local: LocalModel, law: str, factor: float, came: Array, own: Array, role: str, kind: str) -> Finding:
    who = "queries" if role == "query" else "documents"
    has, should = (f"{x.min():.3f} to {x.max():.3f}" for x in (came, own))
    by_cosine = local.model.similarity_fn_name == "cosine"
    text = {
        "norms lost": f"All norms are {np.median(came):.3f}; those of the model's {who} are {should}.",
        "not normalised": f"Norms are {has}; the model ends in Normalize.",
        "exponent not applied": f"Norms are {has}, as without ExponentNorm; the model's are {should}.",
        "role ignored": f"Queries are divided by the document exponent: norms {has}, the model's {should}.",
        "norms scaled": f"Vectors are {factor:.4g} times the model's.",
        "norms differ": f"Norms are {has}; the model's are {should}, and do not explain them.",
    }[law]
    if law == "norms lost" and by_cosine:
        text += " The model is scored by cosine, which does not see norms."
    gammas = local.exponents or (0.0, 0.0)
    fix = fix_of(law, kind, gamma_query=gammas[0], gamma_document=gammas[1])
    harmless = law in ("role ignored", "norms scaled") or (law == "norms lost" and by_cosine)
    return Finding(law, text, "" if law == "norms lost" and by_cosine else fix, not harmless)


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """One finding of each name; that of the documents, whose figures decide rankings, replaces that of the queries."""
    return list({(f.name, f.text if "prompt" in f.name else ""): f for f in findings}.values())


def _of(probes: Sequence[Probe], role: str, chosen: NDArray[np.bool_]) -> list[Probe]:
    mine = [probe for probe in probes if probe.role == role]
    return [probe for probe, is_chosen in zip(mine, chosen, strict=True) if is_chosen]


def _words(change: Change) -> str:
    parts = [NAMES[change.prompt], f"{change.pooling} pooling" if change.pooling else ""]
    parts += [f"without {change.skipped}" if change.skipped else ""]
    return ", ".join(part for part in parts if part)

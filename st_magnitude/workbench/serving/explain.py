"""The findings of `check_serving`, from served and local vectors, each with its remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude.geometry import Array, float64, norms, unit_rows
from st_magnitude.surgery.raw import prompt_of

SHORT = 24  # tokens; shorter texts are cut nowhere
NEARLY_ALL = 0.9  # share of the short texts
UNLIKE = 0.05  # relative error that no rounding has (weights in int8, MiniLM: 0.017 to 0.032)
EQUAL = 2e-3  # relative error of texts that are certainly read alike

# The difference with its figures, and what to do. Every switch was read in the server's source or
# run; docs/serving.md names the versions.
_FINDINGS = {
    "zeros": (
        "{count} of {total} {role} texts came back as vectors of zeros.",
        "Look at the server's log: whether it has loaded the weights, and what fails under load.",
    ),
    "norms": (
        "The target's documents have norms of {served}; the model's have {expected}.",
        "Turn off normalisation: vLLM --pooler-config '{{\"use_activation\": false}}'; "
        'text-embeddings-inference "normalize": false to /embed (its /v1/embeddings always '
        "normalises); llama.cpp --embd-normalize -1; Infinity and Ollama always normalise. If the "
        "server leaves out the model's Normalize or ExponentNorm, divide in your client by "
        "stm.Similarity(...).document(vectors).",
    ),
    "prompt": (
        "Texts are read without the model's prompts, {query!r} for queries and {document!r} for "
        "documents.",
        "Put them before the texts in your own client (check it with send_prompts), and let "
        "nothing else add a prompt.",
    ),
    "dimensions": (
        "Vectors have {dim} dimensions; the model's have {full}.",
        "Ask the server for {full} floats, not for bits. If it shortens vectors, load the model "
        "with its truncate_dim. If it leaves out a module that shortens them, such as Dense, or "
        "another model answers, serve the one named here.",
    ),
    "truncation": (
        "Texts from {first} tokens on differ: the target has another limit than the model's "
        "{limit} tokens.",
        "Set the server's limit to {limit} tokens, or model.max_seq_length to its limit. vLLM "
        'takes "truncate_prompt_tokens": {limit} with every request.',
    ),
    "refused": (
        "The target refuses {count} texts, the shortest of {shortest} tokens: {said}",
        "Cut texts at {limit} tokens before you send them, or let the server cut them: vLLM "
        '"truncate_prompt_tokens": -1 with every request; text-embeddings-inference '
        "--auto-truncate.",
    ),
    "precision": (
        "Vectors have a relative error of {median:.1e} (at most {most:.1e}), as by numbers or "
        "weights of fewer digits, or by a checkpoint very near this one.",
        "Run the model in float32 (vLLM --dtype float32), or accept the error with tolerance=.",
    ),
    "vectors": (
        "{count} of {total} {role} texts have other vectors, such as {example!r} (relative error "
        "{error:.3f}, median of all).",
        "The usual causes: another pooling (vLLM --pooler-config '{{\"pooling_type\": ...}}', "
        "text-embeddings-inference and llama.cpp --pooling), modules that do not run, a prompt or "
        "a special token that is added or missing, a client that strips, lower-cases or replaces "
        "line breaks in texts, rows in another order, another model or revision.",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One difference between what a target returns and what the model computes."""

    name: str  # short and fixed, such as "norms"; docs/serving.md has the list
    text: str  # the difference with its figures
    fix: str  # what to change


def finding(name: str, **details: object) -> Finding:
    text, fix = _FINDINGS[name]
    return Finding(name, text.format(**details), fix.format(**details))


@dataclass(frozen=True)
class Side:
    """The n texts of one role that the target embedded, without their prompts."""

    role: str
    texts: Sequence[str]
    tokens: NDArray[np.int64]  # number of tokens that the model reads of each text, (n,)
    served: Array  # (n, dimensions of the target)
    expected: Array  # (n, D)


def encode(
    model: SentenceTransformer, texts: Sequence[str], role: str, prompt: str | None = None
) -> Array:
    """The result of ``encode_query`` or ``encode_document``: n texts -> (n, D)."""
    method = model.encode_query if role == "query" else model.encode_document
    return float64(
        method(list(texts), prompt=prompt, convert_to_tensor=True, show_progress_bar=False)
    )


def token_limit(model: SentenceTransformer) -> int | None:
    """The number of tokens that a model reads; None if it reads all."""
    limit = model.max_seq_length
    return limit if limit and limit < 10**9 else None


def span(vectors: Array) -> tuple[float, float]:
    """The smallest and the largest norm of vectors."""
    lengths = norms(vectors)
    return float(lengths.min()), float(lengths.max())


def explain(
    model: SentenceTransformer, sides: Sequence[Side], tolerance: float
) -> tuple[list[Finding], float]:
    """The findings, one of each name, and the median relative error that they leave."""
    compared = [_compare(model, side) for side in sides]
    findings = {found.name: found for found_here, _ in compared for found in found_here}
    errors = np.concatenate([left for _, left in compared])
    error = float(np.median(errors))
    if error > tolerance and "vectors" not in findings:
        findings["precision"] = finding("precision", median=error, most=errors.max())
    return list(findings.values()), error


def _compare(model: SentenceTransformer, side: Side) -> tuple[list[Finding], Array]:
    """The findings about one role, and the relative errors that they leave."""
    total = len(side.texts)
    is_zero = side.expected.any(axis=1) & ~side.served.any(axis=1)
    if is_zero.any():
        zeros = finding("zeros", count=is_zero.sum(), total=total, role=side.role)
        return [zeros], np.zeros(total)
    dim = side.served.shape[1]
    full = side.expected.shape[1]
    if dim != full:
        return [finding("dimensions", dim=dim, full=full)], np.zeros(total)
    findings = []
    served = side.served
    expected = side.expected
    short = side.tokens <= SHORT
    directions = _errors(unit_rows(served), unit_rows(expected))
    if prompt_of(model, side.role) and _level(directions, short) > EQUAL:
        without = encode(model, side.texts, side.role, prompt="")
        others = _errors(unit_rows(served), unit_rows(without))
        if _level(others, short) < min(_level(directions, short) / 2, UNLIKE):
            prompts = {role: prompt_of(model, role) for role in ("query", "document")}
            findings.append(finding("prompt", **prompts))
            directions = others
            expected = without
    errors = directions
    # The norm of a query changes no ranking, and cosine sees none.
    if side.role == "document" and model.similarity_fn_name != "cosine":
        sizes = norms(expected)
        ratios = np.abs(norms(served) - sizes) / np.maximum(sizes, 1e-30)
        if _level(ratios, short) > max(3 * _level(directions, short), EQUAL):
            spans = {"served": span(served), "expected": span(expected)}
            written = {name: f"{low:.3f} to {high:.3f}" for name, (low, high) in spans.items()}
            findings.append(finding("norms", **written))
        else:
            errors = _errors(served, expected)
    # More than the precision of the others: cut elsewhere, or read in another way.
    equal = errors <= min(max(6 * float(np.quantile(errors[short], 0.25)), EQUAL), UNLIKE)
    if equal.all():
        return findings, errors
    first = int(side.tokens[~equal].min())
    limit = token_limit(model)
    if limit and first > SHORT and first >= side.tokens[equal].max():
        findings.append(finding("truncation", first=first, limit=limit))
        return findings, errors[equal]
    details = {"count": int((~equal).sum()), "total": total, "role": side.role}
    example = side.texts[int((~equal).argmax())][:40]
    median = float(np.median(errors))
    findings.append(finding("vectors", **details, example=example, error=median))
    return findings, errors


def _errors(served: Array, local: Array) -> Array:
    """Relative errors of vectors: (n, D), (n, D) -> (n,)."""
    return norms(served - local) / np.maximum(norms(local), 1e-30)


def _level(errors: Array, short: NDArray[np.bool_]) -> float:
    """The 90 % quantile of the errors of short texts, which no limit cuts."""
    return float(np.quantile(errors[short], NEARLY_ALL))

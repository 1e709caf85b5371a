"""The ranking of an index, compared with the exact one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude.evaluation.metrics import model_name
from st_magnitude.geometry import norms
from st_magnitude.geometry.arrays import unit_rows
from st_magnitude.serving.compare import changed_rankings
from st_magnitude.serving.probes import QUERIES
from st_magnitude.serving.result import Finding, ServingCheck
from st_magnitude.serving.variants import LocalModel

__all__ = ["check_search"]

Array = NDArray[np.float64]
K = 10


def check_search(
    search: Callable[..., Any], model: SentenceTransformer, documents: Sequence[str], batch_size: int
) -> ServingCheck:
    """Compares ``search(vectors, k)`` with the exact ranking by the model's similarity."""
    local = LocalModel(model, batch_size)
    queries, rows = local.expected(QUERIES, "query"), local.expected(documents, "document")
    k = min(K, len(documents))
    if not k:
        raise ValueError("documents is empty; pass the texts of the index in its order.")
    what = getattr(search, "__name__", type(search).__name__)
    found = _row_numbers(search(queries.astype(np.float32), k), len(queries), k, len(documents), what)
    exact = model.similarity(queries, rows).double().cpu().numpy()
    by_others = {
        "the inner product": queries @ rows.T,
        "cosine": unit_rows(queries) @ unit_rows(rows).T,
        "the Euclidean distance": 2 * queries @ rows.T - norms(rows) ** 2,  # the norm of a query changes no ranking
    }
    recall = {name: _recall(found, scores) for name, scores in by_others.items()}
    own = _recall(found, exact)
    nearest = max(recall, key=recall.__getitem__)
    findings = []
    if own < 1 and recall[nearest] > own and recall[nearest] >= 0.9:
        text = f"It ranks by {nearest}; the model is scored by {model.similarity_fn_name}. Recall@{k} is {own:.3f}."
        fix = "Declare the metric of docs/serving.md: " + (
            "the inner product, and store vectors that are not normalised."
            if model.similarity_fn_name == "dot"
            else "cosine, or the inner product of normalised vectors."
        )
        findings.append(Finding("metric", text, fix))
    elif own < 1:
        text = f"Recall@{k} of the exact ranking is {own:.3f}, and no other metric explains the difference."
        fix = (
            "If the index is approximate, raise its search width (ef, nprobe, num_candidates); check that documents= "
            "has the order of the index, and that the index holds the vectors of this model."
        )
        findings.append(Finding("recall", text, fix))
    # Scores that rank as the index does: the first rank has the highest.
    ranks = np.full(exact.shape, -float(k + 1))
    np.put_along_axis(ranks, found, -np.arange(k, dtype=np.float64)[None].repeat(len(found), axis=0), axis=1)
    return ServingCheck(
        target=what,
        server="",
        model=model_name(model),
        findings=tuple(findings),
        local_norms=(float(norms(rows).min()), float(norms(rows).max())),
        served_norms=(math.nan, math.nan),
        num_queries=len(queries),
        num_documents=len(rows),
        changed_rankings=int(changed_rankings(ranks, exact, k).sum()),
        error=1 - own,
    )


def _row_numbers(answer: Any, num_queries: int, k: int, num_documents: int, what: str) -> NDArray[np.int64]:
    """Row numbers of an answer, which may be FAISS's (scores, row numbers): (n, k)."""
    if isinstance(answer, tuple) and len(answer) == 2:
        answer = answer[1]
    try:
        found = np.asarray(answer)
        numbers = found.astype(np.int64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} returned something else than row numbers ({error}).") from None
    if numbers.shape != (num_queries, k) or not np.array_equal(numbers, found):
        raise ValueError(
            f"{what} returned an array of shape {found.shape} and type {found.dtype}, not {k} whole row numbers for "
            f"each of {num_queries} queries."
        )
    if numbers.min() < 0 or numbers.max() >= num_documents:
        raise ValueError(
            f"{what} returned row {numbers.min() if numbers.min() < 0 else numbers.max()}, but there are "
            f"{num_documents} documents; pass documents= in the order of the index, all of them."
        )
    return numbers


def _recall(found: NDArray[np.int64], scores: Array) -> float:
    """Share of the first k ranks that the scores could have there, where ties count as right."""
    k = found.shape[1]
    last = -np.sort(-scores, axis=1)[:, k - 1 : k]
    own = np.take_along_axis(scores, found, axis=1)
    return float((own >= last - 1e-5 * np.abs(scores).max(axis=1, keepdims=True)).mean())

"""check_serving compares what a server, a client or an index returns with what a model computes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude.evaluation.metrics import model_name
from st_magnitude.geometry import norms
from st_magnitude.geometry.arrays import unit_rows
from st_magnitude.result import Result
from st_magnitude.saving.export import load
from st_magnitude.serving.explain import LocalModel, Side, explain
from st_magnitude.serving.fixes import Finding, finding
from st_magnitude.serving.server import Embed, Server, embed_all
from st_magnitude.surgery.raw import prompt_of

__all__ = ["ServingCheck", "check_serving"]

Array = NDArray[np.float64]
K = 10  # ranks of a search that are compared
ALONE = 5  # texts of a role that are sent in a request of their own, too
LONGEST = 2048  # words: a text over a limit of 32,000 tokens would take minutes
QUERIES = (
    "How do I keep bread from going stale?",
    "what makes a bicycle easier to pedal uphill",
    "tomatoes frost",
    "When is the next train from platform nine to the coast, and does it take bicycles?",
    "photosynthesis",
    "RuntimeError: CUDA out of memory",
    "¿Dónde viven los pingüinos?",
    "東京の天気は?",
    "x",
    "?",
)
DOCUMENTS = (
    "Bread stays fresh longer in a paper bag or a bread box than in the fridge.",
    "Low gears let a cyclist climb steep hills with less force on the pedals.",
    "Plant tomatoes outdoors after the last frost, when the soil is warm.",
    "It leaves every hour from platform nine. Bicycles travel in the last carriage.",
    "Plants turn light, water and carbon dioxide into sugar and oxygen.",
    "def merge(a, b):\n    return sorted([*a, *b])  # O(n log n)",
    "The contract may be ended by either party with thirty days' notice in writing.",
    "See also: index. Parameters: none. Returns: none.",
    "THE GUARANTEE DOES NOT COVER DAMAGE BY WATER.",
    "https://example.org/a/very/long/path?with=arguments&and=more#fragment",
    "3.14159 26535 89793 23846 26433",
    "Los pingüinos viven en el hemisferio sur, cerca del hielo.",
    "naïve café, Ångström, ﬁne print, e\u0301 and é",
    "猫はソファで爪を研ぐ。",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם",
    "👩‍🔬 measured 20 µm ± 5 %",
    "  two   spaces,\ttab,\nnew line  ",
    "a",
    ".",
    "-" * 40,
)


@dataclass(frozen=True)
class ServingCheck(Result):
    """The result of `check_serving`."""

    target: str  # URL, or name of the callable
    server: str  # the kind of the server, such as "vLLM"; empty where it does not tell
    model: str  # hub id or folder of the model, as far as the model knows it
    findings: tuple[Finding, ...]  # the differences
    local_norms: tuple[float, float]  # smallest and largest norm of the model's own embeddings
    num_queries: int  # whose rankings were compared
    num_documents: int  # that they rank
    changed_rankings: int  # queries whose top 10 differs by more than ties
    # Median relative error of a vector, after the differences that have a finding of their own;
    # for a search, the share of the first ten documents that it misses.
    error: float
    served_norms: tuple[float, float] = (math.nan, math.nan)  # of what came back; nan for a search
    remark: str = ""  # what could not be checked

    @property
    def same(self) -> bool:
        """Whether the target serves what the model computes."""
        return not self.findings

    def tables(self) -> list[str]:
        number = len(self.findings)
        verdict = f"DIFFERS: {number} difference{'s' * (number > 1)}" if number else "SAME"
        server = f" ({self.server})" if self.server else ""
        parts = [f"{self.target}{server} against {self.model or 'the model'}\n{verdict}"]
        parts += [f"[{found.name}] {found.text}\n     -> {found.fix}" for found in self.findings]
        figures = "Norms: of the model {:.3f} to {:.3f}".format(*self.local_norms)
        if not math.isnan(self.served_norms[0]):
            figures += ", of the target {:.3f} to {:.3f}".format(*self.served_norms)
        figures += (
            f".\nRankings: {self.changed_rankings} of {self.num_queries} queries rank the "
            f"{self.num_documents} documents differently.\n{self.remark}"
        )
        return [*parts, figures.rstrip()]


def check_serving(
    target: str | Callable[..., Any],
    model: SentenceTransformer | str | os.PathLike[str],
    *,
    name: str | None = None,
    api_key: str | None = None,
    request: Mapping[str, Any] | None = None,
    send_prompts: bool = False,
    documents: Sequence[str] | None = None,
    tolerance: float = 1e-4,
    timeout: float = 60.0,
) -> ServingCheck:
    """Compares what a server, a client or an index returns with what the model computes.

    Some thirty texts are encoded here and by the target: short, long, over the token limit, in
    several scripts, nearly empty, in both roles; a few are sent alone, too. The model is then
    changed here as servers change it. A change is named, with its fix, if it explains nearly all
    texts; otherwise the cause is unknown. docs/serving.md lists the findings.

    Args:
        target: URL of a server that speaks OpenAI's ``/v1/embeddings`` (vLLM, Infinity, llama.cpp,
            Ollama and others), Ollama's ``/api/embed`` or ``/embed`` of text-embeddings-inference;
            a callable ``embed(texts, role)`` that returns one vector for each text; or, with
            documents, a callable ``search(vectors, k)`` that returns row numbers of the documents
            for each vector, best first, or FAISS's ``(scores, row numbers)``. A row that is too
            short, or ends in -1, misses documents.
        model: The model, or its folder. It is used as saved, with its own prompts and token limit.
        name: Name of the model on the server; None takes the only one that the server lists.
        api_key: Key that is sent as a bearer token. No message contains it.
        request: Further entries of every request, such as ``{"normalize": False}``: what your
            client sends, or a fix to try.
        send_prompts: Whether the model's prompt is put before each text that is sent.
        documents: Texts in the order of an index, which is then the target.
        tolerance: Median relative error of a vector that counts as rounding.
        timeout: Seconds to wait for an answer.

    Raises:
        ValueError: If the URL, the key, the name or an answer cannot be used.
        OSError: If the server cannot be reached, stays busy or does not answer in time.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bread", "cats", "the"])], device="cpu")
        >>> model.similarity_fn_name = "dot"
        >>> def client(texts, role):
        ...     return model.encode(texts, normalize_embeddings=True)
        >>> check = check_serving(client, model)
        >>> check.same, [finding.name for finding in check.findings]
        (False, ['norms lost'])
    """
    if not isinstance(model, SentenceTransformer):
        model = load(os.fspath(model))
    local = LocalModel(model)
    named = getattr(target, "__name__", type(target).__name__)
    if documents is not None:
        if isinstance(target, str):
            raise ValueError(
                "With documents=, the target is a callable search(vectors, k), no URL."
            )
        return _check_search(local, target, documents, named)
    if not isinstance(target, str):
        return _check_embeddings(local, target, named, "", send_prompts, tolerance)
    with closing(Server(target, name, api_key, request, timeout)) as server:
        options = (str(server), server.kind, send_prompts, tolerance)
        return _check_embeddings(local, server.embed, *options)


def _check_embeddings(
    local: LocalModel, embed: Embed, target: str, server: str, send_prompts: bool, tolerance: float
) -> ServingCheck:
    """Sends all probes, encodes them here, and explains the differences."""
    limit = local.limit
    sides = []
    findings = []
    refused = []  # number of tokens of the texts that are not embedded
    said = ""
    for role, texts in (("query", QUERIES), ("document", probe_documents(limit))):
        prompt = prompt_of(local.model, role) if send_prompts else ""
        sent = [prompt + text for text in texts]
        served, refusal = embed_all(embed, sent, role, target)
        alone, _ = embed_all(embed, sent[:ALONE], role, target, batch=1)
        moved = norms(served[:ALONE] - alone) > 0.01 * norms(alone)
        if moved.any():
            served, refusal = embed_all(embed, sent, role, target, batch=1)
            findings = [finding("batch", "", count=moved.sum(), total=ALONE)]
        said = said or refusal
        came = np.isfinite(served).all(axis=1)
        tokens = np.array([local.num_tokens(text) for text in texts])
        refused += tokens[~came].tolist()
        texts = [texts[i] for i in np.flatnonzero(came)]
        own = local.expected(texts, role)
        sides.append(Side(role, texts, tokens[came], served[came], own))
    query, document = sides
    explained, error = explain(local, sides, server, tolerance)
    findings += explained
    if refused:
        who = f"{len(refused)} of {len(refused) + len(query.texts) + len(document.texts)} texts"
        details = {"texts": who, "shortest": min(refused), "limit": limit or min(refused)}
        findings.append(finding("refused", server, said=said, **details))
    ranks = np.argsort(-local.scores(query.served, document.served), axis=1, kind="stable")
    recall = _recall(ranks[:, :K], local.scores(query.expected, document.expected))
    return ServingCheck(
        target=target,
        server=server,
        model=model_name(local.model),
        findings=tuple(findings),
        served_norms=_range(np.concatenate([query.served, document.served])),
        local_norms=_range(np.concatenate([query.expected, document.expected])),
        num_queries=len(query.texts),
        num_documents=len(document.texts),
        changed_rankings=int((recall < 1).sum()),
        error=error,
        remark=f"Texts over {limit} tokens were not sent." if limit and 2 * limit > LONGEST else "",
    )


def _range(vectors: Array) -> tuple[float, float]:
    """The smallest and the largest norm of vectors."""
    return float(norms(vectors).min()), float(norms(vectors).max())


def _check_search(
    local: LocalModel, search: Callable[..., Any], documents: Sequence[str], target: str
) -> ServingCheck:
    """Compares ``search(vectors, k)`` with the exact ranking by the model's similarity."""
    queries = local.expected(QUERIES, "query")
    rows = local.expected(documents, "document")
    k = min(K, len(documents))
    answer = search(queries.astype(np.float32), k)
    answer = answer[1] if isinstance(answer, tuple) else answer  # FAISS: (scores, row numbers)
    try:  # a document counts once, and what a row lacks is missed
        found = np.array([[*dict.fromkeys(row), *[-1] * k][:k] for row in answer], dtype=object)
    except TypeError:
        found = np.empty(0)
    if len(found) != len(queries) or not np.isin(found, np.arange(-1, len(documents))).all():
        raise ValueError(
            f"{target} must return up to {k} row numbers of the {len(documents)} documents for "
            f"each of {len(queries)} queries, not {len(found)} rows of others: pass all documents, "
            "in the order of the index."
        )
    found = found.astype(int)
    own = _recall(found, local.scores(queries, rows))
    scores = {
        "the inner product": queries @ rows.T,
        "cosine": queries @ unit_rows(rows).T,
        "the Euclidean distance": 2 * queries @ rows.T - norms(rows) ** 2,
    }
    recall = {metric: float(_recall(found, s).mean()) for metric, s in scores.items()}
    nearest = max(recall, key=recall.__getitem__)
    details = {"k": k, "recall": own.mean(), "own": local.model.similarity_fn_name}
    findings = []
    if own.mean() < recall[nearest] >= 0.9:
        findings.append(finding("metric", "", nearest=nearest, **details))
    elif own.mean() < 1:
        findings.append(finding("recall", "", **details))
    return ServingCheck(
        target=target,
        server="",
        model=model_name(local.model),
        findings=tuple(findings),
        local_norms=_range(rows),
        num_queries=len(queries),
        num_documents=len(rows),
        changed_rankings=int((own < 1).sum()),
        error=float(1 - own.mean()),
    )


def _recall(found: NDArray[np.int64], scores: Array) -> Array:
    """Share of the first k ranks that the scores could have there; ties are right: (n,)."""
    k = found.shape[1]
    last = -np.sort(-scores, axis=1)[:, k - 1 : k]
    own = np.take_along_axis(scores, np.maximum(found, 0), axis=1)
    is_right = own >= last - 1e-5 * np.abs(scores).max(axis=1, keepdims=True)
    return (is_right & (found >= 0)).mean(axis=1)


def probe_documents(limit: int | None) -> list[str]:
    """The documents, and more of a quarter to twice as many words as the model reads tokens."""
    lengths = [int(share * (limit or 512)) for share in (0.25, 0.5, 1, 2)]
    lines = (f"In chapter {n} the harbour outlives {n * n} violins." for n in range(LONGEST))
    words = " ".join(lines).split()  # with something new in every line, which every cut changes
    return [*DOCUMENTS, *(" ".join(words[:n]) for n in lengths if 0 < n <= LONGEST)]

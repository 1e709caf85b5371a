"""check_serving compares what a server, a client or an index returns with what the model computes."""

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
from st_magnitude.serving.advice import Finding, describe
from st_magnitude.serving.explain import LocalModel, Side, explain
from st_magnitude.serving.server import Embed, Server, embed_all
from st_magnitude.surgery.export import load
from st_magnitude.surgery.raw import prompt_of

__all__ = ["ServingCheck", "check_serving"]

Array = NDArray[np.float64]
K = 10  # ranks of a search that are compared
QUERIES = (
    "How do I keep bread from going stale?",
    "what makes a bicycle easier to pedal uphill",
    "Why does my cat scratch the sofa?",
    "tomatoes frost",
    "When is the next train from platform nine to the coast, and does it take bicycles?",
    "photosynthesis",
    "RuntimeError: CUDA out of memory",
    "Who painted the ceiling of the chapel?",
    "¿Dónde viven los pingüinos?",
    "東京の天気は?",
    "x",
    "?",
)
DOCUMENTS = (
    "Bread stays fresh longer in a paper bag or a bread box than in the fridge.",
    "Slice the loaf and freeze it, and it will not go stale.",
    "Low gears let a cyclist climb steep hills with less force on the pedals.",
    "Cats scratch furniture to mark territory and to care for their claws.",
    "Plant tomatoes outdoors after the last frost, when the soil is warm.",
    "It leaves every hour from platform nine. Bicycles travel in the last carriage and need a ticket of their own.",
    "Plants turn light, water and carbon dioxide into sugar and oxygen.",
    "def merge(a, b):\n    return sorted([*a, *b])  # O(n log n)",
    "The contract may be ended by either party with thirty days' notice in writing.",
    "Interest rates were left unchanged for the third month in a row.",
    "Add the onions, lower the heat and let everything simmer for an hour.",
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
LONGEST = 2048  # words: a text over a limit of 32,000 tokens would take minutes
SUBJECTS = ("the harbour", "a violin", "winter wheat", "the tax office", "old glass", "a river delta", "the comet")
VERBS = ("changes", "outlives", "explains", "divides", "feeds", "hides", "measures", "repairs", "follows")


@dataclass(frozen=True)
class ServingCheck(Result):
    """The result of `check_serving`.

    Attributes:
        target: URL, or name of the callable.
        server: Name and version of the server, as far as it tells them.
        model: Hub id or folder of the model, as far as the model knows it.
        findings: Differences, the most important first; notes last.
        local_norms: Smallest and largest norm of the model's own embeddings.
        num_queries: Number of queries whose rankings were compared.
        num_documents: Number of documents that they rank.
        changed_rankings: Number of queries whose top 10 differs by more than ties.
        error: Median relative error of a vector, after the differences that have a finding of their own; for a search,
            the share of the first ten documents that it misses.
        served_norms: Smallest and largest norm of what came back; nan for a search, which returns no vectors.
        remark: What could not be checked, in a sentence; may be empty.
    """

    target: str
    server: str
    model: str
    findings: tuple[Finding, ...]
    local_norms: tuple[float, float]
    num_queries: int
    num_documents: int
    changed_rankings: int
    error: float
    served_norms: tuple[float, float] = (math.nan, math.nan)
    remark: str = ""

    @property
    def same(self) -> bool:
        """Whether the target serves what the model computes: there are no findings, or only notes."""
        return not any(finding.matters for finding in self.findings)

    def tables(self) -> list[str]:
        number = sum(finding.matters for finding in self.findings)
        verdict = "SAME scores, with a note" if self.findings else "SAME to rounding"
        if number:
            verdict = f"DIFFERS: {number} difference{'s' * (number > 1)}"
        server = f" ({self.server})" if self.server else ""
        paragraphs = [f"{self.target}{server} against {self.model or 'the model'}\n{verdict}"]
        for finding in self.findings:
            fix = f"\n     -> {finding.fix}" if finding.fix else ""
            paragraphs.append(f"[{'' if finding.matters else 'note: '}{finding.name}] {finding.text}{fix}")
        came = "" if math.isnan(self.served_norms[0]) else ", of the target {:.3f} to {:.3f}".format(*self.served_norms)
        figures = [
            "Norms: of the model {:.3f} to {:.3f}".format(*self.local_norms) + f"{came}.",
            f"Rankings: {self.changed_rankings} of {self.num_queries} queries rank the {self.num_documents} documents "
            "differently.",
            self.remark,
        ]
        return [*paragraphs, "\n".join(line for line in figures if line)]


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
    """Compares what a server, a client or an index returns with what the model computes, and says how to fix it.

    About forty texts are encoded here and by the target: short, long, over the token limit, in several scripts, nearly
    empty, in both roles. The model is then changed here as servers change it, to see which changes explain the
    differences. docs/serving.md lists the findings.

    Args:
        target: URL of a server that speaks OpenAI's ``/v1/embeddings`` (vLLM, Infinity, llama.cpp, Ollama and others)
            or ``/embed`` of text-embeddings-inference; a callable ``embed(texts, role)`` that returns one vector for
            each text; or, with documents, a callable ``search(vectors, k)`` that returns row numbers of the documents,
            best first, or FAISS's ``(scores, row numbers)``.
        model: The model, or its folder. It is used as it was saved, with its own prompts and token limit.
        name: Name of the model on the server; None takes the only one that the server lists.
        api_key: Key that is sent as a bearer token. No message contains it.
        request: Further entries of every request, such as ``{"normalize": False}``: what your client sends, or a fix
            to try.
        send_prompts: Whether the model's prompt is put before each text that is sent, as some clients do.
        documents: Texts in the order of an index, which is then the target.
        tolerance: Median relative error of a vector that counts as rounding.
        timeout: Seconds to wait for an answer.

    Raises:
        ValueError: If the URL, the key, the name or an answer cannot be used; the message says what to do.
        OSError: If the server cannot be reached or does not answer in time.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bread", "stale", "cats", "the"])], device="cpu")
        >>> model.similarity_fn_name = "dot"
        >>> check = check_serving(lambda texts, role: model.encode(texts, normalize_embeddings=True), model)
        >>> check.same, [finding.name for finding in check.findings]
        (False, ['norms lost'])
    """
    if not isinstance(model, SentenceTransformer):
        model = load(os.fspath(model))
    local = LocalModel(model)
    if isinstance(target, str):
        if documents is not None:
            raise ValueError("With documents=, the target is a callable search(vectors, k), not a URL.")
        with closing(Server(target, name, api_key, request, timeout)) as server:
            return _check_embeddings(local, server.embed, str(server), server.told, send_prompts, tolerance)
    named = getattr(target, "__name__", type(target).__name__)
    if documents is not None:
        return _check_search(local, target, documents, named)
    return _check_embeddings(local, target, named, "", send_prompts, tolerance)


def _check_embeddings(
    local: LocalModel, embed: Embed, target: str, server: str, send_prompts: bool, tolerance: float
) -> ServingCheck:
    """Sends all probes, encodes them here, and explains the differences."""
    limit, sides, refusal = local.limit, [], ""
    for role, texts in (("query", QUERIES), ("document", probe_documents(limit))):
        prompt = prompt_of(local.model, role) if send_prompts else ""
        served, refused = embed_all(embed, [prompt + text for text in texts], role, target)
        tokens = np.array([num_tokens(local.model, text) for text in texts])
        sides.append(Side(role, np.array(texts, dtype=object), tokens, served, local.expected(texts, role)))
        refusal = refusal or refused
    findings, error = explain(local, sides, server.split(" ")[0], tolerance, refusal)
    query, document = (side.answered() for side in sides)
    best = np.argsort(-local.scores(query.served, document.served), axis=1, kind="stable")[:, :K]
    own = _recall(best, local.scores(query.expected, document.expected))
    return ServingCheck(
        target=target,
        server=server,
        model=model_name(local.model),
        findings=tuple(sorted(findings, key=lambda finding: not finding.matters)),
        served_norms=_range(np.concatenate([query.served, document.served])),
        local_norms=_range(np.concatenate([query.expected, document.expected])),
        num_queries=len(query.texts),
        num_documents=len(document.texts),
        changed_rankings=int((own < 1).sum()),
        error=error,
        remark=f"Texts over the limit of {limit} tokens were not sent." if limit and 2 * limit > LONGEST else "",
    )


def _range(vectors: Array) -> tuple[float, float]:
    """The smallest and the largest norm of vectors."""
    return float(norms(vectors).min()), float(norms(vectors).max())


def _check_search(local: LocalModel, search: Callable[..., Any], documents: Sequence[str], target: str) -> ServingCheck:
    """Compares ``search(vectors, k)`` with the exact ranking by the model's similarity."""
    queries, rows = local.expected(QUERIES, "query"), local.expected(documents, "document")
    k = min(K, len(documents))
    answer = search(queries.astype(np.float32), k)
    found = np.asarray(answer[1] if isinstance(answer, tuple) else answer)  # FAISS returns (scores, row numbers)
    if found.shape != (len(queries), k) or not np.isin(found, np.arange(len(documents))).all():
        raise ValueError(
            f"{target} must return {k} row numbers of the {len(documents)} documents for each of {len(queries)} "
            f"queries, not an array of shape {found.shape}; pass all documents, in the order of the index."
        )
    found = found.astype(int)
    name = local.model.similarity_fn_name
    own = _recall(found, local.scores(queries, rows))
    by_others = {
        "the inner product": queries @ rows.T,
        "cosine": unit_rows(queries) @ unit_rows(rows).T,
        "the Euclidean distance": 2 * queries @ rows.T - norms(rows) ** 2,  # the norm of a query changes no ranking
    }
    recall = {metric: float(_recall(found, scores).mean()) for metric, scores in by_others.items()}
    nearest = max(recall, key=recall.__getitem__)
    findings = []
    if recall[nearest] > own.mean() and recall[nearest] >= 0.9:
        findings = [describe("metric", name or "", nearest=nearest, own=name, k=k, recall=own.mean())]
    elif own.mean() < 1:
        findings = [describe("recall", "", k=k, recall=own.mean())]
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
    """Share of the first k ranks of each query that the scores could have there, where ties count as right: (n,)."""
    k = found.shape[1]
    last = -np.sort(-scores, axis=1)[:, k - 1 : k]
    own = np.take_along_axis(scores, found, axis=1)
    return (own >= last - 1e-5 * np.abs(scores).max(axis=1, keepdims=True)).mean(axis=1)


def probe_documents(limit: int | None) -> list[str]:
    """The documents, and more of a quarter to twice as many words as the model reads tokens."""
    lengths = [int(share * (limit or 512)) for share in (0.25, 0.5, 1, 2)]
    return [*DOCUMENTS, *(_long_text(words) for words in lengths if 0 < words <= LONGEST)]


def num_tokens(model: SentenceTransformer, text: str) -> int:
    """The number of tokens that the model reads of a text."""
    features = model.preprocess([text])
    if "attention_mask" in features:
        return int(features["attention_mask"].sum())
    return features["input_ids"].numel() if "input_ids" in features else len(text.split())


def _long_text(words: int) -> str:
    """A text with something new in every sentence, so every cut changes its embedding."""
    sentences = []
    for n in range(words // 6 + 1):  # a sentence has more words than that
        subject, thing = SUBJECTS[n % 7], SUBJECTS[(n * n + 3) % 7]
        sentences.append(f"{subject} {VERBS[n * 2 % 9]} {thing} in chapter {n + 1}.".capitalize())
    return " ".join(" ".join(sentences).split()[:words])

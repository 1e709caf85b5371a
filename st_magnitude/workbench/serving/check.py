"""check_serving compares what a server or a client returns with what a model computes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

from st_magnitude._checks import InputError, at_least
from st_magnitude.geometry import float64
from st_magnitude.result import Result
from st_magnitude.saving.card import model_name
from st_magnitude.saving.export import load
from st_magnitude.surgery.raw import prompt_of
from st_magnitude.workbench.serving.explain import (
    Finding,
    Side,
    encode,
    explain,
    finding,
    span,
    token_limit,
)
from st_magnitude.workbench.serving.server import Embed, Server, embed_all

K = 10  # ranks that are compared
MOST_WORDS = 2048  # of a probe: a text over a limit of 32,000 tokens would take minutes
PROBE_QUERIES = (
    "How do I keep bread from going stale?",
    "When is the next train from platform nine to the coast, and does it take bicycles?",
    "photosynthesis",
    "RuntimeError: CUDA out of memory",
    "¿Dónde viven los pingüinos?",
    "東京の天気は?",
    "x",
    "?",
)
PROBE_DOCUMENTS = (
    "Bread stays fresh longer in a paper bag or a bread box than in the fridge.",
    "It leaves every hour from platform nine. Bicycles travel in the last carriage.",
    "def merge(a, b):\n    return sorted([*a, *b])  # O(n log n)",
    "See also: index. Parameters: none. Returns: none.",
    "https://example.org/a/very/long/path?with=arguments&and=more#fragment",
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
    model: str  # hub id or folder of the model, as far as the model knows it
    findings: tuple[Finding, ...]  # the differences
    local_norms: tuple[float, float]  # smallest and largest norm of the model's embeddings
    served_norms: tuple[float, float]  # of what came back
    num_queries: int  # whose rankings were compared
    num_documents: int  # that they rank
    changed_rankings: int  # queries whose top 10 differs by more than ties
    error: float  # median relative error of a vector that no other finding explains
    longest: int  # tokens that the model reads of the longest text that was compared
    limit: int | None  # tokens that it reads of a text, if it has a limit

    @property
    def same(self) -> bool:
        """Whether the target serves what the model computes."""
        return not self.findings

    def tables(self) -> list[str]:
        number = len(self.findings)
        verdict = f"DIFFERS: {number} difference{'s' * (number > 1)}" if number else "SAME"
        parts = [f"{self.target} against {self.model or 'the model'}\n{verdict}"]
        parts += [f"[{found.name}] {found.text}\n     -> {found.fix}" for found in self.findings]
        low, high = self.local_norms
        least, most = self.served_norms
        why = ""
        if self.same and not np.allclose(self.local_norms, self.served_norms, rtol=2e-3, atol=0):
            why = " The norms that differ, of queries or under cosine, change no ranking."
        figures = (
            f"Norms: of the model {low:.3f} to {high:.3f}, of the target {least:.3f} to "
            f"{most:.3f}.{why}\nRankings: {self.changed_rankings} of {self.num_queries} queries "
            f"rank the {self.num_documents} documents differently.\n"
            f"Texts of up to {self.longest:,} tokens were compared"
        )
        is_whole = self.limit is None or self.longest >= self.limit
        figures += "." if is_whole else f", of {self.limit:,} that the model reads."
        return [*parts, figures]


def check_serving(
    target: str | Embed,
    model: SentenceTransformer | str | os.PathLike[str],
    *,
    name: str | None = None,
    api_key: str | None = None,
    request: Mapping[str, object] | None = None,
    send_prompts: bool = False,
    tolerance: float = 1e-4,
    timeout: float = 60.0,
) -> ServingCheck:
    """Compares what a server or a client returns with what the model computes.

    About two dozen texts are encoded here and by the target: short, long, over the token limit, in
    several scripts, nearly empty, in both roles. The result says whether vectors and rankings are
    the same, what differs, and the usual causes. docs/serving.md lists the findings.

    Args:
        target: URL of a server that speaks OpenAI's ``/v1/embeddings`` (vLLM, Infinity, llama.cpp,
            Ollama and others) or ``/embed`` of text-embeddings-inference; or a callable
            ``embed(texts, role)`` that returns one vector for each text.
        model: The model, or its folder. It is used as saved, with its own prompts and token limit.
        name: Name of the model on the server, for one that asks for it.
        api_key: Key that is sent as a bearer token. No message contains a part of it.
        request: Further entries of every request, such as ``{"normalize": False}``: what your
            client sends, or a remedy to try. ``{"encoding_format": None}`` leaves that entry out.
        send_prompts: Whether the model's prompt is put before each text that is sent.
        tolerance: Median relative error of a vector that counts as rounding.
        timeout: Seconds to wait for a whole answer.

    Raises:
        ValueError: If the URL, the key or an answer cannot be used.
        OSError: If the server cannot be reached, reports an error or does not answer in time.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["the", "in", "of", "a"])], device="cpu")
        >>> model.similarity_fn_name = "dot"
        >>> def client(texts, role):
        ...     return model.encode(texts, normalize_embeddings=True)
        >>> check = check_serving(client, model)
        >>> check.same, [finding.name for finding in check.findings]
        (False, ['norms'])
    """
    at_least("tolerance", tolerance, 0)
    called = getattr(target, "__name__", type(target).__name__)
    if isinstance(target, str):
        server = Server(target, name, api_key, request, timeout)
        target = server.embed
        called = str(server)
    if isinstance(model, SentenceTransformer):
        return _check(model, target, called, send_prompts, tolerance)
    found = _check(load(os.fspath(model)), target, called, send_prompts, tolerance)
    return replace(found, model="/".join(Path(model).parts[-2:]))  # a static model knows no name


def _check(
    model: SentenceTransformer, embed: Embed, target: str, send_prompts: bool, tolerance: float
) -> ServingCheck:
    limit = token_limit(model)
    sides: list[Side] = []
    refused: list[int] = []  # number of tokens of the texts that are not embedded
    said = ""
    for role, probes in (("query", PROBE_QUERIES), ("document", probe_documents(limit))):
        prompt = prompt_of(model, role) if send_prompts else ""
        rows, refusal = embed_all(embed, [prompt + text for text in probes], role, target)
        said = said or refusal
        came = np.array([row is not None for row in rows])
        tokens = np.array([_num_tokens(model, text) for text in probes])
        refused += tokens[~came].tolist()
        texts = [probes[i] for i in np.flatnonzero(came)]
        given = [row for row in rows if row is not None]
        widths = {len(row) for row in [*given, *(side.served[0] for side in sides)]}
        if len(widths) > 1:
            raise InputError(
                f"{target} returned vectors of {min(widths)} and of {max(widths)} dimensions; all "
                "must have equally many. Do several models answer at this URL?"
            )
        served = np.stack(given)
        sides.append(Side(role, texts, tokens[came], served, encode(model, texts, role)))
    if not np.ptp(sides[1].expected, axis=0).any():
        raise InputError(
            f"The model gives one vector to all {len(sides[1].texts)} texts of the check, so there"
            " is nothing to compare: is it untrained, or its vocabulary of another language?"
        )
    findings, error = explain(model, sides, tolerance)
    if refused:
        details = {"count": len(refused), "shortest": min(refused), "limit": limit or "fewer"}
        findings.append(finding("refused", said=said, **details))
    query, document = sides
    return ServingCheck(
        target=target,
        model=model_name(model),
        findings=tuple(findings),
        local_norms=span(np.concatenate([query.expected, document.expected])),
        served_norms=span(np.concatenate([query.served, document.served])),
        num_queries=len(query.texts),
        num_documents=len(document.texts),
        changed_rankings=_changed_rankings(model, query, document),
        error=error,
        longest=max(int(side.tokens.max()) for side in sides),
        limit=limit,
    )


def _changed_rankings(model: SentenceTransformer, query: Side, document: Side) -> int:
    """Number of queries whose served top K has a document outside the model's, ties aside."""
    served = float64(model.similarity(query.served, document.served))  # (n, m)
    expected = float64(model.similarity(query.expected, document.expected))
    found = np.argsort(-served, axis=1)[:, :K]
    scores = np.take_along_axis(expected, found, axis=1)
    last = -np.sort(-expected, axis=1)[:, found.shape[1] - 1]
    ties = 1e-5 * np.abs(expected).max(axis=1)
    return int((scores.min(axis=1) < last - ties).sum())


def _num_tokens(model: SentenceTransformer, text: str) -> int:
    features = model.preprocess([text])
    if "attention_mask" in features:
        return int(features["attention_mask"].sum())
    return features["input_ids"].numel() if "input_ids" in features else len(text.split())


def probe_documents(limit: int | None) -> list[str]:
    """`PROBE_DOCUMENTS`, and texts of a quarter to twice as many words as the token limit."""
    lengths = [int(share * (limit or 512)) for share in (0.25, 0.5, 1, 2)]
    lines = (f"In chapter {n} the harbour outlives {n * n} violins." for n in range(MOST_WORDS))
    words = " ".join(lines).split()  # with something new in every line, which every cut changes
    return [*PROBE_DOCUMENTS, *(" ".join(words[:n]) for n in lengths if 0 < n <= MOST_WORDS)]

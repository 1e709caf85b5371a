"""check_serving compares what a server or an index returns with what the model computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude._checks import positive
from st_magnitude.evaluation.metrics import model_name
from st_magnitude.geometry import norms
from st_magnitude.serving.compare import changed_rankings, finite_rows
from st_magnitude.serving.explain import explain
from st_magnitude.serving.probes import LONGEST, make_probes, max_tokens, prompt_of
from st_magnitude.serving.result import ServingCheck
from st_magnitude.serving.search import check_search
from st_magnitude.serving.targets import Server, embed_all
from st_magnitude.serving.variants import LocalModel, pool_tokens
from st_magnitude.surgery.export import load

__all__ = ["check_serving"]

Array = NDArray[np.float64]


def check_serving(
    target: str | Callable[..., Any],
    model: SentenceTransformer | str | os.PathLike[str],
    *,
    api: str | None = None,
    name: str | None = None,
    api_key: str | None = None,
    request: Mapping[str, Any] | None = None,
    send_prompts: bool = False,
    documents: Sequence[str] | None = None,
    tolerance: float = 1e-4,
    timeout: float = 60.0,
    batch_size: int = 32,
) -> ServingCheck:
    """Compares what a server, a client or an index returns with what the model computes, and says how to fix it.

    About forty texts are encoded here and by the target: short, long, over the token limit, in several scripts, nearly
    empty, in both roles. The check tells lost norms, another pooling, a missing prompt, modules that the server does
    not run, an exponent that is not applied, another token limit, lower precision and another model from each other,
    because it does the same to the model here and compares.

    Args:
        target: URL of a server, a callable ``embed(texts, role)`` that returns one vector for each text, or, with
            documents, a callable ``search(vectors, k)`` that returns row numbers of the documents, best first, or
            FAISS's ``(scores, row numbers)``.
        model: The model, or its folder. It is used as it was saved, with its own prompts and token limit.
        api: What the URL speaks: ``"openai"`` (``/v1/embeddings`` of OpenAI, vLLM, Infinity, llama.cpp, Ollama and
            others), ``"tei"`` (``/embed`` of text-embeddings-inference), ``"tei-all"`` (``/embed_all``), ``"vllm"``
            (``/pooling``) or ``"ollama"`` (``/api/embed``). None takes it from the path.
        name: Name of the model on the server; None takes the only one that the server lists.
        api_key: Key that is sent as a bearer token. No message contains it.
        request: Further entries of every request, such as ``{"normalize": False}``: what your client sends, or a fix
            to try.
        send_prompts: Whether the model's prompt is put before each text that is sent, as a client does that knows
            them. By default texts are sent as they are.
        documents: Texts in the order of an index, which is then the target.
        tolerance: Median relative error of a vector that counts as rounding.
        timeout: Seconds to wait for an answer.
        batch_size: Number of texts that are encoded here at a time.

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
    positive("tolerance", tolerance)
    positive("timeout", timeout)
    if not isinstance(model, SentenceTransformer):
        model = load(os.fspath(model))
    if documents is not None:
        if isinstance(target, str):
            raise ValueError("With documents=, the target is a callable search(vectors, k), not a URL.")
        return check_search(target, model, documents, batch_size)
    local = LocalModel(model, batch_size)
    if isinstance(target, str):
        returns_tokens = api == "tei-all" or (api is None and target.split("?")[0].rstrip("/").endswith("/embed_all"))
        pool = pool_tokens(local.pooling) if returns_tokens else np.asarray
        with closing(Server(target, api, name, api_key, request, timeout, pool)) as server:
            names = str(server), server.kind, server.version
            return _compare(local, lambda texts, role: server.embed(texts), *names, send_prompts, tolerance)
    what = getattr(target, "__name__", type(target).__name__)
    return _compare(local, target, what, "", "", send_prompts, tolerance)


def _compare(
    local: LocalModel,
    embed: Callable[[list[str], str], Any],
    what: str,
    kind: str,
    version: str,
    send_prompts: bool,
    tolerance: float,
) -> ServingCheck:
    """Sends all probes, encodes them here, and explains the differences."""
    model, probes = local.model, make_probes(local.model)
    served: dict[str, Array] = {}
    expected: dict[str, Array] = {}
    refusal = ""
    for role in ("query", "document"):
        texts = [probe.text for probe in probes if probe.role == role]
        prompt = prompt_of(model, role) if send_prompts else ""
        served[role], refused = embed_all(embed, [prompt + text for text in texts], role, what)
        expected[role] = local.expected(texts, role)
        refusal = refusal or refused
    dims = [rows.shape[1] for rows in served.values()]
    if dims[0] != dims[1]:
        raise ValueError(f"{what} returned {dims[0]} dimensions for queries and {dims[1]} for documents.")
    findings, error = explain(local, probes, served, expected, kind, tolerance, refusal)
    came = {role: finite_rows(rows) for role, rows in served.items()}
    changed = changed_rankings(_scores(model, served, came), _scores(model, expected, came))
    limit = max_tokens(model)
    return ServingCheck(
        target=what,
        server=" ".join(part for part in (kind, version) if part),
        model=model_name(model),
        findings=tuple(sorted(findings, key=lambda finding: not finding.matters)),
        local_norms=_range(expected, came),
        served_norms=_range(served, came),
        num_queries=int(came["query"].sum()),
        num_documents=int(came["document"].sum()),
        changed_rankings=int(changed.sum()),
        error=error,
        remark=f"Texts over the limit of {limit} tokens were not sent." if limit and 2 * limit > LONGEST else "",
    )


def _scores(model: SentenceTransformer, side: Mapping[str, Array], came: Mapping[str, NDArray[np.bool_]]) -> Array:
    """Scores of the queries and documents that came back, by the model's similarity."""
    queries, documents = (side[role][came[role]] for role in ("query", "document"))
    return model.similarity(queries, documents).double().cpu().numpy()


def _range(side: Mapping[str, Array], came: Mapping[str, NDArray[np.bool_]]) -> tuple[float, float]:
    found = np.concatenate([norms(side[role][came[role]]) for role in side])
    return float(found.min()), float(found.max())

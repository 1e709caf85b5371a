"""nDCG@10 of a MultiVectorEncoder by the share of its document token vectors that is stored."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling
from torch import Tensor

from st_magnitude._checks import one_of
from st_magnitude.data.retrieval import Judgments, RetrievalData
from st_magnitude.data.task import TILE, check_finite, hide_own, ndcg, rank
from st_magnitude.evaluation.base import SearchEvaluator, SearchOptions
from st_magnitude.evaluation.calibration import highest_rows
from st_magnitude.evaluation.metrics import are_unit
from st_magnitude.geometry import paired_bootstrap
from st_magnitude.result import Table
from st_magnitude.similarity import COSINE, DOT, Similarity

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LateInteractionEvaluator", "TokenCell"]

# pooling first: others are compared with it
METHODS = ("pooling", "norm", "norm+pooling")
SHARES = (0.5, 0.25, 0.15, 0.1, 0.05)
EXPONENTS = (0.0, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class TokenCell:
    """One way to store the token vectors of the corpus, and how well a search in it does."""

    method: str  # "full", or how the vectors were chosen
    share: float  # of the vectors that was asked for
    bytes_per_document: float  # on average, 4 for each dimension of a vector: float32
    exponent: float  # of the norms by which stored vectors are divided
    ndcg: float  # mean nDCG@10
    # difference to pooling at this share, with its 95 % interval
    versus_pooling: tuple[float, float, float] | None


class LateInteractionEvaluator(SearchEvaluator):
    """nDCG@10 of a MultiVectorEncoder by the share of its document token vectors that is stored.

    Every method keeps round(share · all) vectors over the whole corpus, and at least one of each
    document:

    - ``pooling``: sentence-transformers' HierarchicalTokenPooling of unit vectors, without
      protected tokens, with the smallest ``pool_factor`` that keeps no more;
    - ``norm``: the tokens with the largest norms, as `st_magnitude.NormPruning` does with one
      threshold;
    - ``norm+pooling``: sqrt(share) of the tokens by norm, which pooling then brings to the share.

    What is kept is stored as d / |d|^exponent and searched exhaustively by the model's MaxSim. The
    exponent of every cell is 0, 0.5, 0.75 or 1, whichever has the highest nDCG@10, which is
    optimistic; of several, the largest, because an index of unit vectors is what every store takes.
    Pooled vectors have norm 1. The corpus is encoded once.

    The keys are ``full_ndcg@10``, the primary metric, and ``{method}_{percent}_ndcg@10``, such as
    ``norm_15_ndcg@10``. A model whose tokens are normalised has only ``pooling``.

    Args:
        shares: Shares of the vectors to keep, below 1. All vectors are always measured.
        methods: Some of the methods above. Pooling takes the longest, several milliseconds for each
            document.
        similarity: Fixes the exponents of both sides. By default queries are scored as the model
            encodes them.

    `SearchEvaluator` documents the other arguments, attributes and errors.

    Attributes:
        cells: After a call, a `TokenCell` for all vectors and for each share and method; ``table``
            prints them.
        per_query: After a call, nDCG@10 of every query under ``(method, share)``.

    Raises:
        TypeError: If the model is not a MultiVectorEncoder.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import WordEmbeddings
        >>> from sentence_transformers.sentence_transformer.modules import tokenizer as tokenizers
        >>> words = tokenizers.WhitespaceTokenizer(["bees", "honey", "wax", "so"], stop_words=())
        >>> embeddings = torch.diag(torch.tensor([2.0, 3.0, 2.0, 0.1]))  # the norm of "so" is small
        >>> model = MultiVectorEncoder(modules=[WordEmbeddings(words, embeddings)], device="cpu")
        >>> corpus = {"d1": "so so wax honey", "d2": "so so so bees"}
        >>> judged = {"q": {"d2"}}
        >>> evaluator = LateInteractionEvaluator({"q": "bees"}, corpus, judged, shares=[0.25])
        >>> metrics = evaluator(model)
        >>> metrics["norm_25_ndcg@10"]
        1.0

    Source: Khattab and Zaharia, ColBERT, SIGIR 2020, for MaxSim; Clavié et al., arXiv 2409.14683,
    for pooling.
    """

    kind = "Late-Interaction"
    primary = "full_ndcg@10"
    settings = ("shares", "methods")

    def __init__(
        self,
        queries: Mapping[str, str],
        corpus: Mapping[str, str],
        relevant_docs: Judgments,
        shares: Sequence[float] = SHARES,
        methods: Collection[str] = METHODS,
        **options: Unpack[SearchOptions],
    ) -> None:
        super().__init__(queries, corpus, relevant_docs, **options)
        for method in methods:
            one_of("methods", method, METHODS)
        self.shares = sorted(set(shares), reverse=True)
        self.methods = [method for method in METHODS if method in methods]
        gammas = EXPONENTS if self.similarity is None else [self.similarity.exponents[1]]
        self.document_sides = [Similarity(document=gamma) for gamma in gammas]
        self.cells: list[TokenCell] = []

    @property
    def table(self) -> Table:
        """A row for each cell."""
        columns = ["kept", "method", "bytes/doc", "exponent", "nDCG@10", "minus pooling [95%]"]
        rows = []
        for c in self.cells:
            stored = [f"{100 * c.share:g}%", c.method, round(c.bytes_per_document)]
            rows.append([*stored, f"{c.exponent:g}", c.ndcg, c.versus_pooling])
        return Table(columns, rows)

    def measure(self, model: MultiVectorEncoder) -> dict[str, float]:  # type: ignore[override]
        """Encodes, and measures every cell."""
        if not isinstance(model, MultiVectorEncoder):
            raise TypeError(
                "LateInteractionEvaluator needs a MultiVectorEncoder, got a "
                f"{type(model).__name__}."
            )
        queries = self._encode_queries(model)
        tokens, sizes = self._encode_documents(model)
        norms = torch.linalg.vector_norm(tokens, dim=1).cpu().numpy()
        has_norms = not are_unit(norms)
        possible = [method for method in self.methods if has_norms or method == "pooling"]
        ways = [("full", 1.0), *((method, s) for s in self.shares for method in possible)]
        self.cells = []
        self.per_query = {}
        for method, share in ways:
            kept = tokens
            kept_sizes = sizes
            if method.startswith("norm"):
                by_norm = math.sqrt(share) if method == "norm+pooling" else share
                kept, kept_sizes = keep(tokens, sizes, norms, by_norm)
            is_pooled = "pooling" in method
            if is_pooled:
                kept, kept_sizes = pool(kept, kept_sizes, round(share * len(tokens)))
            sides = self.document_sides if has_norms and not is_pooled else [COSINE]
            stored = [side.document(kept).split(kept_sizes) for side in sides]
            found = [_search(model, self.task, queries, vectors) for vectors in stored]
            best = highest_rows(np.stack(found))[-1]
            values = found[best]
            pooled = self.per_query.get(("pooling", share))
            versus = None if pooled is None else paired_bootstrap(values, pooled)
            self.per_query[method, share] = values
            size = 4 * kept.numel() / len(sizes)
            exponent = sides[best].exponents[1]
            self.cells.append(
                TokenCell(method, share, size, exponent, float(values.mean()), versus)
            )
        full, *others = self.cells
        metrics = {f"{c.method}_{100 * c.share:g}_ndcg@10": c.ndcg for c in others}
        return {self.primary: full.ndcg} | metrics

    def report(self, metrics: dict[str, float]) -> tuple[str, Iterable[Mapping[str, Any]]]:
        """The table for the log, and a row of all metrics."""
        return str(self.table), [metrics]

    def _side(self, role: str) -> dict[str, Any]:
        """Options of ``encode_query`` or ``encode_document``."""
        given = {k.removeprefix(role): p for k, p in self.prompts.items() if k.startswith(role)}
        return self.encoding | given

    def _encode_queries(self, model: MultiVectorEncoder) -> list[Tensor]:
        """The token vectors of every query that counts, (t, D) each."""
        texts = [self.task.queries[query] for query in self.queries_ids]
        queries = model.encode_query(texts, **self._side("query_"))
        sums = torch.stack([query.float().sum() for query in queries])
        check_finite(sums[:, None], "query", self.queries_ids)
        return [(self.similarity or DOT).query(query.float()) for query in queries]

    def _encode_documents(self, model: MultiVectorEncoder) -> tuple[Tensor, list[int]]:
        """Token vectors of all documents, (T, D), and their number in each."""
        ids = self.task.document_ids
        texts = [self.task.corpus[document] for document in ids]
        encoded = model.encode_document(texts, **self._side("corpus_"))
        vectors = [document.float() for document in encoded]
        sums = torch.stack([document.sum() for document in vectors])
        check_finite(sums[:, None], "document", ids)
        return torch.cat(vectors), [len(document) for document in vectors]


def _search(
    model: MultiVectorEncoder,
    data: RetrievalData,
    queries: list[Tensor],
    documents: Sequence[Tensor],
) -> NDArray[np.float64]:
    """nDCG@10 of every query, (n,), by the model's MaxSim."""
    rows = max(1, TILE // len(documents))
    own = data.own_columns(data.query_ids)
    top: list[list[int]] = []
    for i in range(0, len(queries), rows):
        scores = model.similarity(queries[i : i + rows], list(documents))
        hide_own(scores, own[i : i + rows])
        top += rank(scores, 10).tolist()
    gains = [[grades.get(c, 0) for c in row] for grades, row in zip(data.columns, top, strict=True)]
    return ndcg(gains, [grades.values() for grades in data.columns])


def keep(
    tokens: Tensor, sizes: list[int], norms: NDArray[np.float32], share: float
) -> tuple[Tensor, list[int]]:
    """The token of the largest norm of each document, then of all others: -> (share · T, D)."""
    document = np.repeat(np.arange(len(sizes)), sizes)
    order = np.argsort(-norms, kind="stable")
    _, first = np.unique(document[order], return_index=True)  # of every document
    kept = np.zeros(len(order), dtype=bool)
    kept[order[first]] = True
    others = order[~kept[order]]
    kept[others[: max(0, round(share * len(order)) - len(first))]] = True
    counts = np.bincount(document[kept], minlength=len(sizes)).tolist()
    return tokens[torch.from_numpy(kept).to(tokens.device)], counts


def pool(tokens: Tensor, sizes: list[int], number: int) -> tuple[Tensor, list[int]]:
    """Unit vectors pooled to at most a number of them, or one for each document."""
    counts = np.array([size for size in sizes if size])
    low = 1.0  # this factor keeps too much
    high = float(counts.max())  # this one keeps no more than the number
    for _ in range(40):
        factor = (low + high) / 2
        if np.maximum(counts // factor, 1).sum() > number:
            low = factor
        else:
            high = factor
    pooling = HierarchicalTokenPooling(high, num_protected_tokens=0)
    pooled = [pooling.pool_one(document) for document in COSINE.document(tokens).split(sizes)]
    return torch.cat(pooled), [len(document) for document in pooled]

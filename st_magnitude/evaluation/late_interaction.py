"""LateInteractionEvaluator stores a share of a corpus's token vectors and measures nDCG@10 of a search in them."""

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
from tqdm import tqdm

from st_magnitude.data.retrieval import Judgments, RetrievalData
from st_magnitude.data.task import TILE, check_finite, ndcg, rank
from st_magnitude.evaluation.base import SearchEvaluator, SearchOptions
from st_magnitude.evaluation.calibration import highest_rows
from st_magnitude.evaluation.metrics import are_unit
from st_magnitude.geometry import paired_bootstrap
from st_magnitude.result import Result, Table
from st_magnitude.similarity import COSINE, DOT, Similarity

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LateInteractionEvaluator", "TokenCell", "TokenTable"]

METHODS = ("norm", "pooling", "norm+pooling", "random", "first", "idf")
SHARES = (1.0, 0.5, 0.25, 0.15, 0.1, 0.05)
EXPONENTS = (0.0, 0.5, 0.75, 1.0)
AT_A_TIME = 4096  # documents whose padded features are held at a time
UNIT = "all tokens have norm 1. Train the model after stm.prepare(model, 'qnorm')"
POOLED = "the model's own vectors are no longer its tokens"


@dataclass(frozen=True)
class TokenCell:
    """One way to store the token vectors of the corpus, and how well a search in it does."""

    method: str  # "full", or how the vectors were chosen
    share: float  # of the vectors that was asked for
    vectors_per_document: float  # that are stored, on average
    bytes_per_document: float  # 4 for each dimension of a vector: float32
    exponent: float  # of the norms by which stored vectors are divided
    ndcg: float  # mean nDCG@10
    retention: float  # ndcg over that of all vectors: 1 means no loss, nan that the latter is 0
    versus_pooling: tuple[float, float, float] | None  # difference to pooling at this share, with its 95 % interval

    @property
    def row(self) -> dict[str, Any]:
        """A row of the CSV files."""
        row = {"ndcg@10" if name == "ndcg" else name: value for name, value in vars(self).items()}
        return row | dict(zip(("versus_pooling", "low", "high"), self.versus_pooling or ("", "", ""), strict=True))


@dataclass(frozen=True, repr=False)
class TokenTable(Result):
    """nDCG@10 by share of the token vectors kept.

    Attributes:
        cells: A `TokenCell` for all vectors and for each share and method, the largest share first.
        left_out: Methods that this model does not allow, with the reason.

    Example:
        >>> cells = [TokenCell("full", 1.0, 51.0, 19584.0, 0.75, 0.585, 1.0, None)]
        >>> cells += [TokenCell("norm", 0.15, 7.7, 2956.8, 0.75, 0.577, 0.986, (0.004, -0.017, 0.024))]
        >>> print(TokenTable([*cells, TokenCell("pooling", 0.15, 7.7, 2956.8, 1.0, 0.573, 0.979, None)], {}))
        kept  method   bytes/doc  exponent  nDCG@10         minus pooling [95%]
        100%  full        19,584  0.75       0.5850                           -
        15%   norm         2,957  0.75       0.5770  +0.0040 [-0.0170, +0.0240]
        15%   pooling      2,957  1          0.5730                           -
    """

    cells: list[TokenCell]
    left_out: dict[str, str]

    def tables(self) -> Iterable[Table | str]:
        """The cells, and what is not among them."""
        rows = [
            [f"{100 * c.share:g}%", c.method, round(c.bytes_per_document), f"{c.exponent:g}", c.ndcg, c.versus_pooling]
            for c in self.cells
        ]
        yield Table(["kept", "method", "bytes/doc", "exponent", "nDCG@10", "minus pooling [95%]"], rows)
        for method, reason in self.left_out.items():
            yield f"{method} is left out: {reason}."


class LateInteractionEvaluator(SearchEvaluator):
    """nDCG@10 of a MultiVectorEncoder by the share of its document token vectors that is stored.

    Every method keeps the same number of vectors over the whole corpus, round(share · all), and at least one of each
    document, so long documents may keep fewer than their share:

    - ``norm``: the tokens with the largest norms, as `st_magnitude.NormPruning` does with one threshold;
    - ``pooling``: sentence-transformers' HierarchicalTokenPooling of unit vectors, without protected tokens, with the
      smallest ``pool_factor`` that keeps no more;
    - ``norm+pooling``: sqrt(share) of the tokens by norm, which pooling then brings to the share;
    - ``random``; ``first``, the first tokens of a document; ``idf``, the tokens of the largest log(m / m_t), with m
      documents, m_t of which contain the token, special tokens too.

    What is kept is stored as d / |d|^exponent and searched exhaustively by the model's MaxSim. The exponent of every
    cell is the one of ``exponents`` with the highest nDCG@10 on ``dev``; of several, the largest, because an index of
    unit vectors is what every store takes. Pooled vectors have norm 1. The corpus is encoded once.

    The keys are ``full_ndcg@10``, the primary metric, and ``{method}_{percent}_{ndcg@10,retention}``, such as
    ``norm_15_ndcg@10``. A model whose tokens are normalised has no ``norm`` and ``norm+pooling``.

    Args:
        shares: Shares of the vectors to keep, in (0, 1]. All of them are always measured.
        methods: Some of the methods above. Pooling takes the longest, several milliseconds for each document.
        dev: Queries and judgments in the same corpus that choose the exponents; by default the ones that are measured,
            which makes a choice among several optimistic.
        exponents: Exponents to choose from, in [0, 1].
        seed: Seed of ``random``.
        similarity: Fixes the exponents of both sides in place of a choice. By default queries are scored as the model
            encodes them.

    `SearchEvaluator` documents the other arguments, attributes and errors. The CSV file gets a row for every cell.

    Attributes:
        table: After a call, the `TokenTable`, which prints.
        per_query: After a call, nDCG@10 of every query under ``(method, share)``.

    Raises:
        TypeError: If the model is not a MultiVectorEncoder.

    Example:
        >>> import torch
        >>> from sentence_transformers.sentence_transformer.modules import WordEmbeddings
        >>> from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer
        >>> words = WhitespaceTokenizer(["bees", "honey", "wax", "so"], stop_words=())
        >>> embeddings = torch.diag(torch.tensor([2.0, 3.0, 2.0, 0.1]))  # the norm of "so" is small
        >>> model = MultiVectorEncoder(modules=[WordEmbeddings(words, embeddings)], device="cpu")
        >>> corpus = {"d1": "so so wax honey", "d2": "so so so bees"}
        >>> evaluator = LateInteractionEvaluator({"q": "bees"}, corpus, {"q": {"d2"}}, shares=[0.25])
        >>> metrics = evaluator(model)
        >>> metrics["norm_25_ndcg@10"], round(metrics["first_25_ndcg@10"], 2)
        (1.0, 0.63)

    Source: Khattab and Zaharia, ColBERT, SIGIR 2020, for MaxSim; Clavié et al., Reducing the Footprint of Multi-Vector
    Retrieval with Minimal Performance Impact via Token Pooling, arXiv 2409.14683, for pooling.
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
        dev: RetrievalData | None = None,
        exponents: Sequence[float] = EXPONENTS,
        seed: int = 0,
        **options: Unpack[SearchOptions],
    ) -> None:
        super().__init__(queries, corpus, relevant_docs, **options)
        if wrong := [share for share in shares if not 0 < share <= 1]:
            raise ValueError(f"shares must lie in (0, 1], got {wrong[0]}.")
        if unknown := [method for method in methods if method not in METHODS]:
            raise ValueError(f"methods must be some of {METHODS}, got {unknown[0]!r}.")
        self.shares = sorted({1.0, *map(float, shares)}, reverse=True)
        self.methods = [method for method in METHODS if method in methods]
        # The first chooses the exponents.
        self.measured = [self.task] if dev is None else [RetrievalData(dev.queries, corpus, dev.relevant), self.task]
        gammas = sorted(exponents) if self.similarity is None else [self.similarity.exponents[1]]
        self.document_sides = [Similarity(document=gamma) for gamma in gammas]
        self.seed = seed
        self.table = TokenTable([], {})

    def measure(self, model: MultiVectorEncoder) -> dict[str, float]:  # type: ignore[override]
        """Encodes, and measures every cell."""
        if not isinstance(model, MultiVectorEncoder):
            raise TypeError(f"LateInteractionEvaluator needs a MultiVectorEncoder, got a {type(model).__name__}.")
        asked = [(data, self._encode_queries(model, data)) for data in self.measured]
        tokens, sizes, ids = self._encode_documents(model)
        norms = torch.linalg.vector_norm(tokens, dim=1).cpu().numpy()
        is_unit = are_unit(norms)
        impossible = {"norm": UNIT if is_unit else "", "norm+pooling": UNIT if is_unit else ""}
        impossible["idf"] = POOLED if ids is None else ""
        left_out = {method: impossible[method] for method in self.methods if impossible.get(method)}
        importance = _importances(norms, sizes, ids, self.seed)

        grid = [("full", 1.0)]
        grid += [(m, share) for share in self.shares if share < 1 for m in self.methods if m not in left_out]
        self.per_query, stored = {}, {}
        show = self.encoding["show_progress_bar"]
        for method, share in tqdm(grid, desc="Searching", disable=not show):
            kept, kept_sizes = tokens, sizes
            if method in importance:
                by_importance = math.sqrt(share) if method == "norm+pooling" else share
                kept, kept_sizes = keep(tokens, sizes, importance[method], by_importance)
            if is_pooled := "pooling" in method:
                kept, kept_sizes = pool(kept, kept_sizes, round(share * len(tokens)), show)
            sides = [COSINE] if is_unit or is_pooled else self.document_sides
            exponent, self.per_query[method, share] = _best(model, asked, kept, kept_sizes, sides)
            stored[method, share] = len(kept) / len(sizes), exponent
        self.table = TokenTable(token_cells(self.per_query, stored, tokens.shape[1]), left_out)
        metrics = {self.primary: self.table.cells[0].ndcg}
        for cell in self.table.cells[1:]:
            key = f"{cell.method}_{100 * cell.share:g}"
            metrics |= {f"{key}_ndcg@10": cell.ndcg, f"{key}_retention": cell.retention}
        return metrics

    def report(self, metrics: dict[str, float]) -> tuple[str, Iterable[Mapping[str, Any]]]:
        """The table for the log, and a row for each cell."""
        return str(self.table), [cell.row for cell in self.table.cells]

    def _side(self, role: str) -> dict[str, Any]:
        """Options of ``encode_query`` or ``encode_document``."""
        prompts = {key.removeprefix(role): prompt for key, prompt in self.prompts.items() if key.startswith(role)}
        return self.encoding | prompts

    def _encode_queries(self, model: MultiVectorEncoder, data: RetrievalData) -> list[Tensor]:
        """The token vectors of every query that counts, (t, D) each."""
        queries = model.encode_query([data.queries[query] for query in data.query_ids], **self._side("query_"))
        check_finite(torch.stack([query.float().sum() for query in queries])[:, None], "query", data.query_ids)
        similarity = self.similarity or DOT
        return [similarity.query(query.float()) for query in queries]

    def _encode_documents(self, model: MultiVectorEncoder) -> tuple[Tensor, list[int], NDArray[np.int64] | None]:
        """The token vectors of all documents, (T, D), their number in each, and the ids of the tokens, (T,)."""
        ids = self.task.document_ids
        vectors: list[Tensor] = []
        tokens: list[Tensor] = []
        for start in range(0, len(ids), AT_A_TIME):
            texts = [self.task.corpus[document] for document in ids[start : start + AT_A_TIME]]
            for features in model.encode_document(texts, output_value=None, **self._side("corpus_")):
                mask = features["attention_mask"].bool()
                vectors.append(features["token_embeddings"][mask].float())
                own = features.get("input_ids")
                if own is not None and own.shape == mask.shape:
                    tokens.append(own[mask].cpu())
        check_finite(torch.stack([document.sum() for document in vectors])[:, None], "document", ids)
        known = torch.cat(tokens).numpy() if len(tokens) == len(ids) else None
        return torch.cat(vectors), [len(document) for document in vectors], known


def _best(
    model: MultiVectorEncoder,
    asked: Sequence[tuple[RetrievalData, list[Tensor]]],
    tokens: Tensor,
    sizes: list[int],
    sides: Sequence[Similarity],
) -> tuple[float, NDArray[np.float64]]:
    """The exponent that the first queries choose, and nDCG@10 of each of the last: tokens (T, D) -> (n,)."""

    def search(side: Similarity, data: RetrievalData, queries: list[Tensor]) -> NDArray[np.float64]:
        documents = list(side.document(tokens).split(sizes))
        rows = max(1, TILE // len(documents))
        starts = range(0, len(queries), rows)
        top = torch.cat([rank(model.similarity(queries[i : i + rows], documents), 10).cpu() for i in starts])
        gains = [[grades.get(c, 0) for c in row] for grades, row in zip(data.columns, top.tolist(), strict=True)]
        return ndcg(gains, [grades.values() for grades in data.columns])

    if len(sides) == 1:
        return sides[0].exponents[1], search(sides[0], *asked[-1])
    chosen_on = np.stack([search(side, *asked[0]) for side in sides])
    best = highest_rows(chosen_on)[-1]
    return sides[best].exponents[1], chosen_on[best] if len(asked) == 1 else search(sides[best], *asked[-1])


def _importances(
    norms: NDArray[np.float32], sizes: list[int], ids: NDArray[np.int64] | None, seed: int
) -> dict[str, NDArray[Any]]:
    """The values by which methods keep the largest, (T,) each."""
    document = np.repeat(np.arange(len(sizes)), sizes)
    position = np.arange(len(norms)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    found: dict[str, NDArray[Any]] = {"norm": norms, "norm+pooling": norms}
    found["random"] = np.random.default_rng(seed).random(len(norms))
    found["first"] = -position / np.repeat(sizes, sizes)
    if ids is not None:
        pairs = np.unique(ids * len(sizes) + document)  # a token counts once in each document
        found["idf"] = -np.log(np.bincount(pairs // len(sizes))[ids])  # log m is the same for all
    return found


def keep(tokens: Tensor, sizes: list[int], importance: NDArray[Any], share: float) -> tuple[Tensor, list[int]]:
    """The most important token of each document and of all others the most important: (T, D) -> (share · T, D).

    Of equal tokens, the earlier ones are kept.

    Example:
        >>> keep(torch.tensor([[1.0], [2.0], [3.0], [0.5]]), [3, 1], np.array([1.0, 2.0, 3.0, 0.5]), share=0.75)
        (tensor([[2.0000],
                [3.0000],
                [0.5000]]), [2, 1])
    """
    document = np.repeat(np.arange(len(sizes)), sizes)
    order = np.argsort(-importance, kind="stable")
    _, first = np.unique(document[order], return_index=True)  # of every document
    kept = np.zeros(len(order), dtype=bool)
    kept[order[first]] = True
    others = order[~kept[order]]
    kept[others[: max(0, round(share * len(order)) - len(first))]] = True
    counts = np.bincount(document[kept], minlength=len(sizes)).tolist()
    return tokens[torch.from_numpy(kept).to(tokens.device)], counts


def pool(tokens: Tensor, sizes: list[int], number: int, show_progress: bool = False) -> tuple[Tensor, list[int]]:
    """Unit vectors pooled to at most a number of them, or one for each document: (T, D) -> (<= number, D)."""
    counts = np.array([size for size in sizes if size])
    low, high = 1.0, float(counts.max())  # between these factors pooling keeps too much and no more than the number
    for _ in range(40):
        factor = (low + high) / 2
        low, high = (factor, high) if np.maximum(counts // factor, 1).sum() > number else (low, factor)
    pooling = HierarchicalTokenPooling(high, num_protected_tokens=0)
    documents = COSINE.document(tokens).split(sizes)
    bar = tqdm(documents, desc="Pooling", leave=False, disable=not show_progress)
    pooled = [pooling.pool_one(document) for document in bar]
    return torch.cat(pooled), [len(document) for document in pooled]


def token_cells(
    per_query: Mapping[tuple[str, float], NDArray[np.float64]],
    stored: Mapping[tuple[str, float], tuple[float, float]],
    dim: int,
) -> list[TokenCell]:
    """Cells from nDCG@10 of every query, vectors per document, and exponent, under (method, share)."""
    full = float(per_query["full", 1.0].mean()) or math.nan
    cells = []
    for (method, share), values in per_query.items():
        vectors, exponent = stored[method, share]
        pooled = None if method == "pooling" else per_query.get(("pooling", share))
        versus = None if pooled is None else paired_bootstrap(values, pooled)
        mean = float(values.mean())
        cells.append(TokenCell(method, share, vectors, 4 * dim * vectors, exponent, mean, mean / full, versus))
    return cells

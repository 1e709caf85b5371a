"""CompressionEvaluator: nDCG@10 and size of embeddings at several prefixes and precisions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.util.quantization import quantize_embeddings
from torch import Tensor
from typing_extensions import Unpack

from st_magnitude._checks import InputError, at_least, one_of, prefix_dims
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import Judgments
from st_magnitude.data.task import EncodedTask
from st_magnitude.evaluation.base import SearchEvaluator, SearchOptions
from st_magnitude.geometry import Array
from st_magnitude.judge import Difference, judge, nothing_found, warn_if_few
from st_magnitude.result import Table
from st_magnitude.similarity import DOT
from st_magnitude.surgery.raw import refuse_other_models

Format = tuple[int, str, str]  # (dim, precision, rescoring)

PRECISIONS = ("float32", "int8", "rabitq", "binary")
NORM_BYTES = 2  # float16
RABITQ_BYTES = 8  # two float32, as FAISS stores them
TOLERANCE = 0.05  # the share of nDCG@10 that storage may cost
FEW_DRAWS = 2_000  # of `judge`, for every cell


@dataclass(frozen=True)
class CompressionCell:
    """One way to store the corpus, and how well a search in it does."""

    dim: int  # of the prefix
    precision: str  # "float32", "int8", "rabitq" or "binary"
    rescoring: str  # "none"; for binary codes also "query" and "norm"
    # 4, 1 or 1/8 bytes per dimension, rounded up; 2 for a stored norm, 8 for RaBitQ's factors
    bytes_per_document: int
    ndcg: float  # mean nDCG@10
    # ndcg over that of all dimensions in float32: 1 means no loss, nan that the latter is 0
    retention: float
    change: Difference  # ndcg minus that of all dimensions in float32

    def __str__(self) -> str:
        rescored = {"none": "", "query": ", rescored", "norm": " and one norm, rescored"}
        return f"{self.dim} dimensions in {self.precision}{rescored[self.rescoring]}"

    @property
    def key(self) -> str:
        """The beginning of its keys in the metrics of `CompressionEvaluator`."""
        rescored = {"none": "", "query": "_rescored", "norm": "_norm_rescored"}
        return f"{self.precision}_{self.dim}{rescored[self.rescoring]}"

    def fits(self, allowed: float) -> bool | None:
        """Whether it costs at most so much nDCG@10; None if its interval leaves that open."""
        if self.change.low >= -allowed:
            return True
        return False if self.change.high < -allowed else None


class CompressionEvaluator(SearchEvaluator):
    """nDCG@10 and size of the same embeddings over a grid of prefix x precision x rescoring.

    A prefix of k dimensions is cut first and then divided by a power of its norm: a document is
    stored as d = x[:k] / |x[:k]|^gamma_document, and q is the prefix of a query. The search
    compares all documents, by

    - float32: q · d.
    - int8: q · d', where d' is d from its codes, floor(255 (d - low) / (high - low)), with the
      lowest and highest value of each dimension in this corpus.
    - rabitq: q · d' + c · (d - d'), where c is the mean of the corpus and d' is d from one bit for
      each dimension: with a random rotation R and r = R (d - c), d' = c + R^T sign(r) |r|^2 /
      |r|_1. Length and second summand are stored next to the bits, so the norm counts.
    - binary: the number of equal bits of q and d, where the bit is 1 for x > 0 and else 0.
      Rescored: the best ``top_k`` by that number are ranked again by q · (2b - 1), b the bits of d.
      Where the similarity keeps document magnitude (gamma_document < 1), ``"norm"`` multiplies this
      by |x[:k]|^(1 - gamma_document), stored next to the bits as a float16, relative to the largest
      of the corpus.

    Equal scores rank by document id, the lower first, also at the cut to ``top_k``. The keys are

    - ``full_ndcg@10``: all dimensions in float32, the primary metric;
    - ``{precision}_{dim}_{ndcg@10,retention}``, for binary codes also ``binary_{dim}_rescored_...``
      and ``binary_{dim}_norm_rescored_...``.

    Args:
        dims: Prefixes; by default all D dimensions of the model, a half, a quarter and an eighth.
        precisions: Some of ``"float32"``, ``"int8"``, ``"rabitq"``, ``"binary"``.
        top_k: Number of documents that the bits pass on to rescoring.

    `SearchEvaluator` documents the other arguments, attributes and errors.

    Attributes:
        cells: After a call, a `CompressionCell` for each key, D in float32 first, for `summary`.
        per_query: After a call, nDCG@10 of every query under ``(dim, precision, rescoring)``.

    Raises:
        ValueError: If a prefix has more dimensions than the embedding.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> words = BoW(["bees", "honey", "wax", "hive"])
        >>> model = SentenceTransformer(modules=[words], similarity_fn_name="dot", device="cpu")
        >>> corpus = {"d1": "honey", "d2": "honey honey honey", "d3": "wax"}
        >>> evaluator = CompressionEvaluator(
        ...     {"q": "honey"}, corpus, {"q": {"d2"}}, dims=[4, 2], precisions=["binary"]
        ... )
        >>> metrics = evaluator(model)
        >>> metrics["binary_2_rescored_retention"], metrics["binary_2_norm_rescored_retention"]
        (0.6309297535714575, 1.0)

    Source: Dinu et al., Effective Post-Training Embedding Compression via Temperature Control in
    Contrastive Training, section 4 and 5; Gao and Long, RaBitQ, SIGMOD 2024 (arXiv 2405.12497);
    for the rescoring Yamada et al., Efficient Passage Retrieval with Hashing for Open-Domain
    Question Answering, 2021.
    """

    kind = "Compression"
    primary = "full_ndcg@10"
    settings = ("dims", "top_k")

    def __init__(
        self,
        queries: Mapping[str, str],
        corpus: Mapping[str, str],
        relevant_docs: Judgments,
        dims: Iterable[int] | None = None,
        precisions: Iterable[str] = PRECISIONS,
        top_k: int = 100,
        **options: Unpack[SearchOptions],
    ) -> None:
        super().__init__(queries, corpus, relevant_docs, **options)
        self.precisions = tuple(precisions)
        for precision in self.precisions:
            one_of("precisions", precision, PRECISIONS)
        self.dims = None if dims is None else sorted(prefix_dims(dims), reverse=True)
        at_least("top_k", top_k, 1)
        self.top_k = top_k
        warn_if_few(self.queries_ids, "a format")
        self.cells: list[CompressionCell] = []
        self.per_query: dict[Format, NDArray[np.float64]] = {}

    def measure(self, model: SentenceTransformer) -> dict[str, float]:
        known = refuse_other_models(model, "A measurement").get_embedding_dimension()
        if self.dims and known and self.dims[0] > known:
            raise InputError(
                f"A prefix in dims has {self.dims[0]} dimensions, and the embeddings have {known}."
            )
        found = search_formats(self.encode(model), self.dims, self.precisions, self.top_k)
        self.per_query = {key: ranking.ndcg for key, ranking in found.items()}
        self.cells = cells_of(found)
        metrics = {"full_ndcg@10": self.cells[0].ndcg}
        for cell in self.cells:
            metrics[f"{cell.key}_ndcg@10"] = cell.ndcg
            metrics[f"{cell.key}_retention"] = cell.retention
        return metrics

    def report(self, metrics: dict[str, float]) -> str:
        return str(summary(self.cells))


def search_formats(
    task: EncodedTask,
    dims: Sequence[int] | None = None,
    precisions: Sequence[str] = PRECISIONS,
    top_k: int = 100,
) -> dict[Format, Ranking]:
    """The ten best documents of every query in every format, all dimensions in float32 first."""
    full = task.queries.shape[1]
    sizes = [full // share for share in (1, 2, 4, 8) if full >= share] if dims is None else dims
    found: dict[Format, Ranking] = {}
    for dim in sorted({full, *sizes}, reverse=True):
        # In float32, powers of equal norms can differ by their place in the array.
        q = task.similarity.query(task.queries[:, :dim].double()).float()
        d = task.similarity.document(task.documents[:, :dim].double()).float()
        divided = replace(task, queries=q, documents=d, similarity=DOT)
        for precision in PRECISIONS:
            if precision in precisions or (dim, precision) == (full, "float32"):
                keeps_norms = task.similarity.exponents[1] < 1
                searched = search_compressed(divided, precision, top_k, keeps_norms)
                found |= {(dim, precision, how): ranking for how, ranking in searched.items()}
    return found


def cells_of(found: Mapping[Format, Ranking]) -> list[CompressionCell]:
    full = next(iter(found.values()))
    cells = []
    for (dim, precision, rescoring), ranking in found.items():
        bits = math.ceil(dim / 8)
        coded = {"float32": 4 * dim, "int8": dim, "rabitq": bits + RABITQ_BYTES, "binary": bits}
        size = coded[precision] + (NORM_BYTES if rescoring == "norm" else 0)
        retention = ranking.mean / (full.mean or math.nan)
        change = judge(ranking.ndcg - full.ndcg, num_samples=FEW_DRAWS)
        figures = (size, ranking.mean, retention, change)
        cells.append(CompressionCell(dim, precision, rescoring, *figures))
    return cells


def recommended(cells: Sequence[CompressionCell]) -> str:
    """A sentence on what to store: the smallest cell that clearly costs no more than 5 % of
    nDCG@10, or the one that comes nearest to it.

    Example:
        >>> whole = CompressionCell(256, "float32", "none", 1024, 0.9, 1.0, judge([0.0] * 900))
        >>> bits = CompressionCell(256, "binary", "none", 32, 0.88, 0.98, judge([-0.02] * 900))
        >>> print(recommended([whole, bits]))  # doctest: +NORMALIZE_WHITESPACE
        Store 256 dimensions in binary, 32 bytes a document: it costs 2.0 points of nDCG@10
        [1.6, 2.4]; allowed are 4.5 (5 %).
    """
    full, *others = cells
    if nothing := nothing_found(full.ndcg):
        return nothing
    if not others:
        return ""
    allowed = TOLERANCE * full.ndcg
    fitting = [cell for cell in others if cell.fits(allowed)]
    if fitting:
        cell = min(fitting, key=lambda cell: (cell.bytes_per_document, -cell.ndcg))
    else:
        cell = max(others, key=lambda cell: cell.change.low)
    change = cell.change
    mean, low, high = (round(-100 * x, 1) + 0 for x in (change.mean, change.high, change.low))
    cost = (
        f"{mean:.1f} points of nDCG@10 [{low:.1f}, {high:.1f}]; allowed are {100 * allowed:.1f}"
        f" ({100 * TOLERANCE:g} %)."
    )
    if fitting:
        size = cell.bytes_per_document
        unit = "byte" if size == 1 else "bytes"
        return f"Store {cell}, {size:,} {unit} a document: it costs {cost}"
    until = "" if cell.fits(allowed) is False else ", or measure more queries"
    return f"Keep all {full}{until}: {cell} costs {cost}"


def summary(cells: Sequence[CompressionCell]) -> Table:
    """A row for each cell; a star marks those that no other beats in size and in nDCG@10."""
    full = cells[0]
    columns = ["", "dim", "precision", "rescoring", "bytes", "ratio", "nDCG@10", "retention"]
    rows = []
    for cell in cells:
        size = cell.bytes_per_document
        # what each of the others saves in bytes and gains in nDCG@10
        others = [(size - x.bytes_per_document, x.ndcg - cell.ndcg) for x in cells]
        is_beaten = any(min(other) >= 0 and max(other) > 0 for other in others)
        ratio = f"{full.bytes_per_document / size:.1f}x"
        figures = [size, ratio, cell.ndcg, cell.retention, f"{size / 10:.1f} GB"]
        rows.append(["" if is_beaten else "*", cell.dim, cell.precision, cell.rescoring, *figures])
    return Table([*columns, "100M docs"], rows, note=recommended(cells))


def search_compressed(
    task: EncodedTask, precision: str, top_k: int, keeps_norms: bool
) -> dict[str, Ranking]:
    """The ten best documents by inner products of coded documents, by kind of rescoring."""
    documents = task.documents
    if precision == "rabitq":
        queries, stored = rabitq(task.queries, documents)
        return {"none": replace(task, queries=queries, documents=stored).search(10)}
    if precision != "binary":
        stored = _through_int8(documents) if precision == "int8" else documents
        return {"none": replace(task, documents=stored).search(10)}
    coded = replace(task, documents=_signs(documents))
    # The product of signs, equal bits minus unequal bits, ranks as the number of equal bits.
    found = replace(coded, queries=_signs(task.queries)).search(max(top_k, 10))
    best = {"none": _best(found, found.scores)}
    passed = found.columns[:, :top_k]
    scores = _products(coded, torch.from_numpy(passed.clip(min=0)))
    scores[passed < 0] = -np.inf
    best["query"] = _best(found, scores)
    if keeps_norms:
        # Documents x are divided already, so these are |x|^(1 - gamma_document).
        norms = torch.linalg.vector_norm(documents.double(), dim=1).cpu()
        norms = (norms / norms.max().clamp(min=torch.finfo(torch.float32).tiny)).half().double()
        weights = norms.numpy()[passed]
        weights[passed < 0] = 1.0  # -inf times a norm of 0 is nan
        best["norm"] = _best(found, scores * weights)
    return best


def _best(found: Ranking, scores: Array) -> Ranking:
    """The ten best documents of a ranking by other scores of its first documents, (n, k)."""
    rows = zip(found.columns[:, : scores.shape[1]], scores, strict=True)
    return Ranking.of(found.data, found.query_ids, rows, 10)


def _products(task: EncodedTask, columns: Tensor) -> Array:
    """Inner products of each query and its documents, (n, k) columns -> (n, k), as float32: equal
    codes have equal ones."""
    found = []
    for query, some in zip(task.queries.double(), columns.to(task.documents.device), strict=True):
        found.append((task.documents[some].double() @ query).float())
    return torch.stack(found).double().cpu().numpy()


def _signs(embeddings: Tensor) -> Tensor:
    """2b - 1 for the bits b of quantize_embeddings: 1 above 0, else -1."""
    return (embeddings > 0).float() * 2 - 1


def _through_int8(documents: Tensor) -> Tensor:
    """Documents from their int8 codes: (m, k) -> (m, k) float64."""
    low = documents.amin(dim=0)
    high = documents.amax(dim=0)
    ranges = torch.stack([low, high]).cpu().numpy()
    codes = torch.from_numpy(quantize_embeddings(documents, precision="int8", ranges=ranges))
    return (codes.to(low.device).double() + 128) * ((high - low) / 255) + low


def rabitq(queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings whose inner products are RaBitQ's estimates: (n, k), (m, k) -> one more dimension,
    the part of the inner product with the mean of the documents that the bits lose."""
    x = documents.double()
    center = x.mean(dim=0)
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(x.shape[1], x.shape[1], generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(normal)[0].to(x)
    rotated = (x - center) @ rotation
    sizes = rotated.abs().sum(dim=1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    lengths = rotated.square().sum(dim=1, keepdim=True) / sizes
    decoded = center + (_signs(rotated).double() * lengths) @ rotation.T
    lost = ((x - decoded) @ center)[:, None]
    ones = torch.ones_like(queries[:, :1])
    return torch.cat([queries, ones], dim=1), torch.cat([decoded, lost], dim=1)

"""infonce: the one kernel of every contrastive loss in this package.

A loss is a sum of *terms*. A term is a prefix of the embedding, a temperature and a weight:

    L = sum_t w_t · mean_i [ -log softmax_j( s_t(q_i, d_j) / tau_t ) at j = offset + i ]

where s_t is a :class:`~st_magnitude.similarity.Similarity` of the first ``dim_t`` coordinates. Plain InfoNCE has one
term, temperature aggregation has T terms at the full dimension, Matryoshka has K prefixes, both together K x T.
:func:`~st_magnitude.kernel.reference.infonce_reference` is this formula in code; :func:`infonce` computes the same
number faster and in less memory.

With B queries, M documents and D dimensions:

* The kernel walks the scores in tiles of rows and never holds a B x M matrix.
* The inner products of a prefix add a block of columns to the inner products of the next shorter prefix. The
  gradient is taken block by block in the reverse order. So any number of prefixes costs the 6 B M D floating-point
  operations of a single one.
* All temperatures of a prefix share its scores.
* The forward pass takes the gradients while it holds a tile. The backward pass only scales them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from st_magnitude.kernel.terms import LearnedTemperature, Term
from st_magnitude.kernel.tiles import InfoNCE, Judge, Plan, divide_by_norms, of_both_sides, prefixes_of
from st_magnitude.similarity import COSINE, Similarity, at_least_float32

__all__ = ["Direction", "Exclude", "Term", "infonce"]

# What excludes columns: integer ids, or a function of rows and their scores that returns booleans; or several of them.
Exclude = Tensor | Judge | Sequence[Tensor | Judge]
Direction = Literal["query_to_document", "document_to_query", "both"]


def infonce(
    queries: Tensor,
    documents: Tensor,
    terms: Sequence[Term] = (Term(),),
    similarity: Similarity = COSINE,
    direction: Direction = "query_to_document",
    offset: int = 0,
    *,
    all_queries: Tensor | None = None,
    own_documents: Tensor | None = None,
    hardness: float | tuple[float, float] = 0.0,
    exclude: Exclude | None = None,
    exclude_queries: Judge | Sequence[Judge] | None = None,
    positives: Tensor | None = None,
    log_q: Tensor | None = None,
    log_q_queries: Tensor | None = None,
    tile_rows: int | None = None,
) -> Tensor:
    """InfoNCE over in-batch (and explicit) negatives: the mean over queries, summed over terms.

    Args:
        queries: Embeddings (B, D), not normalised.
        documents: Embeddings (M, D), M >= B. Row ``offset + i`` is the positive of query i, and all other rows are its
            negatives.
        terms: Prefix dimensions, temperatures and weights.
        similarity: Exponents of the norms. Learnable exponents (0-d tensors) receive gradients.
        direction: ``"query_to_document"``: the softmax of a query runs over all documents. ``"document_to_query"``:
            the softmax of a positive document runs over all queries. ``"both"``: the mean of the two losses.
        offset: Index of the first query's positive, for documents that were gathered from several devices.
        all_queries: Embeddings (Q, D) that the softmax of a document runs over, for queries that were gathered from
            several devices. Row ``offset + i`` is query i. None: the queries themselves.
        own_documents: The positives (B, D), for documents that were gathered without their gradient. The softmax of a
            document takes them from here. None: rows ``offset`` to ``offset + B`` of the documents.
        hardness: Weight alpha >= 0 of similar negatives. A negative counts exp(alpha · s) times in the softmax, where
            s is treated as a constant (Lan et al. 2025, arXiv 2503.04812, Eq. 5; sentence-transformers'
            ``hardness_mode="all_negatives"``). One number weights the negatives of both directions. A pair gives
            each direction its own alpha: ``(alpha, 0)`` weights documents only, as sentence-transformers does.
        exclude: Documents that are not negatives of a query: integer ids (M,), a function, or a sequence of both. A
            document with the id of the query's positive is left out of the query's softmax. A query has the id of its
            positive, and is left out of the softmax of other documents with that id. A function
            ``exclude(rows, scores)`` is called once for a tile of queries, ``rows`` being their slice, and returns
            booleans (n, M) that are True for documents to leave out. ``scores`` (n, M) are taken at the longest prefix
            before the temperature; they may be read during the call only. A positive always stays.
        exclude_queries: The same for the softmax of a document: functions whose ``rows`` are a slice of the B positives
            and whose ``scores`` are (n, Q) against all queries.
        positives: Several positives of a query: integer ids (M,) of the documents, equal for documents of the same
            content: the positives of query i are all documents with the id of row ``offset + i``; or booleans
            (B, M). The loss of a query is then the mean of -log softmax over its positives, all of which stay in the
            softmax (Khosla et al. 2020, arXiv 2004.11362, Eq. 2; with ``direction="both"``, Yang et al. 2022, arXiv
            2204.03610, Eq. 2 and 3). For a softmax without them, with the query's own positive as the only one, give
            the ids as ``exclude`` instead. ``hardness`` weights negatives only.
        log_q: Logarithms of how often each document is drawn as a negative, (M,), which are subtracted from the logits,
            s / tau - log q, of all terms: those of the positives, too. In-batch negatives are drawn as often as
            documents occur in the training pairs, so without the correction a popular document is a negative too often
            and the loss learns not to rank by popularity (Yi et al. 2019, Sampling-bias-corrected neural modeling,
            RecSys, Eq. 3 to 5). A constant added to all numbers changes nothing. They are constants without a gradient,
            and differ by at most 80 in float32.
        log_q_queries: The same for the queries in the softmax of a document: (B,), or (Q,) with all_queries.
        tile_rows: Largest number of rows of scores in a tile. The default is 1024 on a GPU; on a CPU it is 2^19 / M,
            but at least 256. Besides inputs and gradients, memory holds both sides divided by their norms and tiles of
            tile_rows x M numbers: one more than there are prefixes, one for several temperatures of a prefix, and one
            if a temperature is learned.

    Returns:
        A scalar, in float64 for float64 inputs and in float32 otherwise.

    Raises:
        ValueError: If shapes, dims, offset or direction do not fit together, or a row of booleans names no positive.

    Gradients reach queries, documents, all_queries, and those exponents and temperatures that are tensors. The forward
    pass takes them once, so a second derivative does not exist.
    :func:`~st_magnitude.kernel.reference.infonce_reference` is the same loss as a plain formula.

    Example:
        >>> import torch
        >>> from st_magnitude import QNORM, Term, infonce
        >>> embeddings = torch.eye(4, requires_grad=True)
        >>> loss = infonce(embeddings, embeddings, terms=[Term(temperature=0.5), Term(dim=2, weight=0.1)])
        >>> round(loss.item(), 4)
        0.4101

    Source: van den Oord et al. 2018, arXiv 1807.03748, Eq. 4; Beyond the Unit Hypersphere, arXiv 2602.09229, Eq. 2.
    """
    terms = tuple(terms)
    width = check_shapes(queries, documents, all_queries, own_documents, terms, direction, offset)
    priors = check_priors(log_q, log_q_queries, documents, queries if all_queries is None else all_queries)
    sides = sides_of(exclude, exclude_queries, positives, queries, documents, offset, all_queries, direction)
    dims, members = prefixes_of(terms, width)
    forward, backward = (
        Plan(
            dims=dims,
            members=members,
            weights=tuple(t.weight for t in terms),
            hardness=alpha,
            judges=side.judges,
            positives=side.positives,
            log_q=prior,
            tile_rows=tile_rows,
        )
        for alpha, side, prior in zip(of_both_sides(hardness), sides, priors, strict=True)
    )
    # From here on every score is a plain inner product: the norms of the longest prefix are divided out first, and
    # the norms of shorter prefixes are factors of rows and columns.
    losses = []
    with torch.autocast(queries.device.type, enabled=False):
        q, q_scale = divide_by_norms(queries, forward.dims, similarity.gamma_query)  # (B, D'), (K - 1, B)
        d, d_scale = divide_by_norms(documents, forward.dims, similarity.gamma_document)  # (M, D'), (K - 1, M)
        temperatures = torch.stack([torch.as_tensor(t.temperature, dtype=q.dtype, device=q.device) for t in terms])
        if direction in ("query_to_document", "both"):
            loss = InfoNCE.apply(q, d, q_scale, d_scale, temperatures, offset, forward)
            towards = queries, documents, terms, similarity, offset, sides[0].positives, priors[0]
            losses.append(loss + _other_positives(*towards))
        if direction in ("document_to_query", "both"):
            own = slice(offset, offset + len(q))
            if own_documents is None:
                own_documents, d, d_scale = documents[own], d[own], None if d_scale is None else d_scale[:, own]
            else:
                d, d_scale = divide_by_norms(own_documents, forward.dims, similarity.gamma_document)  # (B, D')
            if all_queries is None:
                all_queries, offset = queries, 0
            else:
                q, q_scale = divide_by_norms(all_queries, forward.dims, similarity.gamma_query)  # (Q, D')
            loss = InfoNCE.apply(d, q, d_scale, q_scale, temperatures, offset, backward)
            towards = own_documents, all_queries, terms, similarity.swapped, offset, sides[1].positives, priors[1]
            losses.append(loss + _other_positives(*towards))
    return losses[0] if len(losses) == 1 else (losses[0] + losses[1]) / 2


def _other_positives(
    rows: Tensor,  # (B, D)
    columns: Tensor,  # (M, D)
    terms: tuple[Term, ...],
    similarity: Similarity,
    offset: int,
    positives: _Equal | _Pairs | None,
    log_q: Tensor | None,  # (M,)
) -> Tensor | float:
    """The mean of -log softmax over all positives of a row, minus -log softmax of its own positive.

    It is linear, s(q, own) - s(q, mean of positives), so it does not need the B x M scores.
    """
    if positives is None:
        return 0.0
    differences = []
    for term in terms:
        q, d = similarity.query(rows[:, : term.dim]), similarity.document(columns[:, : term.dim])
        excess = (q * (d[offset : offset + len(q)] - positives.mean(d))).sum(dim=1).mean()
        differences.append(term.weight / term.temperature * excess)
        if log_q is not None:
            gap = positives.mean(log_q[:, None])[:, 0] - log_q[offset : offset + len(rows)]
            differences.append(term.weight * gap.mean())
    return torch.stack(differences).sum()


@dataclass(frozen=True)
class _Equal:
    """A judge: the columns with the id of the row."""

    rows: Tensor  # (B,) in 0 ... G - 1
    columns: Tensor  # (M,)

    def __call__(self, tile: slice, scores: Tensor) -> Tensor:
        return self.columns == self.rows[tile, None]

    def mean(self, columns: Tensor) -> Tensor:
        """(M, D) -> (B, D): for each row the mean of the columns with its id."""
        count = torch.bincount(self.columns, minlength=int(self.rows.max()) + 1)  # (G,)
        sums = columns.new_zeros(len(count), columns.shape[1]).index_add(0, self.columns, columns)  # (G, D)
        return (sums / count.clamp(min=1)[:, None])[self.rows.long()]


@dataclass(frozen=True)
class _Pairs:
    """A judge: the columns that a matrix names."""

    matrix: Tensor  # (B, M)

    def __call__(self, tile: slice, scores: Tensor) -> Tensor:
        return self.matrix[tile]

    def mean(self, columns: Tensor) -> Tensor:
        """(M, D) -> (B, D): for each row the mean of its columns."""
        return self.matrix.to(columns.dtype) @ columns / self.matrix.sum(dim=1, keepdim=True)


@dataclass(frozen=True)
class Side:
    """The columns that are not negatives of a row, in one direction."""

    judges: tuple[Judge, ...]
    positives: _Equal | _Pairs | None


def sides_of(
    exclude: Exclude | None,
    exclude_queries: Judge | Sequence[Judge] | None,
    positives: Tensor | None,
    queries: Tensor,
    documents: Tensor,
    offset: int,
    all_queries: Tensor | None,
    direction: Direction,
) -> tuple[Side, Side]:
    """The excluded columns and the positives, in the softmax of a query and in the softmax of a document."""
    own = slice(offset, offset + len(queries))
    columns = own if all_queries is None else slice(len(all_queries))  # the positives of the queries of a softmax

    def equal(name: str, ids: Tensor) -> tuple[_Equal, _Equal] | None:
        if ids.dtype == torch.bool or ids.is_floating_point() or ids.shape != documents.shape[:1]:
            raise ValueError(
                f"{name} takes integer ids ({len(documents)},) of the documents; got {ids.dtype} of shape "
                f"{tuple(ids.shape)}."
            )
        names, groups = torch.unique(ids, return_inverse=True)
        groups = groups.int()  # two of them compare in half the time of two int64
        same = _Equal(groups[own], groups), _Equal(groups[own], groups[columns])
        return same if len(names) < len(groups) else None

    for_queries, for_documents = [], list(_sequence(exclude_queries))
    for judge in _sequence(exclude):
        if not isinstance(judge, Tensor):
            for_queries.append(judge)
        elif same := equal("exclude", judge):
            for_queries.append(same[0])
            for_documents.append(same[1])
    partners: tuple[_Equal, _Equal] | tuple[_Pairs, _Pairs] | None = None
    if positives is not None and positives.shape == (len(queries), len(documents)) and positives.dtype == torch.bool:
        if all_queries is not None and len(all_queries) != len(queries):
            raise ValueError("positives are booleans of these queries, not of all_queries; give integer ids (M,).")
        partners = _Pairs(positives), _Pairs(positives[:, columns].T)
        used = {"query_to_document": partners[:1], "document_to_query": partners[1:], "both": partners}[direction]
        for pairs in used:
            if not pairs.matrix.any(dim=1).all():
                row = int(pairs.matrix.any(dim=1).int().argmin())
                what = f"query {row}" if pairs is partners[0] else f"document {own.start + row}"
                raise ValueError(f"positives has no True for {what}, but every softmax needs a positive.")
    elif positives is not None:
        partners = equal("positives", positives)
    first, second = partners or (None, None)
    return Side(tuple(for_queries), first), Side(tuple(for_documents), second)


def _sequence(exclude: Exclude | None) -> Sequence[Any]:
    if exclude is None:
        return ()
    return exclude if isinstance(exclude, (list, tuple)) else (exclude,)


def check_priors(
    log_q: Tensor | None, log_q_queries: Tensor | None, documents: Tensor, queries: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The logarithms of sampling probabilities of documents and queries, after a check of their shapes."""
    checked = []
    for name, numbers, columns in (("log_q", log_q, documents), ("log_q_queries", log_q_queries, queries)):
        if numbers is not None and (numbers.shape != columns.shape[:1] or not numbers.is_floating_point()):
            raise ValueError(
                f"{name} takes the logarithms of {len(columns)} probabilities, one of each column; got "
                f"{numbers.dtype} of shape {tuple(numbers.shape)}."
            )
        checked.append(None if numbers is None else numbers.detach().to(at_least_float32(columns[:0]).dtype))
    first, second = checked
    return first, second


def check_shapes(
    queries: Tensor,
    documents: Tensor,
    all_queries: Tensor | None,
    own_documents: Tensor | None,
    terms: tuple[Term, ...],
    direction: str,
    offset: int,
) -> int:
    """The number of dimensions, after a check that the arguments fit together."""
    if queries.ndim != 2 or documents.ndim != 2 or queries.shape[1] != documents.shape[1]:
        raise ValueError(
            "infonce takes queries (B, D) and documents (M, D); got "
            f"{tuple(queries.shape)} and {tuple(documents.shape)}."
        )
    if not terms:
        raise ValueError("infonce needs at least one Term.")
    if any(isinstance(t.temperature, LearnedTemperature) for t in terms):
        raise ValueError(
            "Ranking losses learn temperatures, infonce does not: give it a 0-d tensor that requires a gradient, "
            "Term(temperature=tau)."
        )
    if direction not in ("query_to_document", "document_to_query", "both"):
        raise ValueError(f"direction must be 'query_to_document', 'document_to_query' or 'both'; got {direction!r}.")
    if len(queries) == 0 or offset < 0 or offset + len(queries) > len(documents):
        raise ValueError(
            f"{len(queries)} queries with offset {offset} need their positives in documents[{offset}:"
            f"{offset + len(queries)}], but there are {len(documents)} documents."
        )
    width = queries.shape[1]
    if all_queries is not None and (all_queries.shape[1:] != (width,) or offset + len(queries) > len(all_queries)):
        raise ValueError(
            f"all_queries holds these {len(queries)} queries from row {offset} on, so it has the shape (Q, {width}) "
            f"with Q >= {offset + len(queries)}; got {tuple(all_queries.shape)}."
        )
    if own_documents is not None and own_documents.shape != queries.shape:
        raise ValueError(
            f"own_documents are the positives of the queries, {tuple(queries.shape)}; got {tuple(own_documents.shape)}."
        )
    if too_long := [t.dim for t in terms if t.dim is not None and t.dim > width]:
        raise ValueError(f"Term dims {too_long} exceed the {width} dimensions of the embeddings.")
    return width

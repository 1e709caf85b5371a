"""infonce: the one kernel of every contrastive loss in this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.amp import is_autocast_available

from st_magnitude._checks import at_least, one_of
from st_magnitude.kernel.batch import Batch, Direction, Exclude, PartitionMode, Targets
from st_magnitude.kernel.plain import plain_infonce
from st_magnitude.kernel.terms import Plan, Term, check_terms
from st_magnitude.kernel.tiled import tiled_infonce
from st_magnitude.similarity import COSINE, Similarity

__all__ = ["Direction", "Exclude", "Term", "infonce"]

Backend = Literal["auto", "plain", "tiled"]
PLAIN_SCORES = 2**17  # of all terms, up to which backend="auto" is plain, the faster engine there


def infonce(
    queries: Tensor,
    documents: Tensor,
    terms: Sequence[Term] = (Term(),),
    similarity: Similarity | str = COSINE,
    directions: Sequence[Direction] = ("query_to_doc",),
    offset: int = 0,
    *,
    backend: Backend = "auto",
    partition_mode: PartitionMode = "joint",
    all_queries: Tensor | None = None,
    exclude: Exclude | None = None,
    positives: Tensor | None = None,
    targets: Targets | None = None,
    targets_queries: Targets | None = None,
    weights: Tensor | None = None,
    log_q: Tensor | None = None,
    log_q_queries: Tensor | None = None,
    hardness_strength: float = 0.0,
    tile_rows: int | None = None,
) -> Tensor:
    """InfoNCE over in-batch (and explicit) negatives: the mean over queries, summed over terms.

        L = sum_t w_t · mean_i [ -log softmax_j( s_t(q_i, d_j) / tau_t ) at j = offset + i ]

    where s_t is a similarity of the first ``dim_t`` coordinates. Gradients reach queries,
    documents, all_queries, and exponents and temperatures that are tensors. The tiled engine has no
    second derivative and takes no transform of torch.func.

    Args:
        queries: Embeddings (B, D), not normalised.
        documents: Embeddings (M, D), M >= B. Row ``offset + i`` is the positive of query i, and all
            other rows are its negatives.
        terms: Prefix dimensions, temperatures and weights.
        similarity: Exponents of the norms, numbers or 0-d tensors, or the name of a similarity.
        directions: What the softmax runs over, as in sentence-transformers'
            ``MultipleNegativesRankingLoss``: ``"query_to_doc"``, a query and all documents;
            ``"query_to_query"``, a query and all other queries; ``"doc_to_query"``, a positive and
            all queries; ``"doc_to_doc"``, a positive and all documents of other queries.
            ``"query_to_doc"`` is one of them, or ``"doc_to_query"`` is the only one.
        partition_mode: ``"joint"``: one softmax of query i and its positive over the scores of all
            directions, whose positive is s(q_i, d_i) (Li et al. 2023, arXiv 2308.03281).
            ``"per_direction"``: one softmax for ``"query_to_doc"`` and one for ``"doc_to_query"``,
            of whose losses the mean is taken.
        offset: Index of the first query's positive, for documents gathered from devices.
        all_queries: Gathered embeddings (Q, D) that the softmax of a document runs over. Row
            ``offset + i`` is query i, and document j belongs to query j modulo Q, which counts for
            ``"doc_to_doc"``. None: the queries.
        exclude: Documents that are not negatives of a query: integer ids (M,), an
            :class:`~st_magnitude.kernel.batch.Above`, which compares scores with that of the
            positive, or a sequence of ids and one of these. Texts of one id are not negatives of
            each other, and a query has the id of its positive, or one of its own in
            :class:`~st_magnitude.kernel.batch.Ids`. A positive always stays.
        positives: Several positives of a query: integer ids (M,) of the documents, equal for
            documents of the same content. The loss of a query is then the mean of -log softmax over
            its positives, all of which stay in the softmax (Khosla et al. 2020, arXiv 2004.11362,
            Eq. 2; with both directions, Yang et al. 2022, arXiv 2204.03610, Eq. 2 and 3).
        targets: The share T_ij of each document in the target of a query, numbers or booleans
            (B, M), or a function of a slice of the queries that returns theirs, (n, M). They are
            not negative, rows are divided by their sums, and a row of zeros has its own positive.
            The loss of a query is then -sum_j T_ij log softmax_j, and documents with a target stay
            in the softmax.
        targets_queries: The same for the softmax of a document, (B, Q). None: the targets (B, M) of
            the positives, transposed.
        weights: Factors (B,) of the losses of the rows, before the mean; constants.
        log_q: Logarithms, up to a constant, of how often each document is drawn as a negative,
            (M,): the logits become s / tau - log q (Yi et al. 2019, RecSys, Eq. 3 to 5; see
            :class:`~st_magnitude.DocumentPrior`). They are constants.
        log_q_queries: The same for queries in the softmax of a document, (B,) or (Q,).
        hardness_strength: The alpha of alpha · s_t, which is added to the logits of negatives as a
            constant: negatives weigh more the more similar they are, exp(alpha · s_t) (Lan et al.
            2025, arXiv 2503.04812, Eq. 5, with 9; sentence-transformers' ``"all_negatives"``).
        backend: ``"plain"``: the formula as in :mod:`st_magnitude.kernel.plain`, by autograd, which
            holds all scores. ``"tiled"``: the same value and gradients without a B x M matrix.
            ``"auto"``: plain while the scores of all terms are at most 2^17 numbers and autocast,
            which would multiply the gradients in half precision, is off.
        tile_rows: Largest number of rows of scores in a tile. The default is 1024 on a GPU; on a
            CPU it is 2^20 / M, but at least 256.

    Returns:
        A scalar, in float64 for float64 inputs and in float32 otherwise.

    Raises:
        ValueError: If shapes, dims, offset or directions do not fit together.

    Example:
        >>> import torch
        >>> from st_magnitude import Term, infonce
        >>> embeddings = torch.eye(4, requires_grad=True)
        >>> terms = [Term(temperature=0.5), Term(dim=2, weight=0.1)]
        >>> round(infonce(embeddings, embeddings, terms).item(), 4)
        0.4101

    Source: van den Oord et al. 2018, arXiv 1807.03748, Eq. 4; Beyond the Unit Hypersphere, arXiv
        2602.09229, Eq. 2.
    """
    terms = tuple(terms)
    one_of("backend", backend, get_args(Backend))
    if tile_rows is not None:
        at_least("tile_rows", tile_rows, 1)
    softmaxes = softmaxes_of(directions, partition_mode)
    batch = Batch(
        queries=queries,
        documents=documents,
        offset=offset,
        all_queries=all_queries,
        exclude=exclude,
        positives=positives,
        targets=targets,
        targets_queries=targets_queries,
        weights=weights,
        log_q=log_q,
        log_q_queries=log_q_queries,
        hardness_strength=hardness_strength,
    )
    batch.check(directions)
    check_terms(terms, queries.shape[1])
    return infonce_of(batch, terms, Similarity.named(similarity), softmaxes, backend, tile_rows)


def infonce_of(
    batch: Batch,
    terms: Sequence[Term],
    similarity: Similarity,
    softmaxes: Sequence[tuple[Direction, ...]],
    backend: Backend = "auto",
    tile_rows: int | None = None,
) -> Tensor:
    """:func:`infonce` of a batch that fits together, over softmaxes of `softmaxes_of`."""
    num_rows = len(batch.queries)
    if backend == "auto":
        # several directions are slower than their scores, as each divides by the norms anew
        num_directions = sum(map(len, softmaxes))
        num_scores = num_rows * len(batch.documents) * len(terms) * num_directions**3
        is_small = num_scores <= PLAIN_SCORES and tile_rows is None
        device = batch.queries.device.type
        is_exact = not (is_autocast_available(device) and torch.is_autocast_enabled(device))
        backend = "plain" if is_small and is_exact else "tiled"
    if backend == "plain":
        return plain_infonce(batch, terms, similarity, softmaxes)
    plan = Plan(terms, batch, similarity, num_rows * len(softmaxes), tile_rows)
    return tiled_infonce(batch, similarity, softmaxes, plan)


def softmaxes_of(
    directions: Sequence[Direction], partition_mode: PartitionMode
) -> list[tuple[Direction, ...]]:
    """The directions of each softmax, that of the positives first, if they fit together."""
    one_of("partition_mode", partition_mode, get_args(PartitionMode))
    for direction in directions:
        one_of("directions", direction, get_args(Direction))
    if "query_to_doc" not in directions and tuple(directions) != ("doc_to_query",):
        raise ValueError(
            "directions must include 'query_to_doc', which has the positives, or be"
            f" ('doc_to_query',); got {tuple(directions)}."
        )
    ordered = sorted(dict.fromkeys(directions), key=lambda direction: direction != "query_to_doc")
    if partition_mode == "joint":
        return [tuple(ordered)]
    if {"query_to_query", "doc_to_doc"} & set(directions):
        raise ValueError(
            "partition_mode='per_direction' takes 'query_to_doc' and 'doc_to_query', because"
            " 'query_to_query' and 'doc_to_doc' have no positives. Use partition_mode='joint'."
        )
    return [(direction,) for direction in ordered]

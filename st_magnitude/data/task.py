"""EncodedTask: the embeddings of retrieval data, the only exhaustive search and the only nDCG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor

from st_magnitude._checks import InputError
from st_magnitude.data.ranking import Ranking, ndcg
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.raw import encode_raw

if TYPE_CHECKING:
    from st_magnitude.data.retrieval import RetrievalData

TILE = 2**24  # scores that are held at a time
TILE_WIDTH = 2**16  # documents whose scores are held at a time


class NotFiniteError(InputError):
    """Embeddings that answer nothing: with NaN or infinite entries, or the same for all texts."""


@dataclass(frozen=True, eq=False)
class EncodedTask:
    """The raw embeddings of retrieval data, and the results of an exhaustive search with them.

    ``columns`` may also hold sequences of columns, whose grades are 1. It is empty for a search
    without judgments. The document that is the query itself, if ``own`` names one, scores -inf: it
    ranks last, and is returned only where all documents are.

    Example:
        >>> queries = torch.tensor([[1.0, 0.0]])
        >>> documents = torch.tensor([[1.0, 0.0], [3.0, 3.0]])
        >>> task = EncodedTask(queries, documents, columns=[[0]])
        >>> top = task.top(Similarity.named("dot"))
        >>> top.tolist(), task.ndcg(top).round(3)
        ([[1, 0]], array([0.631]))
    """

    queries: Tensor  # (n, D)
    documents: Tensor  # (m, D), in the order of their ids
    # of the relevant documents of every query, with their grades
    columns: Sequence[Mapping[int, int]] = ()
    query_ids: Sequence[str] | None = None  # for messages
    document_ids: Sequence[str] | None = None
    # (n,), the column of the document that is the query itself, or -1
    own: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    data: RetrievalData | None = None  # of which these are the embeddings; `search` needs it

    def __post_init__(self) -> None:
        # the search sums in float64, which Apple's GPUs do not have
        for name in ("queries", "documents"):
            if getattr(self, name).device.type == "mps":
                object.__setattr__(self, name, getattr(self, name).cpu())
        check_finite(self.queries, "query", self.query_ids)
        check_finite(self.documents, "document", self.document_ids)
        graded = [
            dict(row) if isinstance(row, Mapping) else dict.fromkeys(map(int, row), 1)
            for row in self.columns
        ]
        object.__setattr__(self, "columns", graded)
        if not len(self.own):
            object.__setattr__(self, "own", torch.full((len(self.queries),), -1))

    @property
    def degrees(self) -> NDArray[np.int64]:
        """The number of queries to which each document is relevant: (m,)."""
        return np.bincount([c for row in self.columns for c in row], minlength=len(self.documents))

    def prefix(self, dim: int) -> EncodedTask:
        """The same task with the first ``dim`` dimensions, whose norm similarities divide by."""
        return replace(self, queries=self.queries[:, :dim], documents=self.documents[:, :dim])

    def top(self, similarity: Similarity, k: int = 10) -> Tensor:
        """Columns of the best k documents of every query, best first: (n, <= k), on the CPU.

        Equal scores rank by column, the lower first, which is the lower document id. Products are
        summed in float64 and scores rounded to float32, so equal documents have equal scores
        wherever in the matrix they stand. Very long or short vectors rank as others do.
        """
        return self.tops([similarity], k)[0]

    def tops(self, similarities: Sequence[Similarity], k: int = 10) -> list[Tensor]:
        """`top` for several similarities. One matrix product serves all of them."""
        return [columns for _, columns in self._best(similarities, k)]

    def search(self, similarity: Similarity, k: int = 100) -> Ranking:
        """The best k documents of every query, with their scores.

        Raises:
            ValueError: If the task has no ``data``, to which a ranking refers.
        """
        return self.searches([similarity], k)[0]

    def searches(self, similarities: Sequence[Similarity], k: int = 100) -> list[Ranking]:
        """`search` for several similarities. One matrix product serves all of them."""
        if self.data is None:
            raise InputError("A ranking refers to its data: encode them by data.encode(model).")
        found = []
        best = self._best(similarities, k)
        for similarity, (scores, columns) in zip(similarities, best, strict=True):
            # |q|^gamma_query, which changes no order
            of_query = Similarity(1.0, similarity.exponents[0])
            divided = scores / of_query.document_divisor(self.queries.double()).cpu()
            rows = zip(columns.numpy(), divided.numpy(), strict=True)
            found.append(Ranking.of(self.data, list(self.query_ids or ()), rows, k))
        return found

    def _best(self, similarities: Sequence[Similarity], k: int) -> list[tuple[Tensor, Tensor]]:
        """Scores without the divisor of the query, and columns, for each similarity, (n, <= k)."""
        # plain numbers
        similarities = [Similarity(*similarity.exponents) for similarity in similarities]
        chunk = min(len(self.documents), TILE_WIDTH)
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in similarities]
        rows = max(1, TILE // chunk)
        parts = self.queries.double().split(rows), self.own.split(rows)
        # Powers of two, which change no digit, bring all scores into the range of float32.
        q, d = _exponent(self.queries), _exponent(self.documents)
        powers = [2.0 ** (q + round(d * (1 - x.exponents[1]))) for x in similarities]
        for queries, own in zip(*parts, strict=True):
            nothing = queries.new_empty(len(queries), 0)
            best = [(nothing.float(), nothing.long())] * len(found)
            for start in range(0, len(self.documents), chunk):
                documents = self.documents[start : start + chunk].double()
                products = queries @ documents.T  # (rows, chunk)
                for i, similarity in enumerate(similarities):
                    # The query exponent changes no ranking, so only the documents are divided.
                    divisor = similarity.document_divisor(documents) * powers[i]  # (chunk, 1)
                    scores = (products / divisor.T).float()
                    hide_own(scores, own, start)
                    columns = rank(scores, k)
                    scores = torch.cat([best[i][0], scores.gather(1, columns)], dim=1)
                    columns = torch.cat([best[i][1], columns + start], dim=1)
                    # earlier documents stand first, so ties still go to the lower column
                    order = rank(scores, k)
                    best[i] = scores.gather(1, order), columns.gather(1, order)
            for i, (scores, columns) in enumerate(best):
                found[i].append((scores.cpu().double() * powers[i], columns.cpu()))
        joined = (zip(*tiles, strict=True) for tiles in found)
        return [(torch.cat(scores), torch.cat(columns)) for scores, columns in joined]

    def scores(self, similarity: Similarity, columns: Tensor) -> Tensor:
        """Scores of the given documents of every query: (n, k) columns -> (n, k), on the CPU.

        The document that is the query itself scores -inf. Scores have the digits of float32 and the
        range of float64.
        """
        similarity = Similarity(*similarity.exponents)  # plain numbers
        columns = columns.to(self.documents.device)
        rows = max(1, TILE // max(1, columns.shape[1] * self.documents.shape[1]))
        found = []
        for queries, some in zip(self.queries.split(rows), columns.split(rows), strict=True):
            documents = similarity.document(self.documents[some].double())  # (rows, k, D)
            products = documents @ similarity.query(queries.double())[:, :, None]  # (rows, k, 1)
            digits, exponents = torch.frexp(products[:, :, 0])
            found.append(digits.float().double() * 2.0 ** exponents.double())
        return torch.cat(found).cpu().masked_fill(columns.cpu() == self.own[:, None], -torch.inf)

    def gains(self, top: Tensor) -> NDArray[np.int64]:
        """The grade of each document of a ranking for its query, 0 or more: (n, k) -> (n, k)."""
        rows = zip(self.columns, top.tolist(), strict=True)
        gains = [[grades.get(column, 0) for column in columns] for grades, columns in rows]
        return np.array(gains, dtype=np.int64).reshape(top.shape)

    def hits(self, top: Tensor) -> NDArray[np.bool_]:
        """Whether each document of a ranking is relevant to its query: (n, k) columns -> (n, k)."""
        return self.gains(top) > 0

    def ndcg(self, top: Tensor, k: int = 10) -> NDArray[np.float64]:
        """nDCG@k of every query from the columns of its best documents, (n, >= k) -> (n,)."""
        return ndcg(self.gains(top), [row.values() for row in self.columns], k)


def _exponent(x: Tensor) -> int:
    """The exponent of 2 of the largest number."""
    low, high = x.aminmax() if len(x) else (0.0, 0.0)
    return math.frexp(max(-float(low), float(high)))[1]


def hide_own(scores: Tensor, own: Tensor, start: int = 0) -> None:
    """Gives -inf to the query itself in place, among scores from column ``start`` on, (n, m)."""
    rows = ((own >= start) & (own < start + scores.shape[1])).nonzero()[:, 0]
    scores[rows.to(scores.device), (own[rows] - start).to(scores.device)] = -torch.inf


def rank(scores: Tensor, k: int) -> Tensor:
    """Columns of the k best scores of each row, best first: (n, m) -> (n, min(k, m)).

    Ties go to the lower column.
    """
    k = min(k, scores.shape[1])
    values, indices = scores.topk(k, dim=1)
    # topk leaves open which of several equal scores it takes, and in which order.
    last = values[:, -1:]
    tied = ((scores >= last).sum(dim=1) > k).nonzero()[:, 0]
    # rows with a document outside that equals the k-th best: keep the lowest columns of those
    if len(tied):
        rows = scores[tied]
        above = rows > last[tied]
        equal = rows == last[tied]
        equal &= equal.cumsum(dim=1) <= k - above.sum(dim=1, keepdim=True)
        indices[tied] = (above | equal).nonzero()[:, 1].view(-1, k)
    indices = indices.sort(dim=1).values
    order = scores.gather(1, indices).sort(dim=1, descending=True, stable=True).indices
    return indices.gather(1, order)


def encode_texts(
    model: SentenceTransformer,
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    before_normalize: bool = False,
    query_prompt: str | None = None,
    query_prompt_name: str | None = None,
    corpus_prompt: str | None = None,
    corpus_prompt_name: str | None = None,
    **encode: object,
) -> EncodedTask:
    """Embeddings of the texts of a search, by ``encode_query`` and ``encode_document``.

    They are taken before a closing ExponentNorm, with ``before_normalize`` before a closing
    Normalize too. All other options (``batch_size``, ``show_progress_bar``, ``device``) are those
    of ``encode``. Documents are in the order of their ids.
    """
    document_ids = sorted(corpus)
    texts = list(queries.values())
    prompts = {"prompt": query_prompt, "prompt_name": query_prompt_name}
    q = encode_raw(model, texts, "query", not before_normalize, **prompts, **encode)
    documents = [corpus[document] for document in document_ids]
    prompts = {"prompt": corpus_prompt, "prompt_name": corpus_prompt_name}
    d = encode_raw(model, documents, "document", not before_normalize, **prompts, **encode)
    for role, given, found in (("query", texts, q), ("document", documents, d)):
        are_same = role == "document" and (found == found[:1]).all()
        if len(set(given)) > 1 and (are_same or not found.any()):
            raise NotFiniteError(
                f"The embeddings of {len(set(given)):,} different {role} texts are all"
                f" {'the same' if found.any() else 'zero'}: the weights or the tokenizer of the"
                " model are damaged, it knows no word of the texts, or its training has collapsed."
                " Take another model."
            )
    return EncodedTask(q, d, query_ids=list(queries), document_ids=document_ids)


def check_finite(embeddings: Tensor, role: str, ids: Sequence[str] | None = None) -> None:
    """Refuses embeddings, (n, D), with NaN or infinite entries, and names the text of the first."""
    broken = (~embeddings.isfinite().all(dim=1)).nonzero()[:, 0].tolist()
    if broken:
        first = f"row {broken[0]}" if ids is None else repr(ids[broken[0]])
        raise NotFiniteError(
            f"{len(broken)} of {len(embeddings)} {role} embeddings are not finite, such as that of"
            f" {first}: the model has diverged, or overflows in half precision; load it in float32."
        )

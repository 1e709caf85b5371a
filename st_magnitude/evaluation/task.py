"""JudgedTask and EncodedTask: queries, a corpus and judgments, and the embeddings of the two sides.

Every retrieval figure of the package is a short function of an EncodedTask: `EncodedTask.top` is the only exhaustive
search and `EncodedTask.ndcg` the only nDCG.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor

from st_magnitude.corpus.beir import checked_judgments
from st_magnitude.evaluation.metrics import TILE, ndcg, rank
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.raw import encode_raw

__all__ = ["EncodedTask", "JudgedTask", "NotFiniteError", "check_finite", "check_texts", "encode_texts"]

CHUNK = 2**16  # documents whose scores are held at a time


class NotFiniteError(ValueError):
    """An embedding with NaN or infinite entries: the model has diverged, or overflows in half precision."""


@dataclass
class JudgedTask:
    """A search task with judgments, checked before anything is encoded.

    ``query_ids`` are the queries with a relevant document, in the given order; the others do not count, as in sentence-
    transformers. ``document_ids`` are all documents in the order of their ids, so that the lower index of two is the
    lower id, and ``columns`` the positions there of the relevant documents of every query.

    Raises:
        ValueError: If queries or corpus are empty or not a mapping, no query has a relevant document, a judged document
            is not in the corpus, the documents of a query are not a collection of ids, or a document is both relevant
            to a query and a negative of it.

    Example:
        >>> task = JudgedTask({"q": "what barks?", "r": "who?"}, {"d2": "a dog", "d1": "a cat"}, {"q": ["d2"]})
        >>> task.query_ids, task.document_ids, task.columns
        (['q'], ['d1', 'd2'], [[1]])
    """

    queries: Mapping[str, str]  # id -> text
    corpus: Mapping[str, str]
    relevant: Mapping[str, Collection[str]]  # query id -> document ids
    negatives: Mapping[str, Collection[str]] = field(default_factory=dict)  # judged not relevant

    def __post_init__(self) -> None:
        check_texts(self.queries, self.corpus)
        self.relevant, self.negatives = checked_judgments(self.corpus, self.relevant, self.negatives)
        if not any(self.relevant.get(query) for query in self.queries):
            raise ValueError(
                f"None of the {len(self.queries)} queries has a relevant document: relevant_docs maps query ids to "
                f"sets of document ids. Its keys start with {list(self.relevant)[:3]}, those of queries with "
                f"{list(self.queries)[:3]}."
            )

    @cached_property
    def query_ids(self) -> list[str]:
        return [query for query in self.queries if self.relevant.get(query)]

    @cached_property
    def document_ids(self) -> list[str]:
        return sorted(self.corpus)

    @cached_property
    def columns(self) -> list[list[int]]:
        position = {document: column for column, document in enumerate(self.document_ids)}
        return [sorted(position[document] for document in self.relevant[query]) for query in self.query_ids]

    def encode(self, model: SentenceTransformer, batch_size: int = 32, **options: Any) -> EncodedTask:
        """Encodes the queries that count and the corpus; `encode_texts` documents the options and the errors."""
        judged = {query: self.queries[query] for query in self.query_ids}
        return replace(encode_texts(model, judged, self.corpus, batch_size, **options), columns=self.columns)


@dataclass(frozen=True, eq=False)
class EncodedTask:
    """The raw embeddings of a task, and what an exhaustive search finds with them.

    Raises:
        ValueError: If an embedding is not finite. The message names its text.

    Example:
        >>> task = EncodedTask(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [3.0, 3.0]]), columns=[[0]])
        >>> for similarity in ("cosine", "dot"):
        ...     top = task.top(Similarity.named(similarity))
        ...     print(similarity, top.tolist(), task.ndcg(top).round(3))
        cosine [[0, 1]] [1.]
        dot [[1, 0]] [0.631]
    """

    queries: Tensor  # (n, D)
    documents: Tensor  # (m, D), in the order of their ids
    columns: Sequence[Sequence[int]] = ()  # of the relevant documents of every query; empty for a search alone
    query_ids: Sequence[str] | None = None  # for messages
    document_ids: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_finite(self.queries, "query", self.query_ids)
        check_finite(self.documents, "document", self.document_ids)

    @property
    def degrees(self) -> NDArray[np.int64]:
        """The number of queries to which each document is relevant: (m,)."""
        return np.bincount([c for row in self.columns for c in row], minlength=len(self.documents))

    def prefix(self, dim: int) -> EncodedTask:
        """The same task with the first ``dim`` dimensions. Similarities then divide by the norm of the prefix."""
        return replace(self, queries=self.queries[:, :dim], documents=self.documents[:, :dim])

    def top(self, similarity: Similarity, k: int = 10, among: NDArray[Any] | Tensor | None = None) -> Tensor:
        """Columns of the best k documents of every query, best first: (n, <= k), on the CPU.

        Equal scores rank by column, the lower first, which is the lower document id. Products are summed in float64
        and scores rounded to float32, so that equal documents have equal scores wherever in the matrix they stand.
        ``among`` is a mask of the documents that the index holds, (m,) booleans, or their columns in rising order.
        """
        if among is None:
            return self.tops([similarity], k)[0]
        kept = torch.as_tensor(among)
        kept = kept.nonzero()[:, 0] if kept.dtype == torch.bool else kept
        found = EncodedTask(self.queries, self.documents[kept.to(self.documents.device)]).top(similarity, k)
        return kept.cpu()[found]

    def tops(self, similarities: Sequence[Similarity], k: int = 10) -> list[Tensor]:
        """`top` for several similarities. One matrix product serves all of them."""
        similarities = [Similarity(*similarity.exponents) for similarity in similarities]  # plain numbers
        chunk = min(len(self.documents), CHUNK)
        found: list[list[Tensor]] = [[] for _ in similarities]
        for queries in self.queries.double().split(max(1, TILE // chunk)):
            best = [(queries.new_empty(len(queries), 0).float(), queries.new_empty(len(queries), 0).long())] * len(
                found
            )
            for start in range(0, len(self.documents), chunk):
                documents = self.documents[start : start + chunk].double()
                products = queries @ documents.T  # (rows, chunk)
                for i, similarity in enumerate(similarities):
                    # The query exponent changes no ranking, so that only the documents are divided.
                    scores = (products / similarity.document_divisor(documents).T).float()
                    columns = rank(scores, k)
                    scores = torch.cat([best[i][0], scores.gather(1, columns)], dim=1)
                    columns = torch.cat([best[i][1], columns + start], dim=1)
                    order = rank(scores, k)  # earlier documents stand first, so that ties still go to the lower column
                    best[i] = scores.gather(1, order), columns.gather(1, order)
            for of_similarity, (_, columns) in zip(found, best, strict=True):
                of_similarity.append(columns.cpu())
        return [torch.cat(tiles) for tiles in found]

    def scores(self, similarity: Similarity, columns: Tensor) -> Tensor:
        """Scores of the given documents of every query: (n, k) columns -> (n, k), on the CPU."""
        similarity, columns = Similarity(*similarity.exponents), columns.to(self.documents.device)
        rows = max(1, TILE // max(1, columns.shape[1] * self.documents.shape[1]))
        found = []
        for queries, some in zip(self.queries.split(rows), columns.split(rows), strict=True):
            documents = similarity.document(self.documents[some].double())  # (rows, k, D)
            found.append((documents @ similarity.query(queries.double())[:, :, None])[:, :, 0].float())
        return torch.cat(found).cpu()

    def hits(self, top: Tensor) -> NDArray[np.bool_]:
        """Whether each document of a ranking is relevant to its query: (n, k) columns -> (n, k)."""
        offsets = np.arange(len(self.columns)) * len(self.documents)
        relevant = [
            offset + column for offset, columns in zip(offsets, self.columns, strict=True) for column in columns
        ]
        return np.isin(offsets[:, None] + top.cpu().numpy(), relevant)

    def ndcg(self, top: Tensor, k: int = 10) -> NDArray[np.float64]:
        """nDCG@k of every query from the columns of its best documents: (n, >= k or the whole index) -> (n,)."""
        return ndcg(self.hits(top), [len(columns) for columns in self.columns], k)


def encode_texts(
    model: SentenceTransformer,
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    batch_size: int = 32,
    show_progress_bar: bool | None = None,
    before_normalize: bool = False,
    query_prompt: str | None = None,
    query_prompt_name: str | None = None,
    corpus_prompt: str | None = None,
    corpus_prompt_name: str | None = None,
) -> EncodedTask:
    """Embeddings of the texts of a search, by ``encode_query`` and ``encode_document``, without judgments.

    They are taken before a closing ExponentNorm, with ``before_normalize`` before a closing Normalize too. The
    arguments are those of `SearchEvaluator`; the documents are in the order of their ids.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["dog", "cat"])], device="cpu")
        >>> encode_texts(model, {"q": "a dog"}, {"d2": "a dog and a dog", "d1": "a cat"}).documents
        tensor([[0., 1.],
                [2., 0.]])
    """
    check_texts(queries, corpus)
    ids, document_ids = list(queries), sorted(corpus)
    prompts = {"query": (query_prompt, query_prompt_name), "document": (corpus_prompt, corpus_prompt_name)}
    texts = {"query": list(queries.values()), "document": [corpus[document] for document in document_ids]}
    sides = [
        encode_raw(model, texts[role], role, batch_size, show_progress_bar, *prompts[role], not before_normalize)
        for role in ("query", "document")
    ]
    # The search sums in float64, which Apple's GPUs do not have.
    q, d = (side.cpu() if side.device.type == "mps" else side for side in sides)
    return EncodedTask(q, d, query_ids=ids, document_ids=document_ids)


def check_texts(queries: Mapping[str, str], corpus: Mapping[str, str], name_of_queries: str = "queries") -> None:
    """Refuses a side that has no texts or is not a mapping from id to text."""
    for name, texts in {name_of_queries: queries, "corpus": corpus}.items():
        if not isinstance(texts, Mapping):
            raise ValueError(f"{name} is a {type(texts).__name__}; pass a dict of id -> text.")
        if not texts:
            raise ValueError(f"{name} is empty: pass a dict of id -> text.")


def check_finite(embeddings: Tensor, role: str, ids: Sequence[str] | None = None) -> None:
    """Refuses embeddings, (n, D), with NaN or infinite entries, and names the text of the first."""
    broken = (~embeddings.isfinite().all(dim=1)).nonzero()[:, 0].tolist()
    if broken:
        first = f"row {broken[0]}" if ids is None else repr(ids[broken[0]])
        raise NotFiniteError(
            f"{len(broken)} of {len(embeddings)} {role} embeddings are not finite, such as that of {first}: the model "
            "has diverged, or overflows in half precision; load it in float32."
        )

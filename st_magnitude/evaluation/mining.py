"""Hard negatives by the scores of any similarity."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import dot_score, mine_hard_negatives, pairwise_dot_score
from torch import Tensor

from st_magnitude._checks import one_of
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import TILE, EncodedTask, encode_texts, hide_own
from st_magnitude.evaluation.metrics import scoring_of
from st_magnitude.similarity import Similarity

__all__ = ["mine_negatives", "with_negatives"]

OUTPUT_FORMATS = ("triplet", "n-tuple", "labeled-pair", "labeled-list")
HIGH = 10  # ranks at which a never-relevant document counts as high


def mine_negatives(
    model: SentenceTransformer,
    data: RetrievalData,
    *,
    similarity: Similarity | str | None = None,
    never_relevant: bool = False,
    also_relevant: Collection[str] = (),
    min_queries: int = 3,
    seed: int = 0,
    encode: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """Mines hard negatives for training: documents that score high and do not answer the query.

    This is sentence-transformers' ``mine_hard_negatives`` with the scores of any similarity; by
    cosine the results are equal. Neither a document with the text of one of the query's positives
    nor the query itself, where it stands in the corpus under its id, is ever a negative.

    Documents that are relevant to none of the queries teach a norm, which in-batch negatives do
    not. One that ranks high for a single query may be an answer that nobody has judged, so with
    ``never_relevant`` negatives are among the ten best of at least ``min_queries`` queries.

    Args:
        model: The model whose scores count. A model that ends in Normalize is scored with unit
            embeddings.
        data: Queries, corpus and judgments; `RetrievalData.from_dataset` makes them of pairs.
        similarity: A Similarity or its name; by default the model's own.
        never_relevant: Whether only never-relevant documents can be negatives; by default all
            documents can.
        also_relevant: Ids of documents that are relevant to queries outside of ``data``, such as
            those of other splits (`st_magnitude.data.beir.relevant_documents`).
        min_queries: Number of queries that a never-relevant document must be among the ten best of.
        seed: Seed for ``sampling_strategy="random"``.
        encode: Options of encoding, such as ``{"batch_size": 64}``, see
            `st_magnitude.data.task.encode_texts`.
        **options: Arguments of ``mine_hard_negatives``: ``num_negatives``, ``output_format``,
            ``output_scores``, ``range_min``, ``range_max``, ``max_score``, ``min_score``,
            ``absolute_margin``, ``relative_margin``, ``sampling_strategy`` and ``cross_encoder``.

    Raises:
        ValueError: If no query has a relevant document, an option is out of its range, an embedding
            is not finite, or never-relevant documents are wanted and there are none.
        TypeError: If an option is unknown.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> words = BoW(["bees", "wax", "see"])
        >>> model = SentenceTransformer(modules=[words], similarity_fn_name="dot", device="cpu")
        >>> corpus = {"d1": "bees", "d2": "wax", "d3": "see bees bees, see wax wax"}
        >>> data = RetrievalData({"q": "bees", "r": "wax"}, corpus, {"q": {"d1"}, "r": {"d2"}})
        >>> mine_negatives(model, data, num_negatives=1)[0]
        {'anchor': 'bees', 'positive': 'bees', 'negative': 'see bees bees, see wax wax'}
    """
    one_of("output_format", options.get("output_format", "triplet"), OUTPUT_FORMATS)
    one_of("sampling_strategy", options.get("sampling_strategy", "top"), ("top", "random"))
    pairs = _pairs(data)
    queries = dict.fromkeys(pairs["anchor"])
    positives = dict.fromkeys(pairs["positive"])
    documents = dict.fromkeys([*data.corpus.values(), *positives])
    by_text = ({text: text for text in queries}, {text: text for text in documents})
    scorer = _Scorer(
        partial(encode_texts, model, *by_text, **(encode or {})),
        scoring_of(model, similarity),
        model.device,
        own={data.queries[query]: data.corpus[query] for query in data.own},
    )
    candidates = list(documents)
    if never_relevant:
        others = (data.corpus[document] for document in data.corpus.keys() & also_relevant)
        answers = {*positives, *others}
        candidates = [text for text in scorer.hubs(min_queries) if text not in answers]
        if not candidates:
            raise ValueError(
                f"Each document that is relevant to none of the queries is among the {HIGH} best "
                f"of fewer than {min_queries} of them. Lower min_queries, or add such documents "
                "to the corpus."
            )
        # mine_hard_negatives puts the positives behind the corpus
        scorer.searched = len(candidates)
    options |= {"faiss_batch_size": max(1, TILE // len(documents)), "verbose": False}
    state = random.getstate()  # of the generator that mine_hard_negatives draws from
    random.seed(seed)
    try:
        stand_in: Any = scorer  # for a model
        return mine_hard_negatives(pairs, stand_in, corpus=candidates, **options)
    finally:
        random.setstate(state)


def with_negatives(data: RetrievalData, mined: Dataset) -> RetrievalData:
    """The data with the triplets of `mine_negatives` as judged negatives."""
    document = {text: key for key, text in data.corpus.items()}
    found: dict[str, set[str]] = {}
    for anchor, negative in zip(mined["anchor"], mined["negative"], strict=True):
        found.setdefault(anchor, set()).add(document[negative])
    negatives = {}
    for query, text in data.queries.items():
        if documents := data.negatives.get(query, set()) | found.get(text, set()):
            negatives[query] = documents
    return replace(data, negatives=negatives)


def _pairs(data: RetrievalData) -> Dataset:
    """The texts of every pair of a query and a relevant document."""
    rows = [(query, key) for query in data.query_ids for key in sorted(data.relevant[query])]
    anchors = [data.queries[query] for query, _ in rows]
    positives = [data.corpus[key] for _, key in rows]
    return Dataset.from_dict({"anchor": anchors, "positive": positives})


class _Scorer:
    """A model as ``mine_hard_negatives`` sees it: its embeddings and their inner products.

    All texts are encoded at the first use, after ``mine_hard_negatives`` has checked its arguments.
    """

    similarity_pairwise = staticmethod(pairwise_dot_score)

    def __init__(
        self,
        encode: Callable[[], EncodedTask],
        similarity: Similarity,
        device: torch.device,
        own: Mapping[str, str],
    ) -> None:
        self._encode = encode
        self._similarity = similarity
        self.device = device
        self._own = own  # text of a query -> text of the document that is the query itself
        # number of documents, from the first, that are candidates; None for all
        self.searched: int | None = None

    @cached_property
    def _task(self) -> EncodedTask:
        task = self._encode()
        own = self._own_columns(task.query_ids or (), _positions(task.document_ids))
        return replace(task, own=own)

    def _own_columns(self, queries: Iterable[str], position: Mapping[str, int]) -> Tensor:
        """The position of each query's own document, or -1: (n,)."""
        columns = [position.get(self._own.get(query, ""), -1) for query in queries]
        return torch.tensor(columns, dtype=torch.long)

    def encode_query(self, texts: list[str], **_: object) -> NDArray[np.float32]:
        # `similarity` gets their embeddings in this order, some at a time
        self._asked = iter(texts)
        row = _positions(self._task.query_ids)
        queries = self._similarity.query(self._task.queries)
        return queries[[row[text] for text in texts]].cpu().numpy()

    def encode_document(self, texts: list[str], **_: object) -> NDArray[np.float32]:
        self._position = _positions(texts)
        row = _positions(self._task.document_ids)
        documents = self._similarity.document(self._task.documents)
        self._documents = documents[[row[text] for text in texts]]
        return self._documents.cpu().numpy()

    def similarity(self, queries: NDArray[np.float32], _: Tensor) -> Tensor:
        """Scores of all documents for the next queries: (n, D) -> (n, m)."""
        scores = dot_score(torch.from_numpy(queries).to(self._documents.device), self._documents)
        hide_own(scores, self._own_columns(islice(self._asked, len(queries)), self._position))
        if self.searched is not None:
            scores[:, self.searched :] = -torch.inf
        return scores

    def hubs(self, min_queries: int) -> list[str]:
        """Documents that are among the best of at least so many queries."""
        top = self._task.top(self._similarity, HIGH).flatten()
        counts = torch.bincount(top, minlength=len(self._task.documents)).tolist()
        rows = zip(self._task.document_ids or (), counts, strict=True)
        return [text for text, count in rows if count >= min_queries]


def _positions(texts: Sequence[str] | None) -> dict[str, int]:
    return {text: i for i, text in enumerate(texts or ())}

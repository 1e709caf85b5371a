"""Held-out queries on which a model is measured before and after its training."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import has_static_embedding_input
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask, encode_texts
from st_magnitude.evaluation.hybrid import bm25_run
from st_magnitude.evaluation.magnitude import geometry_figures
from st_magnitude.evaluation.scoring import scoring_of
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.raw import is_cut, normalizes_output

__all__ = ["RetrievalEvaluator", "bm25_control", "card_figures", "encode"]

logger = logging.getLogger(__name__)

NUM_DOCUMENTS = 500  # of the sample whose norms are measured
NUM_QUERIES = 100
DEPTH = 100  # documents of BM25's run for each query


def bm25_control(data: RetrievalData) -> tuple[Ranking | None, str]:
    """BM25's run of the data, or None and a sentence that says why it is no control.

    It is one where at least half of the queries share a word with an answer, or have `DEPTH`
    documents or more, of which no more are read. Without bm25s, the log says so.
    """
    try:
        run = bm25_run(data.only(data.query_ids), DEPTH)
    except ImportError as error:
        logger.warning(f"Not measured: {error}")
        return None, ""
    relevant = {query: data.relevant[query].keys() for query in data.query_ids}
    shared = sum(bool(ids & run[q].keys()) or len(run[q]) == DEPTH for q, ids in relevant.items())
    if 2 * shared >= len(relevant):
        return run, ""
    return None, (
        f"BM25 finds a word in common with an answer for {shared:,} of {len(relevant):,} queries"
        " only, so it is no control."
    )


def encode(model: SentenceTransformer, data: RetrievalData) -> tuple[EncodedTask, Similarity]:
    """The raw embeddings of queries and corpus, and the similarity under which the model ranks.

    On a terminal there is a progress bar where it may take long.
    """
    shows = sys.stderr.isatty() and not has_static_embedding_input(model)
    # parts of unit vectors are ranked as they are served
    before = not (normalizes_output(model) and is_cut(model))
    similarity = scoring_of(model, before_normalize=before)
    return data.encode(model, before_normalize=before, show_progress_bar=shows), similarity


def card_figures(
    model: SentenceTransformer,
    data: RetrievalData,
    answers: Collection[str],
    seed: int,
    encoded: EncodedTask | None = None,
) -> dict[str, float]:
    """Norms and directions of a sample of queries and documents, for the model card.

    Args:
        answers: Ids of the documents that answer a query of any split.
        encoded: The embeddings of all data; None encodes the sample alone.
    """
    rng = np.random.default_rng(seed)
    asked = rng.permutation(len(data.query_ids))[:NUM_QUERIES]
    drawn = np.sort(rng.permutation(len(data.document_ids))[:NUM_DOCUMENTS])
    documents = [data.document_ids[column] for column in drawn]
    if encoded is None:
        queries = [data.query_ids[row] for row in asked]
        texts = {query: data.queries[query] for query in queries}
        corpus = {document: data.corpus[document] for document in documents}
        encoded = encode_texts(model, texts, corpus, before_normalize=True)
        sides = {"document": encoded.documents, "query": encoded.queries}
    else:
        sides = {"document": encoded.documents[drawn], "query": encoded.queries[asked]}
    return geometry_figures(sides, np.array([document in answers for document in documents]))


class RetrievalEvaluator(SentenceEvaluator):
    """Writes given figures into the model card, with the first of them in bold."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def note(self, model: SentenceTransformer, figures: dict[str, float], steps: int) -> None:
        metrics = self.prefix_name_to_metrics(figures, self.name)
        self.primary_metric = next(iter(metrics))
        self.store_metrics_in_model_card_data(model, metrics, -1, steps)

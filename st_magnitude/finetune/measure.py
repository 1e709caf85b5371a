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
from st_magnitude.evaluation.lexical import TOKENS, bm25_run, words
from st_magnitude.evaluation.magnitude import geometry_figures
from st_magnitude.evaluation.scoring import scoring_of
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.raw import is_cut, normalizes_output

__all__ = ["RetrievalEvaluator", "bm25_control", "card_figures", "encode"]

logger = logging.getLogger(__name__)

NUM_DOCUMENTS = 500  # of the sample whose norms are measured
NUM_QUERIES = 100
DEPTH = 100  # documents of BM25's run for each query


def bm25_control(data: RetrievalData) -> tuple[dict[str, Ranking], str]:
    """BM25's rankings by `TOKENS`, or none and a sentence that says why it is no control.

    It is a control where at least half of the queries share a word with a document that answers
    them. For queries with `DEPTH` documents or more this is unknown, and counts as such.
    Without bm25s the log says what is missing, and the sentence is empty.
    """
    data = data.only(data.query_ids)
    try:
        by_words = bm25_run(data, DEPTH)
    except ImportError as error:
        logger.warning(f"Not measured: {error}")
        return {}, ""
    is_full = by_words.columns[:, -1] >= 0
    shared = int((is_full | (by_words.gains > 0).any(axis=1)).sum())
    if 2 * shared < len(by_words):
        return {}, (
            f"BM25 finds a word in common with an answer for {shared:,} of {len(by_words):,}"
            " queries only, so it is no control."
        )
    others = {name: split for name, split in TOKENS.items() if split is not words}
    found = {name: bm25_run(data, DEPTH, tokenizer=split) for name, split in others.items()}
    return {"words": by_words, **found}, ""


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

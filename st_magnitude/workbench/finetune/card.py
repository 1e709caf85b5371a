"""Figures of a training for the model card: norms and directions of a sample."""

from __future__ import annotations

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask, encode
from st_magnitude.evaluation.magnitude import geometry_figures
from st_magnitude.workbench.judging.exam import Exam

__all__ = ["RetrievalEvaluator", "card_figures"]

NUM_DOCUMENTS = 500  # of the sample whose norms are measured
NUM_QUERIES = 100


def card_figures(
    model: SentenceTransformer, exam: Exam, seed: int, task: EncodedTask | None = None
) -> dict[str, float]:
    """Norms and directions of a sample of queries and documents, for the model card. Without the
    embeddings of all data, only the sample is encoded."""
    data = exam.judged or exam.train
    rng = np.random.default_rng(seed)
    asked = rng.permutation(len(data.query_ids))[:NUM_QUERIES]
    drawn = np.sort(rng.permutation(len(data.document_ids))[:NUM_DOCUMENTS])
    documents = [data.document_ids[column] for column in drawn]
    if task is None:
        texts = {query: data.queries[query] for query in (data.query_ids[row] for row in asked)}
        sample = RetrievalData(texts, {i: data.corpus[i] for i in documents}, {})
        task = encode(model, sample, "cosine", before_normalize=True, only=texts)
        sides = {"document": task.documents, "query": task.queries}
    else:
        sides = {"document": task.documents[drawn], "query": task.queries[asked]}
    return geometry_figures(sides, np.array([document in exam.answers for document in documents]))


class RetrievalEvaluator(SentenceEvaluator):
    """Writes given figures into the model card, with the first of them in bold."""

    def note(
        self, model: SentenceTransformer, name: str, figures: dict[str, float], steps: int
    ) -> None:
        self.name = name
        metrics = self.prefix_name_to_metrics(figures, name)
        self.primary_metric = next(iter(metrics))
        self.store_metrics_in_model_card_data(model, metrics, -1, steps)

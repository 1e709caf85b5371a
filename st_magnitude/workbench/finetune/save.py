"""Saves what a training leaves: a model with its card, its record and what it has read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask, encode
from st_magnitude.evaluation.magnitude import geometry_figures
from st_magnitude.losses.ranking import MagnitudeRankingLoss
from st_magnitude.saving.card import add_section
from st_magnitude.training import run_folder
from st_magnitude.workbench.judging.choice import Decision
from st_magnitude.workbench.judging.exam import Exam
from st_magnitude.workbench.judging.verdict import Verdict
from st_magnitude.workbench.memory import write_memory

__all__ = ["RetrievalEvaluator", "card_figures", "note_figures", "save_run"]

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
    """Its name stands next to the figures in a model card."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def note_figures(
    trainer: SentenceTransformerTrainer,
    geometry: Mapping[str, Mapping[str, float]],
    verdict: Verdict | None,
) -> None:
    """Writes the figures before and after the training into the model card."""
    ndcg = {} if verdict is None else {"before": verdict.pretrained, "after": verdict.saved.ndcg}
    steps = {"before": 0, "after": trainer.state.global_step}
    for when, shown in geometry.items():
        found = {"ndcg@10": ndcg[when], **shown} if ndcg else dict(shown)
        evaluator = RetrievalEvaluator(when)
        metrics = evaluator.prefix_name_to_metrics(found, when)
        evaluator.primary_metric = next(iter(metrics))  # in bold
        evaluator.store_metrics_in_model_card_data(trainer.model, metrics, -1, steps[when])


def save_run(
    model: SentenceTransformer,
    trainer: SentenceTransformerTrainer | None,
    output: Path,
    record: Mapping[str, object],
    sections: Mapping[str, str | None],
    decision: Decision | None = None,
    bases: Sequence[str] = (),
) -> None:
    """Writes a model, its card with further sections, ``training.json``, the decision, and the
    hashes of the texts that it, and before it the models in other folders, have read."""
    rows = Dataset.from_dict({})
    if trainer is not None:
        rows = cast(Dataset, trainer.train_dataset)
        loss = cast(MagnitudeRankingLoss, trainer.loss)
        # the card describes the loss again, with the exponents that it learned
        card = model.model_card_data
        known = card.train_datasets
        card.train_datasets = card.extract_dataset_metadata(rows, known, loss, "train")
        about = {"loss": type(loss).__name__, **loss.get_config_dict()}
        about["processes"] = trainer.args.world_size
        record = {**about, **record, "log": trainer.state.log_history}
    texts = [text for row in rows.take(4) for text in list(row.values())[:2]]
    with run_folder.saved(model, output, "training.json", record, texts) as folder:
        for title, text in sections.items():
            if text:
                add_section(folder / "README.md", f"### {title}\n\n{text}\n")
        if decision is not None:
            decision.save(folder)
        write_memory(folder, rows, bases)

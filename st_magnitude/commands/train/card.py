"""What the model card of a trained retriever says beyond sentence-transformers' own text."""

from __future__ import annotations

from typing import Any

from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer

from st_magnitude.corpus.beir import RetrievalData

__all__ = ["describe", "describe_training"]


def describe(model: SentenceTransformer, data: RetrievalData) -> None:
    """Names the training data, and has the card show retrieval with ``encode_query`` and ``encode_document``."""
    card: Any = model.model_card_data
    card.ir_model = True
    card.task_name = "semantic search and other retrieval tasks"
    if data.name:
        card.train_datasets = [{"name": data.name}]


def describe_training(trainer: SentenceTransformerTrainer) -> None:
    """Describes the loss again after training: the scale is then a number instead of "auto"."""
    card: Any = trainer.model.model_card_data
    card.train_datasets = card.extract_dataset_metadata(
        trainer.train_dataset, card.train_datasets, trainer.loss, "train"
    )

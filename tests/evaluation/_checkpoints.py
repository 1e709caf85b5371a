"""An evaluator in the Trainer, where it chooses the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss


def train(
    model: SentenceTransformer, evaluator: Any, metric: str, pairs: dict, folder: Path, learning_rate: float
) -> tuple[SentenceTransformerTrainer, list[dict[str, float]]]:
    """Three steps of different worth, the best of which is kept: the trainer, and its log of the evaluations."""
    args = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=learning_rate,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
        report_to="none",
        use_cpu=True,
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict(pairs),
        loss=MultipleNegativesRankingLoss(model),
        evaluator=evaluator,
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if metric in entry]
    history = [entry[metric] for entry in logs]
    assert len(history) == 3
    assert max(history) > min(history)
    assert trainer.state.best_metric == max(history)
    return trainer, logs

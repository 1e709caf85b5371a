"""Cross-validation: every query is held out once, where a model trains within seconds."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import has_static_embedding_input
from tqdm import tqdm

from st_magnitude.data.beir import folded
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.hybrid import Run, dense_run
from st_magnitude.finetune.measure import encode
from st_magnitude.finetune.settings import TrainConfig
from st_magnitude.finetune.trainer import make_trainer, reading, training_rows

__all__ = ["FOLDS", "cross_validate", "folds_of", "parts_of"]

FOLDS = 5
MOST_QUERIES = 5_000  # with more, one split shows small gains as well


def folds_of(
    model: SentenceTransformer,
    data: RetrievalData,
    dev: RetrievalData | None,
    config: TrainConfig,
) -> int:
    """The number of folds, 0 for none: by default five for a static table without dev data."""
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if config.folds and not is_alone:
        raise ValueError(f"folds={config.folds} train one after another: start one process.")
    if dev is not None or not is_alone:
        return 0
    if config.folds is not None:
        return config.folds
    is_small = 2 * FOLDS <= len(data.query_ids) <= MOST_QUERIES
    return FOLDS if is_small and has_static_embedding_input(model) else 0


def cross_validate(
    base: SentenceTransformer,
    data: RetrievalData,
    config: TrainConfig,
    folds: int,
    output: Path,
    loss_options: Mapping[str, object] | None,
) -> Run:
    """The run of models that were not trained on the queries.

    Each model starts from the base, trains on all folds but one, and searches for that one.
    """
    run: Run = {}
    parts = parts_of(data, folds, config.seed)
    for held_out in tqdm(parts, desc=f"Training and measuring in {folds} folds"):
        model = copy.deepcopy(base)
        train = data.only(data.queries.keys() - held_out)
        rows = training_rows(train, config.negatives, config.seed)
        trainer = make_trainer(model, train, rows, config, output, loss_options, saves=False)
        with reading(model, config.max_length):
            trainer.train()
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        run |= dense_run(*encode(model, data.only(held_out)))
    return run


def parts_of(data: RetrievalData, folds: int, seed: int) -> list[set[str]]:
    """Query ids of each fold. Queries with the same text are in one fold."""

    def place(key: str) -> str:
        return hashlib.sha256(f"{seed}:{key}".encode()).hexdigest()

    by_text: dict[str, list[str]] = {}
    for query, text in data.queries.items():
        by_text.setdefault(folded(text), []).append(query)
    parts: list[set[str]] = [set() for _ in range(folds)]
    for index, key in enumerate(sorted(by_text, key=place)):
        parts[index % folds].update(by_text[key])
    return parts

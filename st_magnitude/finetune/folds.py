"""Cross-validation: every query is held out once, where a model trains within seconds."""

from __future__ import annotations

import os
from pathlib import Path

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import has_static_embedding_input
from tqdm import tqdm

from st_magnitude._checks import InputError
from st_magnitude.data.beir import canonical
from st_magnitude.data.folds import DEFAULT_FOLDS, folds_of
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.finetune.measure import encode
from st_magnitude.finetune.settings import TrainConfig
from st_magnitude.finetune.trainer import make_rows, train_copy
from st_magnitude.training.stopping import refuse_diverged

__all__ = ["cross_validate", "num_folds"]

MOST_QUERIES = 5_000  # with more, one split shows small gains as well


def num_folds(
    model: SentenceTransformer, data: RetrievalData, dev: RetrievalData | None, config: TrainConfig
) -> int:
    """The number of folds, 0 for none: by default five for a static table without dev data.

    ``data`` has the queries to divide. ValueError: they are too few for ``config.folds``.
    """
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if config.folds and not is_alone:
        raise InputError(f"folds={config.folds} train one after another: start one process.")
    if dev is not None or not is_alone or config.folds == 0:
        return 0
    different = len(set(map(canonical, data.asked.values()))) if data.relevant else 0
    if config.folds is not None:
        if not 2 <= config.folds <= different:
            raise InputError(
                f"folds={config.folds}: at least 2, and at most the number of different queries"
                f" with an answer that the model was not trained on, which are {different:,}."
            )
        return config.folds
    is_small = 2 * DEFAULT_FOLDS <= different <= MOST_QUERIES
    return DEFAULT_FOLDS if is_small and has_static_embedding_input(model) else 0


def cross_validate(
    model: SentenceTransformer,
    data: RetrievalData,
    judged: RetrievalData,
    config: TrainConfig,
    folds: int,
    output: Path,
) -> Ranking:
    """The ranking of copies of a model, none of which was trained on the queries that it answers.

    ``judged`` has the queries that are divided. A copy trains on all data but the rows with a query
    of one fold, as query or as document, and searches for the queries of that fold.
    """
    found = []
    held_out = folds_of(judged, folds, config.seed)
    for fold in tqdm(held_out, desc=f"Training and measuring in {folds} folds"):
        asked = judged.only(fold)
        train = data.only(data.queries.keys() - fold).apart_from(asked)
        rows = make_rows(train, config.negatives, config.seed)
        trainer = train_copy(model, train, rows, config, output)
        refuse_diverged(trainer)
        encoded, similarity = encode(trainer.model, asked)
        found.append(encoded.search(similarity))
    return Ranking.joined(judged, found)

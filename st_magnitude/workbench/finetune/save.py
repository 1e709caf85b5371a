"""Saves what a training leaves: a model with its card, its record and what it has read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer

from st_magnitude.losses.ranking import MagnitudeRankingLoss
from st_magnitude.saving.card import add_section
from st_magnitude.surgery.raw import output_width
from st_magnitude.training import run_folder
from st_magnitude.workbench.finetune.card import RetrievalEvaluator
from st_magnitude.workbench.judging.choice import Decision
from st_magnitude.workbench.judging.verdict import Verdict
from st_magnitude.workbench.memory import write_memory

__all__ = ["about_size", "note_figures", "save_trained", "write_run"]


def about_size(model: SentenceTransformer, base: str | None) -> str:
    width = output_width(model) or 0
    trained_from = f"Trained from `{Path(base).name}`. " if base else ""
    return f"{trained_from}An embedding takes {4 * width:,} bytes, and {width:,} as int8."


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
        RetrievalEvaluator().note(trainer.model, when, found, steps[when])


def save_trained(
    trainer: SentenceTransformerTrainer,
    output: Path,
    figures: Mapping[str, object],
    sections: Mapping[str, str | None],
    decision: Decision | None = None,
    *base: str,
) -> None:
    """Writes the model, its card with further sections, ``training.json``, the decision, and the
    hashes of the texts that it, and before it the base in a folder, has read."""
    loss = cast(MagnitudeRankingLoss, trainer.loss)
    rows = cast(Dataset, trainer.train_dataset)
    # the card describes the loss again, with the exponents that it learned
    card = trainer.model.model_card_data
    card.train_datasets = card.extract_dataset_metadata(rows, card.train_datasets, loss, "train")
    record = {"loss": type(loss).__name__, **loss.get_config_dict()}
    record |= {"processes": trainer.args.world_size, **figures, "log": trainer.state.log_history}
    write_run(trainer.model, output, record, sections, rows, decision, *base)


def write_run(
    model: SentenceTransformer,
    output: Path,
    record: Mapping[str, object],
    sections: Mapping[str, str | None],
    rows: Dataset,
    decision: Decision | None,
    *base: str,
) -> None:
    """Writes a model and its record, and the hashes of what it and its base have read."""
    texts = [text for row in rows.take(4) for text in list(row.values())[:2]]
    with run_folder.saved(model, output, "training.json", record, texts) as folder:
        for title, text in sections.items():
            if text:
                add_section(folder / "README.md", f"### {title}\n\n{text}\n")
        if decision is not None:
            decision.save(folder)
        write_memory(folder, rows, *base)

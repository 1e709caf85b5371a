"""Training on retrieval data, as ``st-magnitude train`` does it."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer

from st_magnitude._files import locked_folder
from st_magnitude.data.task import EncodedTask
from st_magnitude.judge import norm_warning, warn_if_few
from st_magnitude.losses.named import LOSSES
from st_magnitude.losses.ranking import MagnitudeRankingLoss
from st_magnitude.saving.card import add_section
from st_magnitude.saving.export import load
from st_magnitude.saving.find import refuse_missing
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.adapters import refuse_frozen
from st_magnitude.surgery.normalize import prepare
from st_magnitude.surgery.raw import normalizes_output, output_width
from st_magnitude.surgery.scoring import score_by_cosine, scoring_of
from st_magnitude.surgery.tokens import remembered_tokens
from st_magnitude.surgery.vocabulary import trimmed_vocabulary
from st_magnitude.training import run_folder
from st_magnitude.training.stopping import train_or_stop
from st_magnitude.workbench.calibration import exponent_curve
from st_magnitude.workbench.files.pairs import Data, load_splits
from st_magnitude.workbench.finetune.card import RetrievalEvaluator, card_figures
from st_magnitude.workbench.finetune.settings import TrainConfig
from st_magnitude.workbench.finetune.trainer import (
    is_uneven,
    make_rows,
    make_trainer,
    reading,
    trained_copy,
    warn_of_left_out,
)
from st_magnitude.workbench.judging.choice import Decision, System, short_names
from st_magnitude.workbench.judging.confirmation import Confirmation, confirm
from st_magnitude.workbench.judging.contestants import Contestant, Encoded, search
from st_magnitude.workbench.judging.exam import DEPTH, Exam
from st_magnitude.workbench.judging.verdict import (
    AFTER,
    BEFORE,
    Scoring,
    Verdict,
    scored_of,
    scoring_name,
    verdict_of,
)
from st_magnitude.workbench.memory import write_memory

__all__ = ["TrainConfig", "TrainedModel", "train"]

logger = logging.getLogger(__name__)

# Settings that may change when a run is resumed, if the training data stay
FREE = {"split", "dev_split", "confirm", "epochs", "max_steps", "mini_batch_size", "bf16"}
FREE |= {"worth", "save_steps", "keep_anyway", "keep_scoring", "keep_checkpoints", "resume"}


@dataclass(frozen=True)
class TrainedModel:
    """The result of `train`. Of several processes, only the first has measurements."""

    trainer: SentenceTransformerTrainer
    # norms and isotropy of a sample of the texts, "before" and "after"
    geometry: dict[str, dict[str, float]]
    verdict: Verdict | None  # next to the pretrained model; None without held-out queries
    # None: the model is clearly worse than the pretrained one and was not saved
    output: Path | None
    # with ``config.prior``: what it was counted from, or why it was left out
    prior: str | None = None
    confirmed: Confirmation | None = None  # what is deployed, on test data

    @property
    def norm_warning(self) -> str:
        """The `judge.norm_warning` of the sample; empty if there is none."""
        after = self.geometry.get("after", {})
        d = after.get("cohens_d", math.nan)
        error = after.get("cohens_d_error", math.nan)
        before = self.geometry.get("before", {}).get("cohens_d", math.nan)
        return norm_warning(d, error, before)


def train(
    model: SentenceTransformer | str,
    data: Data,
    output: str | Path,
    config: TrainConfig | None = None,
    *,
    also: Collection[str] = (),
    say: Callable[[str], None] = logger.info,
) -> TrainedModel:
    """Fine-tunes a model with in-batch and explicit negatives, and saves it with a model card and
    ``training.json``.

    An `Exam` decides which queries judge it: those of ``config.dev_split``, or of folds; none of
    them, and none of ``config.confirm``, is a text of a training row. Nor do queries judge that a
    model has read in an earlier training, of which the folder that is given as the model has hashes
    (`st_magnitude.workbench.memory`).

    The model is compared with the pretrained one as it was given and with BM25. It is saved as it
    was trained, unless another document exponent is clearly better. A clearly worse model is saved
    only with ``config.keep_anyway``. Checkpoints are in ``output/.st-magnitude.work`` and are
    removed when the model is saved.

    Args:
        model: A model, which is trained in place and prepared for the loss (Normalize is stripped
            or added), or the folder or hub id of one.
        data: A source of `load_splits`, or what it returned. Judged negatives become hard
            negatives. Documents that answer a query of any split are not called never-relevant.
        also: Folders or hub ids of other models, to weigh against the trained one.
        say: Function that receives the progress line by line.

    Raises:
        ValueError: If the data have too few pairs or share queries, a model was trained on all
            queries that judge, or a setting does not suit the model. DivergedError, one of them:
            gradients or weights are not finite.
        FileExistsError: If output holds a finished model, an unfinished run and ``config.resume``
            is False, or a run that was started with other settings or data.
        OSError: If the model cannot be found, nothing can be written, or another process writes to
            the output.
        KeyboardInterrupt: At Ctrl-C and at SIGTERM, after the current step is done and saved as a
            checkpoint.
    """
    config = config or TrainConfig()
    output = Path(output)
    is_first = os.environ.get("RANK", "0") == "0"  # which measures and saves
    with locked_folder(output), ExitStack() as stack:
        name = model if isinstance(model, str) else None
        settings: dict[str, object] = {"model": name}
        settings |= {key: value for key, value in vars(config).items() if key not in FREE}
        checkpoint = run_folder.last_checkpoint(output, config.resume, settings)
        model = load(model) if isinstance(model, str) else model
        with reading(model, config.max_length):
            pass  # it refuses models and lengths that do not fit
        refuse_frozen(model)
        score_by_cosine(model, say)
        refuse_missing(*also)
        stack.enter_context(remembered_tokens(model))
        exam = Exam.of(
            load_splits(data),
            model,
            *filter(None, [name]),
            *also,
            train=config.split,
            judge=config.dev_split,
            confirm=config.confirm,
            folds=config.folds,
            seed=config.seed,
        )
        for note in exam.notes:
            say(note)
        settings["data"] = exam.train.digest
        if checkpoint is not None:
            run_folder.check_same_run(output, settings)
        rows = make_rows(exam.train, config.negatives, config.seed)
        warn_of_left_out(exam.train, rows)
        _warn_without_negatives(config.loss, exam, rows)
        models: list[System] = []
        of_folds = None
        if is_first:
            models, figures = _measure(model, also, exam, config.seed, say)
        if is_first and exam.folds:
            trains = partial(trained_copy, model=model, config=config, output=output)
            of_folds = search(Contestant(AFTER, train=trains), exam)
        trainer = make_trainer(model, exam.train, rows, config, output)
        if is_first and checkpoint is None:
            run_folder.record_run(output, settings)
        with reading(model, config.max_length), trimmed_vocabulary(trainer):
            train_or_stop(trainer, checkpoint)
        if not is_first:
            return TrainedModel(trainer, {}, None, output)
        trained = _judge(trainer, exam, models, of_folds, config)
        trained = replace(trained, geometry={"before": figures} | trained.geometry)
        held_out = (exam.judged or exam.train).name
        return _save_unless_worse(trained, output, config, held_out, name)


def _measure(
    model: SentenceTransformer,
    also: Collection[str],
    exam: Exam,
    seed: int,
    say: Callable[[str], None],
) -> tuple[list[System], dict[str, float]]:
    """How the pretrained model and others search, if any query judges or confirms, and the norms
    of the pretrained one."""
    if exam.judged is not None:
        warn_if_few(exam.judged.query_ids, "a model")
        say(f"Measuring the pretrained model: {len(exam.judged.corpus):,} documents.")
    encoded = Encoded.of(BEFORE, model, exam)
    figures = card_figures(model, exam, seed, encoded.judges)
    if encoded.judges is None and encoded.confirms is None:
        return [], figures
    others = [Contestant(name, load(path)) for name, path in short_names(also).items()]
    return [encoded.system(), *(search(other, exam) for other in others)], figures


def _judge(
    trainer: SentenceTransformerTrainer,
    exam: Exam,
    models: list[System],
    of_folds: System | None,
    config: TrainConfig,
) -> TrainedModel:
    """Compares the trained model with others, and gives it the scoring to save."""
    model = trainer.model
    verdict = scoring = confirmed = None
    shown: list[System] = []
    encoded = Encoded.of(AFTER, model, replace(exam, judged=None) if of_folds else exam)
    if of_folds is not None:
        exponent = float(scoring_of(model, before_normalize=True).exponents[1])
        after = replace(of_folds, exponent=exponent)
        if encoded.confirms is not None:
            after = replace(after, confirm=encoded.system(exponent).confirm)
    elif encoded.judges is not None and not normalizes_output(model):
        after, shown, scoring = choose_scoring(encoded, models[0], config)
        if after.exponent != scoring.as_trained.exponent:
            prepare(model, Similarity(gamma_query=1.0, gamma_document=after.exponent))
    elif models:
        after = encoded.system()
    if exam.judged is not None:
        verdict = verdict_of(
            exam,
            models[0],
            after,
            models[1:],
            shown=shown,
            scoring=scoring,
            seed=config.seed,
            worth=config.worth,
        )
    if exam.confirm is not None:
        confirmed = confirm(exam, [*models, after], verdict, config.seed)
    geometry = {"after": card_figures(model, exam, config.seed, encoded.judges)}
    prior = _about_prior(cast(Dataset, trainer.train_dataset)) if config.prior else None
    return TrainedModel(trainer, geometry, verdict, None, prior, confirmed)


def choose_scoring(
    encoded: Encoded, before: System, config: TrainConfig
) -> tuple[System, list[System], Scoring]:
    """The model to save, as it was trained or at `ExponentCurve.best`, of which each fold of the
    queries is ranked by the choice of the others; the other one to show; and both figures."""
    task = cast(EncodedTask, encoded.judges)
    curve = exponent_curve(task, seed=config.seed)
    trained = best = encoded.system()
    if curve.best != curve.present:
        options = task.sweep({curve.best, *curve.by_query}, DEPTH)
        best = replace(encoded.system(curve.best), ranking=curve.of(options))
    saved, other = (trained, best) if config.keep_scoring else (best, trained)
    name = f"{AFTER}, {scoring_name(other.exponent)} (not saved)"
    shown = [] if other is saved else [replace(other, name=name)]
    as_trained, at_best = (scored_of(one, before, config.seed) for one in (trained, best))
    return saved, shown, Scoring(as_trained, at_best, curve.to_dict()["ndcg@10"])


def _warn_without_negatives(loss: str, exam: Exam, rows: Dataset) -> None:
    never_relevant = set().union(*exam.train.negatives.values()).difference(exam.answers)
    has_negatives = len(rows.column_names) > 2 and never_relevant
    if LOSSES[loss].keeps_norms and not has_negatives:
        logger.warning(
            f"The loss {loss} keeps the norms of documents, but no training row has a negative that"
            " is judged 0 and answers no query, from which norms learn what is never relevant. Add"
            " such judgments, best of documents that resemble the queries (docs/losses.md), or take"
            " the loss cosine."
        )


def _about_prior(rows: Dataset) -> str:
    counts = Counter(rows["positive"])
    if not is_uneven(rows["positive"]):
        return (
            f"All {len(counts):,} documents are equally often positives. A prior changes nothing"
            " and was left out."
        )
    return (
        f"Trained with the prior of {len(counts):,} documents in {len(rows):,} pairs, of which the"
        f" most frequent one has {max(counts.values()):,} (logQ correction). The model holds the"
        " prior in its embeddings, so nothing has to be added when it is served."
    )


def _save_unless_worse(
    trained: TrainedModel, output: Path, config: TrainConfig, held_out: str, base: str | None
) -> TrainedModel:
    verdict = trained.verdict
    model = trained.trainer.model
    if verdict is not None and verdict.is_worse and not config.keep_anyway:
        logger.warning(
            f"Nothing was saved to {output}. The last checkpoint remains: --resume"
            " --keep-anyway (in Python resume=True, keep_anyway=True) saves its model."
        )
        return trained
    figures = {"geometry": trained.geometry, "dev": verdict, "test": trained.confirmed}
    ndcg = {} if verdict is None else {"before": verdict.pretrained, "after": verdict.saved.ndcg}
    steps = {"before": 0, "after": trained.trainer.state.global_step}
    for when, shown in trained.geometry.items():
        shown = {"ndcg@10": ndcg[when], **shown} if ndcg else shown
        RetrievalEvaluator().note(model, when, shown, steps[when])
    width = output_width(model) or 0
    trained_from = f"Trained from `{Path(base).name}`. " if base else ""
    sections = {
        f"Retrieval ({held_out})": verdict.to_markdown() if verdict else None,
        "Retrieval (test)": trained.confirmed.to_markdown() if trained.confirmed else None,
        "Size": f"{trained_from}An embedding takes {4 * width:,} bytes, and {width:,} as int8.",
        "Document prior": trained.prior,
        "Norms": trained.norm_warning,
    }
    decision = None if verdict is None else verdict.decision
    save_trained(trained.trainer, output, figures, sections, decision, base)
    if not config.keep_checkpoints:
        shutil.rmtree(output / run_folder.WORK, ignore_errors=True)
    return replace(trained, output=output)


def save_trained(
    trainer: SentenceTransformerTrainer,
    output: Path,
    figures: Mapping[str, object],
    sections: Mapping[str, str | None],
    decision: Decision | None = None,
    base: str | None = None,
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
    texts = [text for row in rows.take(4) for text in list(row.values())[:2]]
    with run_folder.saved(trainer.model, output, "training.json", record, texts) as folder:
        for title, text in sections.items():
            if text:
                add_section(folder / "README.md", f"### {title}\n\n{text}\n")
        if decision is not None:
            decision.save(folder)
        write_memory(folder, rows, *filter(None, [base]))

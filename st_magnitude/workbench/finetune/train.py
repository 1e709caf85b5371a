"""Training on retrieval data, as ``st-magnitude train`` does it."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

from datasets import Dataset
from sentence_transformers import SentenceTransformer

from st_magnitude._checks import InputError
from st_magnitude._files import locked_folder
from st_magnitude.losses.named import LOSSES
from st_magnitude.saving.find import refuse_missing
from st_magnitude.surgery.adapters import refuse_frozen
from st_magnitude.surgery.normalize import score_by_cosine
from st_magnitude.surgery.vocabulary import remembered_tokens
from st_magnitude.training import run_folder
from st_magnitude.workbench.files.pairs import Data, Splits, load_splits
from st_magnitude.workbench.finetune.entrants import Entrant, entrants_of
from st_magnitude.workbench.finetune.run import FOLDS_OF_ENCODER, Run, TrainedModel
from st_magnitude.workbench.finetune.settings import TrainConfig
from st_magnitude.workbench.finetune.trainer import is_uneven, make_rows, reading
from st_magnitude.workbench.judging.exam import MOST_QUERIES, Exam
from st_magnitude.workbench.judging.folds import DEFAULT_FOLDS

__all__ = ["TrainConfig", "TrainedModel", "train"]

logger = logging.getLogger(__name__)

MOST_WITH_ENCODER = 2_000  # queries that are held out in folds

# Settings that may change when a run is resumed, if the training data stay
FREE = {"split", "dev_split", "confirm", "epochs", "max_steps", "mini_batch_size", "bf16", "worth"}
FREE |= {"budget", "save_steps", "keep_anyway", "keep_scoring", "keep_checkpoints", "resume"}


def train(
    model: SentenceTransformer | str | None,
    data: Data,
    output: str | Path,
    config: TrainConfig | None = None,
    *,
    also: Collection[str] = (),
    say: Callable[[str], None] = logger.info,
) -> TrainedModel:
    """Weighs models, as they come and trained with in-batch and explicit negatives, and saves the
    one to deploy with a model card, ``training.json`` and ``deploy.json``.

    An `Exam` decides which queries judge: those of ``config.dev_split``, or of folds; none of them,
    and none of ``config.confirm``, is a text of a training row. Nor do queries judge that a model
    has read in an earlier training, of which the folder that is given as the model has hashes
    (`st_magnitude.workbench.memory`).

    The models and BM25 are compared, and `decide` says what to deploy. In folds, only a trained
    model that is deployed is trained on all pairs. One that was judged on a split is saved as it
    was trained, unless another document exponent is clearly better. Where nothing is recommended,
    the best trained model is saved, a clearly worse one only with ``config.keep_anyway``; where
    BM25 is, the best model. Checkpoints of the training on all pairs are in
    ``output/.st-magnitude.work`` and are removed when the model is saved.

    Args:
        model: A model, which may be trained in place and is prepared for the loss (Normalize is
            stripped or added), or the folder or hub id of one. None: wordllama's table and
            all-MiniLM-L6-v2, as far as there is time for the encoder (``config.budget``).
        data: A source of `load_splits`, or what it returned. Judged negatives become hard
            negatives. Documents that answer a query of any split are not called never-relevant.
        also: Folders or hub ids of other models, to weigh as they come.
        say: Function that receives the progress line by line.

    Raises:
        ValueError: If the data have too few pairs or share queries, a model was trained on all
            queries that judge, or a setting does not suit the model. DivergedError, one of them:
            gradients or weights are not finite.
        FileExistsError: If output holds a finished model, an unfinished run and ``config.resume``
            is False, or a run that was started with other settings or data.
        ImportError: If no model is given and none is installed.
        OSError: If the model cannot be found, nothing can be written, or another process writes to
            the output.
        KeyboardInterrupt: At Ctrl-C and at SIGTERM, after the current step is done and saved as a
            checkpoint.
    """
    config = config or TrainConfig()
    output = Path(output)
    _refuse_for_several(model, config)
    with locked_folder(output), ExitStack() as stack:
        name = model if isinstance(model, str) else None
        settings: dict[str, object] = {"model": name}
        settings |= {key: value for key, value in vars(config).items() if key not in FREE}
        checkpoint = run_folder.last_checkpoint(output, config.resume, settings)
        entrants = entrants_of(model, say)
        for entrant in entrants:
            with reading(entrant.model, config.max_length):
                pass  # it refuses models and lengths that do not fit
            refuse_frozen(entrant.model)
            score_by_cosine(entrant.model, say)
            if entrant.source is None:
                entrant.kept = copy.deepcopy(entrant.model)
            stack.enter_context(remembered_tokens(entrant.model))
        refuse_missing(*also)
        exam = _exam(load_splits(data), entrants, also, config)
        for note in exam.notes:
            say(note)
        if exam.judged is None:
            entrants = entrants[:1]  # as nobody can say which is better
        settings["data"] = exam.train.digest
        if checkpoint is not None:
            run_folder.check_same_run(output, settings)
        rows = make_rows(exam.train, config.negatives, config.seed, warns=True)
        _warn_of_data(config, exam, rows)
        run = Run(entrants, exam, rows, config, output, settings, checkpoint, also, say)
        if os.environ.get("RANK", "0") != "0":  # the first process measures and saves
            return TrainedModel(run.train_fully(entrants[0]), {}, None, output)
        return run.finish()


def _refuse_for_several(model: SentenceTransformer | str | None, config: TrainConfig) -> None:
    if model is not None and config.budget is not None:
        raise InputError("--budget is for the encoder of a training without --model.")
    if model is not None:
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("Several processes train one model: name it with --model.")
    of_one = {
        "--learning-rate": config.learning_rate,
        "--lora": config.lora,
        "--max-length": config.max_length,
    }
    for option, value in of_one.items():
        if value is not None:
            raise InputError(f"{option} suits one model: name it with --model, such as table.")


def _exam(
    splits: Splits, entrants: Sequence[Entrant], also: Collection[str], config: TrainConfig
) -> Exam:
    """The exam of all models: in folds where there are few queries."""
    are_tables = [entrant.is_table for entrant in entrants]
    return Exam.of(
        splits,
        entrants[0].model,
        *(entrant.source for entrant in entrants if entrant.source),
        *also,
        train=config.split,
        judge=config.dev_split,
        confirm=config.confirm,
        folds=config.folds,
        usual=DEFAULT_FOLDS if any(are_tables) else FOLDS_OF_ENCODER,
        most=MOST_QUERIES if all(are_tables) else MOST_WITH_ENCODER,
        seed=config.seed,
    )


def _warn_of_data(config: TrainConfig, exam: Exam, rows: Dataset) -> None:
    if config.prior and not is_uneven(rows["positive"]):
        logger.warning(
            f"All {len({*rows['positive']}):,} documents are equally often positives: the prior"
            " changes nothing and is left out."
        )
    never_relevant = set().union(*exam.train.negatives.values()).difference(exam.answers)
    has_negatives = len(rows.column_names) > 2 and never_relevant
    if LOSSES[config.loss].keeps_norms and not has_negatives:
        logger.warning(
            f"The loss {config.loss} keeps the norms of documents, but no training row has a"
            " negative that is judged 0 and answers no query, from which norms learn what is never"
            " relevant. Add such judgments, best of documents that resemble the queries"
            " (docs/losses.md), or take the loss cosine."
        )

"""Shared by all candidates of a comparison: the three splits, the model, the rows in their order, and the searches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from transformers import PrinterCallback, TrainerCallback

from st_magnitude._files import whole_folder
from st_magnitude.comparison.config import LOSSES, Candidate, CompareConfig, grid_of, rungs_of
from st_magnitude.data.beir import refuse_shared, splits_of
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import NotFiniteError
from st_magnitude.evaluation.calibration import EXPONENTS, ndcg_by_exponent, warn_if_few
from st_magnitude.evaluation.metrics import scoring_of
from st_magnitude.finetune.run import is_uneven, make_trainer, reading, save_trained, training_rows
from st_magnitude.losses.negatives import tokens_of
from st_magnitude.losses.regularizers import SIGReg
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.normalize import prepare
from st_magnitude.surgery.raw import normalizes_output

__all__ = ["Setup", "Splits", "make_splits"]

HELD_OUT, MOST_HELD_OUT = 5, 500  # one of five training queries, and not more than these

GoesOn = Callable[[int, float, float], bool]


@dataclass(frozen=True)
class Splits:
    """Training data, and two disjoint search tasks; ``notes`` are sentences about what was held out."""

    train: RetrievalData
    dev: RetrievalData
    test: RetrievalData
    notes: tuple[str, ...]


def make_splits(
    data: RetrievalData | str | Path,
    config: CompareConfig,
    dev: RetrievalData | None = None,
    test: RetrievalData | None = None,
) -> Splits:
    """Reads the splits, refuses queries that are in two of them, holds out what is missing, and samples large ones."""
    if isinstance(data, str | Path):
        names = splits_of(data)
        read = partial(RetrievalData.from_beir, data, skip_empty=config.skip_empty)
        train = read(config.split if names else None)  # None: a single qrels.tsv
        dev, test = (
            given or (read(name) if name in names else None)
            for given, name in ((dev, config.dev_split), (test, config.test_split))
        )
    else:
        train = data
    rng, parts = np.random.default_rng(config.seed), {}
    notes: list[str] = []
    for name, part in (("dev", dev), ("test", test)):
        if part is None:
            queries = sorted(train.query_ids)
            number = min(MOST_HELD_OUT, len(queries) // HELD_OUT)
            held_out = {queries[i] for i in rng.permutation(len(queries))[:number]}
            part, train = _only(train, held_out), _only(train, train.queries.keys() - held_out)
            notes.append(f"There is no {name} split, so {number:,} of the training queries are held out for it.")
        parts[name] = part
    for name, other, of in (("dev", train, "train"), ("test", train, "train"), ("test", parts["dev"], "dev")):
        refuse_shared(parts[name].query_ids, other.query_ids, name, of)
    for (name, part), most in zip(parts.items(), (config.dev_queries, None), strict=True):
        queries = sorted(part.query_ids)
        part = _only(part, {queries[i] for i in rng.permutation(len(queries))[:most]})
        needed = {d for judged in (part.relevant, part.negatives) for ids in judged.values() for d in ids}
        others = sorted(part.corpus.keys() - needed)
        needed |= {others[i] for i in rng.permutation(len(others))[: max(0, config.documents - len(needed))]}
        warn_if_few(part.query_ids, "a loss")
        parts[name] = replace(part, corpus={d: text for d, text in part.corpus.items() if d in needed})
    positives = (train.corpus[document] for grades in train.relevant.values() for document in grades)
    if "cosine-prior" in (config.losses or LOSSES) and not is_uneven(positives):
        notes.append("All documents are equally often positives, where a prior changes nothing: no cosine-prior.")
    return Splits(train, parts["dev"], parts["test"], tuple(notes))


def _only(data: RetrievalData, chosen: Collection[str]) -> RetrievalData:
    """The same corpus with some of the queries."""

    def of(part: dict[str, Any]) -> dict[str, Any]:
        return {query: value for query, value in part.items() if query in chosen}

    return replace(data, queries=of(data.queries), relevant=of(data.relevant), negatives=of(data.negatives))


@dataclass(frozen=True)
class Setup:
    """The pretrained model, the splits and the settings, from which every candidate is trained alike."""

    base: SentenceTransformer
    splits: Splits
    config: CompareConfig

    @cached_property
    def rows(self) -> Dataset:
        return training_rows(self.splits.train, self.config.negatives, self.config.seed)

    @cached_property
    def grid(self) -> list[Candidate]:
        """All candidates. A prior needs uneven documents and a model that has tokens to know them by."""
        is_static = any(isinstance(module, StaticEmbedding) for module in self.base)
        has_prior = is_uneven(self.rows["positive"]) and tokens_of(self.base.preprocess(["a"])) is not None
        return grid_of(self.config, is_static, has_prior)

    @cached_property
    def rungs(self) -> list[int]:
        """Numbers of steps after which a candidate is measured; the last one is a whole run."""
        steps = round(self.config.epochs * len(self.rows) / self.config.batch_size)
        return rungs_of(len(self.grid), min(self.config.max_steps, max(1, steps)))

    def measure(self, model: SentenceTransformer) -> tuple[float, float]:
        """nDCG@10 on dev at the document exponent that is best there, and this exponent; nan if training diverged.

        The model reads texts of its own length, as it will be saved, while training may read shorter ones.
        """
        exponent = float(scoring_of(model).exponents[1])
        # Of tied exponents the first one counts.
        exponents = [1.0] if normalizes_output(model) else [1.0, 0.0, *EXPONENTS[1:-1], exponent]
        try:
            with reading(model, None if self.config.max_length is None else self.base.max_seq_length):
                encoded = self.splits.dev.encode(model)
        except NotFiniteError:
            return float("nan"), exponent
        means = ndcg_by_exponent(encoded, exponents).mean(axis=1)
        best = int(means.argmax())
        return float(means[best]), float(exponents[best])

    def train(self, candidate: Candidate, rungs: list[int], goes_on: GoesOn, folder: Path) -> None:
        """Trains a copy of the pretrained model from rung to rung.

        ``goes_on`` receives the steps, nDCG@10 on dev and the exponent at a rung. It says whether to train on, and at
        the last rung whether to save the model in the folder.
        """
        model = copy.deepcopy(self.base)
        model.model_card_data.widget = [{"text": self.rows[0]["anchor"]}]  # else every Trainer computes examples
        settings = candidate.settings(self.config, model, rungs[-1])
        options = {"regularizers": [(SIGReg(), candidate.sigreg)]} if candidate.sigreg else {}
        quiet = {"save_strategy": "no", "disable_tqdm": True}
        trainer = make_trainer(model, self.splits.train, self.rows, settings, folder.parent, options, **quiet)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_AtRungs(self, rungs[:-1], goes_on))
        with reading(model, self.config.max_length):
            trainer.train()
        if trainer.state.global_step < rungs[-1]:
            return
        # accelerate leaves its autocast around forward, which would still encode in bfloat16
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        ndcg, exponent = self.measure(model)
        if goes_on(rungs[-1], ndcg, exponent):
            if exponent != scoring_of(model).exponents[1]:
                prepare(model, Similarity(query=1.0, document=exponent))
            with whole_folder(folder, overwrite=True) as new:
                save_trained(trainer, new, {"dev": {"queries": len(self.splits.dev.query_ids), "ndcg": ndcg}}, {})


class _AtRungs(TrainerCallback):
    """Measures a model at the rungs before the last one, and ends its training there if it is behind."""

    def __init__(self, setup: Setup, rungs: list[int], goes_on: GoesOn) -> None:
        self.setup, self.rungs, self.goes_on = setup, rungs, goes_on

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step in self.rungs:
            control.should_training_stop = not self.goes_on(state.global_step, *self.setup.measure(model))

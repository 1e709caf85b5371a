"""Cells of the studies: one training each, measured on dev while it runs and on tests at its end.

A cell is its settings, and its figures are a line of cells.jsonl. So a script that needs cells runs
those that are missing, goes on where an interrupted call ended, and shares what another script has
run. A cell that fails leaves nothing. Models train on the GPU if there is one.

Everything is chosen on dev: the step of each scoring, the document exponent of "calibrated", and,
among cells, rates and temperatures. These scorings are read on the tests, each at its own best step
on dev:

- matched: the document exponent of training;
- calibrated: the document exponent of 0, .25, .5, .75, 1 that is best on dev, over all steps;
- cosine: that of a loss that keeps the document norm, scored without it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.docstrings import docstring_task
from benchmarks.data.lexicons import build
from benchmarks.data.paraphrase import paraphrase
from benchmarks.studies.estimates import Gain, paired
from benchmarks.studies.known.training import spread
from benchmarks.studies.models import minilm, static_model, train
from benchmarks.studies.store import Figures, Store, packed, seeds_of, unpacked
from datasets import concatenate_datasets
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers import TrainerCallback

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.evaluation.compression import search_compressed
from st_magnitude.losses import MagnitudeRankingLoss
from st_magnitude.losses.exponents import usual_rate
from st_magnitude.losses.named import LOSSES

ROOT = Path(__file__).parents[2]
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
MATCHED = {"dot": 0.0, "qnorm": 0.0}  # document exponents; 1 for the others but Learnable
SCORINGS = ("matched", "calibrated")
SEED = 0  # of the data, for all cells, whose seeds are of training: all answer the same queries
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def frozen() -> SentenceTransformer:
    """The three layers with a frozen token table, 24 tokens of a text: twice as fast."""
    model = paraphrase()
    model.max_seq_length = 24
    model[0].auto_model.embeddings.requires_grad_(False)
    return model


BASES: dict[str, Callable[[], SentenceTransformer]] = {
    "static": static_model,
    "L3": paraphrase,
    "L3frozen": frozen,
    "MiniLM": minilm,
}
DATA: dict[str, Callable[[], Data]] = {}  # filled below, and by the studies that have their own


@dataclass(frozen=True)
class Cell:
    """The settings of one training.

    Attributes:
        base: Key of BASES: the static table of wordllama, paraphrase-MiniLM-L3-v2 (also with a
            frozen token table), all-MiniLM-L6-v2, or a base of a study.
        data: Key of DATA: "wordnet" (lemma -> definition, in-batch negatives), "docstrings" (with
            an explicit negative that is never relevant), or the data of a study.
        loss: Key of LOSSES, or "tempagg", which has its own temperatures.
        seed: Seed for the order of the rows and dropout.
        steps: Number of steps.
        batch: Number of queries in a step.
        rate: Peak learning rate; learned exponents have 1e-2.
        temperature: Temperature of the scores after the scale, or "learned" in stored
            cells: the losses of then learned it, from .05 on, at a rate of 1e-3.
        scale: The paper's alpha at a temperature of .05, 20: logits are scores / temperature,
            without a division by norms; or "auto" or "batch", which divide by the mean norms of the
            batch. Stored cells with "auto" divided by those of their first batch, as the losses did
            then.
        bf16: Whether training and dev use bfloat16 by autocast; tests are encoded in float32.
    """

    base: str
    data: str
    loss: str
    seed: int
    steps: int
    batch: int
    rate: float
    temperature: float | str = 0.05
    scale: float | str = 20.0
    bf16: bool = False


POOL = Store(Path(__file__).with_suffix(".jsonl"), Cell)  # that several studies share


# --- data -----------------------------------------------------------------------------------------


@dataclass
class Data:
    """Rows to train on, a task for every choice, and tasks for the figures."""

    rows: Any
    dev: RetrievalData
    tests: dict[str, RetrievalData]

    @property
    def fingerprint(self) -> str:
        """Equal for cells that can be paired; docstrings are those of the environment."""
        return fingerprint([[x.queries, x.corpus] for x in (self.dev, *self.tests.values())])


def fingerprint(texts: Any) -> str:
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=8).hexdigest()


@lru_cache(maxsize=4)
def data(name: str) -> Data:
    return DATA[name]()


def docstrings() -> Data:
    task = docstring_task()
    return Data(task.train.triplets(1, SEED), task.dev, {"docstrings": task.test})


def lexicons(**sizes: int) -> Data:
    """WordNet with FOLDOC as a test of another domain; the sizes are those of `build`."""
    words = build(seed=SEED, **sizes)
    rows = concatenate_datasets(list(words.train.values()))
    return Data(rows, words.dev, {"wordnet": words.test, "foldoc": words.foldoc})


DATA |= {"wordnet": lexicons, "docstrings": docstrings}


def encode(model: SentenceTransformer, task: RetrievalData) -> EncodedTask:
    """The embeddings, on the CPU, where they are measured."""
    found = stm.encode(model, task, batch_size=128, show_progress_bar=False)
    return replace(found, queries=found.queries.cpu(), documents=found.documents.cpu())


# --- one training ---------------------------------------------------------------------------------


def objective(model: SentenceTransformer, cell: Cell) -> MagnitudeRankingLoss:
    options: Figures = {"same_text": "exclude"}  # in all stored cells
    if cell.loss == "tempagg":
        return stm.TempAggLoss(model, **options)
    options["scale"] = 20.0 if cell.scale == 20 else "auto"
    return LOSSES[cell.loss].load()(model, temperature=cell.temperature, **options)


def weights_of(model: SentenceTransformer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class Watch(TrainerCallback):
    """nDCG@10 on dev by document exponent at evenly spaced steps, and the best weights."""

    def __init__(
        self, model: SentenceTransformer, task: RetrievalData, cell: Cell, number: int
    ) -> None:
        self.model, self.task, self.cell = model, task, cell
        self.steps = {round(cell.steps * i / number) for i in range(number + 1)}
        self.curve: list[Figures] = []
        self.best: dict[str, Figures] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if step not in self.steps or (self.curve and self.curve[-1]["step"] == step):
            return
        learned = getattr(self.model[-1], "gamma_document", None)
        matched = MATCHED.get(self.cell.loss, 1.0) if learned is None else float(learned)
        encoded = encode(self.model.eval(), self.task)
        self.model.train()
        found = encoded.searches([stm.Similarity(1.0, x) for x in (*EXPONENTS, matched)], 10)
        *ndcg, as_trained = (round(ranking.mean, 5) for ranking in found)
        self.curve.append({"step": step, "exponents": ndcg, "matched": as_trained})
        found = {"matched": (as_trained, matched)}
        found["calibrated"] = max(zip(ndcg, EXPONENTS, strict=True))
        if matched < 1:
            found["cosine"] = (ndcg[-1], 1.0)
        for scoring, (value, exponent) in found.items():
            if value > self.best.get(scoring, {"dev": -1.0})["dev"]:
                best = {"dev": value, "step": step, "exponent": exponent}
                self.best[scoring] = best | {"weights": weights_of(self.model)}


def train_cell(cell: Cell, evaluations: int = 10) -> tuple[SentenceTransformer, Watch]:
    """The model after training, and what was seen on the way."""
    torch.manual_seed(cell.seed)
    model = stm.strip_normalize(BASES[cell.base]()).to(DEVICE)
    how = how_of(cell) | {"bf16": cell.bf16}
    if cell.loss == "learnable":  # at a rate of their own, whatever that of the model
        how["learning_rate_mapping"] = {r"\.scaled_(query|document)_bias$": usual_rate(model)}
    loss = objective(model, cell)
    watch = Watch(model, data(cell.data).dev, cell, evaluations)
    train(model, loss, data(cell.data).rows, cell.seed, [watch], **how)
    return model.eval(), watch


def how_of(cell: Any) -> Figures:
    """Arguments of the trainer."""
    return {
        "max_steps": cell.steps,
        "per_device_train_batch_size": cell.batch,
        "learning_rate": cell.rate,
    }


def measure(cell: Cell, evaluations: int = 10) -> Figures:
    """Trains and measures."""
    began = time.perf_counter()
    model, watch = train_cell(cell, evaluations)
    middle = time.perf_counter()
    scorings: dict[str, Figures] = {}
    at: dict[int, dict[str, EncodedTask]] = {}  # step to its embeddings, which scorings share
    for name, best in watch.best.items():
        model.load_state_dict(best.pop("weights"))
        similarity = stm.Similarity(1.0, best["exponent"])
        if best["step"] not in at:
            tests = data(cell.data).tests.items()
            at[best["step"]] = {task: encode(model, texts) for task, texts in tests}
        encoded = at[best["step"]]
        scorings[name] = best | {
            "tests": {task: searched(x, similarity) for task, x in encoded.items()},
            "shape": {task: shape(x) for task, x in encoded.items()},
        }
    packages = ("torch", "sentence-transformers", "st-magnitude")
    return {
        "data": data(cell.data).fingerprint,
        "curve": watch.curve,
        "scorings": scorings,
        "versions": {
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
            **{name: version(name) for name in packages},
        },
        "seconds": seconds_of(began, middle),
    }


def seconds_of(began: float, middle: float) -> dict[str, int]:
    return {"training": round(middle - began), "tests": round(time.perf_counter() - middle)}


def searched(encoded: EncodedTask, similarity: stm.Similarity) -> dict[str, str]:
    """nDCG@10 of every query in full, at a quarter of the dimensions, and by rescored bits."""
    task = replace(encoded, similarity=similarity)
    q, d = similarity.query(encoded.queries), similarity.document(encoded.documents)
    divided = replace(encoded, queries=q, documents=d, similarity=stm.DOT)
    size = encoded.queries.shape[1] // 4
    quarter = replace(
        task, queries=encoded.queries[:, :size], documents=encoded.documents[:, :size]
    )
    rankings = {
        "full": task.search(10),
        "quarter": quarter.search(10),
        "bits": search_compressed(divided, "binary", 100, keeps_norms=False)["query"],
    }
    return {name: packed(ranking.ndcg) for name, ranking in rankings.items()}


def shape(encoded: EncodedTask) -> dict[str, float]:
    """The spread of norms, std / mean."""
    return {f"CV of {x}": spread(getattr(encoded, x)) for x in ("queries", "documents")}


# --- many trainings -------------------------------------------------------------------------------


def run_missing(cells: Iterable[Cell], evaluations: int = 10) -> None:
    """Runs the cells that are missing, each with so many evaluations on dev."""
    POOL.run(lambda cell: measure(cell, evaluations), cells)


def prepare_process() -> None:
    """Quiets the warnings about one-sided similarities, which are here on purpose."""
    for name in ("st_magnitude", "sentence_transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def asked(doc: str | None, names: Iterable[str] = (), **flags: str) -> argparse.Namespace:
    """The command line of a study: what to run (``names``; default: all), --seeds, and flags."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(names)
    if names:
        parser.add_argument("names", nargs="*", help=f"some of {', '.join(names)}; default: all")
    parser.add_argument("--seeds", type=int, default=3, choices=(1, 2, 3))
    for flag, text in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    found = parser.parse_args()
    prepare_process()
    if names:
        found.names = found.names or names
        if unknown := set(found.names) - set(names):
            parser.error(f"there is no {min(unknown)!r}; there are {', '.join(names)}")
    return found


# --- statistics -----------------------------------------------------------------------------------


def stored_seeds(cell: Cell) -> list[Cell]:
    return [seed for seed in seeds_of(cell) if POOL.load(seed)]


def best_of(cells: Sequence[Cell], scoring: str) -> Cell | None:
    """The one with the highest nDCG@10 on dev with seed 0, of those that are stored."""
    return POOL.best((replace(x, seed=0) for x in cells), "scorings", scoring, "dev")


def per_query(
    cells: Sequence[Cell], task: str, scoring: str, size: str = "full"
) -> NDArray[np.float64]:
    """nDCG@10 of every query, (S, n)."""
    figures = [x for cell in cells if (x := POOL.load(cell))]
    return np.array([unpacked(x["scorings"][scoring]["tests"][task][size]) for x in figures])


def gain(
    after: Cell,
    before: Cell,
    tasks: Iterable[str],
    scoring: str,
    size: str = "full",
    plain: str = "",
) -> Gain | None:
    """nDCG@10 of one less that of the other over the seeds that both have, and their number.

    ``plain`` is the scoring of ``before``, if it is another one.
    """
    both = same_seeds(after, before)
    if not both:
        return None
    a, b = zip(*both, strict=True)
    plain = plain or scoring
    differences = [per_query(a, t, scoring, size) - per_query(b, t, plain, size) for t in tasks]
    return paired(differences), len(both)


def same_seeds(after: Cell, before: Cell) -> list[tuple[Cell, Cell]]:
    """Two settings with each seed that both have stored, on the same texts."""
    pairs = zip(seeds_of(after), seeds_of(before), strict=True)
    both = [(pair, POOL.load(pair[0]), POOL.load(pair[1])) for pair in pairs]
    return [pair for pair, a, b in both if a and b and a["data"] == b["data"]]

"""Copies of a text in a batch: all count, those of the answer leave, or each text counts once.

    python benchmarks/studies/copies/copies.py FOLDER [NAME ...] [--batches 32 512]

In-batch negatives repeat texts where few documents answer many queries. ``same_text="keep"`` counts
each copy, as MNRL does; "exclude" leaves out copies of the answer alone, so a document that stands
n times weighs n as a negative and 1 as the answer; "once" has each text weigh 1. Next to them: a
prior (logQ, counted in all pairs).

FOLDER has the files of BANKING77 and CLINC150, for questions and the name of their intent. Films
(MovieLens-100k, from recbole) differ in how often they answer.
wordllama's table, temperature .1, three epochs, but 20 steps at least and 1,500 at most; the rate
of .01, .03 and .1 that is best on dev with seed 0; nDCG@10. Expected: on BANKING77 once
level with keep, and exclude half a point behind in large batches; on films once far ahead in large
batches, and level with the prior.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import accumulate, product
from pathlib import Path

import numpy as np
import torch
from benchmarks.data import movielens
from benchmarks.studies.estimates import gain_of, in_points, markdown, show
from benchmarks.studies.known import training as known
from benchmarks.studies.models import static_model
from benchmarks.studies.prior.prior import WEIGHTS, ranked
from benchmarks.studies.store import Figures, Store, packed, seeds_of, unpacked
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.losses.negatives import SameText
from st_magnitude.surgery.raw import encode_raw

TAU = 0.1
RATES = (0.01, 0.03, 0.1)
SEEDS = 3
BATCHES = (32, 512, 2048, 8192)
EVEN = {  # (data, test)
    ("banking", "test"): "BANKING77",
    ("banking", "as in training"): "the same, as uneven as training",
    ("clinc", "test"): "CLINC150",
}
UNEVEN = {("films", "test"): "films"}
ARMS: dict[str, tuple[SameText, bool]] = {  # copies, prior
    "keep": ("keep", False),
    "exclude": ("exclude", False),
    "once": ("once", False),
    "prior, keep": ("keep", True),
}


PerQuery = dict[int, NDArray[np.float64]]


@dataclass(frozen=True)
class Cell:
    """The settings of one training."""

    data: str
    batch: int
    arm: str
    rate: float
    seed: int = 0


CELLS = Store(Path(__file__).with_name("cells.jsonl"), Cell)


# --- data -----------------------------------------------------------------------------------------


@dataclass
class Task:
    """Training pairs, and tasks: dev for every choice, others for the figures."""

    anchors: list[str]
    positives: list[str]
    parts: dict[str, RetrievalData]  # of one corpus
    seen: dict[str, list[list[int]]] = field(default_factory=dict)  # documents that do not count

    @cached_property
    def texts(self) -> list[str]:
        """The documents of the training."""
        return sorted(set(self.positives))

    @cached_property
    def answers(self) -> list[int]:
        number = {text: i for i, text in enumerate(self.texts)}
        return [number[text] for text in self.positives]

    @cached_property
    def queries(self) -> list[Tensor]:
        """The token ids of each anchor, once for all trainings."""
        return tokens_of(self.anchors)

    @cached_property
    def documents(self) -> list[Tensor]:
        return tokens_of(self.texts)

    def log_p(self, texts: Iterable[str]) -> Tensor:
        counts = Counter(self.positives)
        numbers = torch.tensor([counts[text] + 1.0 for text in texts])
        return (numbers / (len(self.positives) + len(counts))).log()


def tokens_of(texts: list[str]) -> list[Tensor]:
    found = static_model().preprocess(texts)
    return list(found["input_ids"].tensor_split(found["offsets"][1:]))


def intents(folder: Path, name: str) -> Task:
    """BANKING77's test is balanced; dev, of which half is a test, is as uneven as training."""
    found = known.data(f"{name} names", folder)
    parts = {"dev": found.dev, "test": found.test}
    if name == "banking":
        queries = list(found.dev.queries)
        parts["dev"], parts["as in training"] = map(found.dev.only, (queries[:750], queries[750:]))
    return Task(found.rows["anchor"][:], found.rows["positive"][:], parts)


def films() -> Task:
    """The last ten films that a user liked ask for the next one."""
    found = movielens.read(stars=4)
    titles, films = movielens.texts(found)
    liked: dict[int, list[int]] = defaultdict(list)
    task = Task([], [], {})
    for user, film in found.train.tolist():
        if liked[user]:
            task.anchors.append(", ".join(titles[x] for x in liked[user][-10:]))
            task.positives.append(films[film])
        liked[user].append(film)
    corpus = {f"{i:04}": text for i, text in enumerate(films)}
    for part, answers in (("dev", found.dev.tolist()), ("test", found.test.tolist())):
        seen = [liked[user].copy() for user in range(len(answers))]
        queries = {f"u{i}": ", ".join(titles[x] for x in last[-10:]) for i, last in enumerate(seen)}
        relevant = {f"u{i}": {f"{film:04}"} for i, film in enumerate(answers)}
        task.parts[part] = RetrievalData(queries, corpus, relevant)
        task.seen[part] = seen
        for user, film in enumerate(answers):
            liked[user].append(film)
    return task


@cache
def task_of(name: str, folder: Path) -> Task:
    if name in ("banking", "clinc"):
        return intents(folder, name)
    return films()


# --- one training ---------------------------------------------------------------------------------


class Distinct(nn.Module):
    """Cosine InfoNCE over the distinct documents of a batch: the gradients of the package's loss
    with the copies of a text put together, in less time where few documents answer."""

    def __init__(self, model: stm.SentenceTransformer, arm: str, task: Task) -> None:
        super().__init__()
        self.model, self.documents = model, task.documents
        self.same_text, self.has_prior = ARMS[arm]
        self.log_q = task.log_p(task.texts)

    def forward(self, inputs: list[dict[str, Tensor]], labels: None = None) -> Tensor:
        queries, answers = inputs[0], inputs[1]["input_ids"]
        numbers, own, counts = answers.unique(return_inverse=True, return_counts=True)
        documents = joined([self.documents[i] for i in numbers])
        q, d = (self.model(dict(x))["sentence_embedding"] for x in (queries, documents))
        logits = stm.COSINE(q, d) / TAU + self.weights(numbers, counts)[own]
        return cross_entropy(logits, own)

    def weights(self, numbers: Tensor, counts: Tensor) -> Tensor:
        """What is added to the logits (K, K) of a document as a negative and, on the diagonal, as
        the answer: log n, less log q with a prior."""
        of_negatives = (counts if self.same_text != "once" else torch.ones_like(counts)).log()
        found = of_negatives.expand(len(counts), -1).clone()
        if self.same_text == "exclude":
            found.fill_diagonal_(0)
        return found - self.log_q[numbers] if self.has_prior else found


def trained(cell: Cell, task: Task) -> stm.SentenceTransformer:
    torch.manual_seed(cell.seed)
    model = stm.strip_normalize(static_model()).train()
    steps = min(max(20, 3 * len(task.anchors) // cell.batch), 1500)
    columns = Dataset.from_dict({"anchor": task.anchors, "positive": task.positives})
    order = known.batches(columns, cell.batch, cell.seed, no_duplicates=False)
    texts = [task.queries, [torch.tensor([i]) for i in task.answers]]
    model.preprocess = joined  # type: ignore[method-assign]
    with stm.trimmed_vocabulary(model, task.queries + task.documents):
        how = known.Cell("", "", (), steps=steps, rate=cell.rate)
        known.fit(how, Distinct(model, cell.arm, task), texts, order, None)
    del model.preprocess
    return model.eval()


def joined(texts: list[Tensor], task: str | None = None) -> dict[str, Tensor]:
    starts = [0, *accumulate(map(len, texts[:-1]))]
    return {"input_ids": torch.cat(texts), "offsets": torch.tensor(starts)}


def measure(cell: Cell, folder: Path) -> Figures:
    """Trains; the weight of the prior at scoring that is best on dev; every query of the tests."""
    began = time.perf_counter()
    task = task_of(cell.data, folder)
    model = trained(cell, task)
    seconds = round(time.perf_counter() - began, 1)
    ids = sorted(task.parts["dev"].corpus)
    texts = [task.parts["dev"].corpus[d] for d in ids]
    options: Figures = {"batch_size": 256, "show_progress_bar": False}
    documents = stm.COSINE.document(encode_raw(model, texts, "document", **options))

    def ndcg(part: str, weights: Sequence[float]) -> list[NDArray[np.float64]]:
        data = task.parts[part]
        queries = encode_raw(model, list(data.queries.values()), "query", **options)
        logits = stm.COSINE.query(queries) @ documents.T / TAU
        for row, seen in zip(logits, task.seen.get(part, ()), strict=False):
            row[seen] = -torch.inf
        return ranked(logits, task.log_p(texts), weights, data, ids)

    dev = [round(float(values.mean()), 5) for values in ndcg("dev", WEIGHTS)]
    weight = WEIGHTS[int(np.argmax(dev))]
    tests = {part: list(map(packed, ndcg(part, (0.0, weight)))) for part in task.parts}
    del tests["dev"]
    return {"dev": dev[0], "weight": weight, "tests": tests, "seconds": seconds}


# --- runs and tables ------------------------------------------------------------------------------


def best_on_dev(data: str, batch: int, arm: str) -> Cell | None:
    """The stored rate that is best on dev with seed 0."""
    return CELLS.best(Cell(data, batch, arm, rate) for rate in RATES)


def per_query(data: str, batch: int, arm: str, part: str, scoring: int) -> PerQuery:
    """nDCG@10 of every query by seed: without the prior at scoring, 0, or with it, 1."""
    best = best_on_dev(data, batch, arm)
    found = CELLS.of_seeds(best, SEEDS) if best else {}
    return {seed: unpacked(x["tests"][part][scoring]) for seed, x in found.items()}


def table(scoring: int, shown: Mapping[tuple[str, str], str]) -> list[str]:
    """ "keep" in percent, and what the others gain over it in points."""
    rows = []
    for ((data, part), name), batch in product(shown.items(), BATCHES):
        found = {arm: per_query(data, batch, arm, part, scoring) for arm in ARMS}
        if keep := found.pop("keep"):
            gains = [show(gain_of(values, keep)) for values in found.values()]
            rows.append([name, f"{batch:,}", in_points(list(keep.values())), *gains])
    return markdown(["data", "batch", *ARMS], rows)


TABLES = {
    "copies": partial(table, 0, EVEN | UNEVEN),
    "copies, prior at scoring": partial(table, 1, UNEVEN),
}


def run(folder: Path, data: str, batch: int, arm: str) -> None:
    """All rates with seed 0, then the other seeds of the best one."""
    CELLS.run(lambda cell: measure(cell, folder), [Cell(data, batch, arm, x) for x in RATES])
    if best := best_on_dev(data, batch, arm):
        CELLS.run(lambda cell: measure(cell, folder), seeds_of(best, SEEDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=["banking", "films", "clinc"])
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    for where in product(given.names, given.batches, given.arms):
        run(given.folder, *where)


if __name__ == "__main__":
    main()

"""When does QNorm give never-relevant documents the smaller norm? On Banking77.

    python benchmarks/studies/norm_sign/norm_sign.py DATA [--base static] [--seeds 3]

DATA is a folder with banking77_train.csv, banking77_test.csv, clinc150_full.json and xquad_en.json
(benchmarks/data says where they are published). A query is a question, its answers are other
questions of its intent, and each row of the training has an explicit negative of one of three
kinds: sentences of an encyclopedia (XQuAD), out-of-scope questions (CLINC150), or "Related
articles: ..." with two questions of the same intent. The test index has 385 answers and as many
unseen negatives. A cell that is stored is not trained again.
benchmarks/studies/tables.py rebuilds docs/research/boilerplate.md from the cells.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data import banking77, clinc150
from benchmarks.studies.estimates import markdown
from benchmarks.studies.models import minilm, static_model, train
from benchmarks.studies.store import Figures, Store
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sklearn.metrics import roc_auc_score
from torch import Tensor

import st_magnitude as stm
from st_magnitude import geometry
from st_magnitude.data.retrieval import RetrievalData

KINDS = {"far": "encyclopedia", "middle": "out of scope", "like": "related articles"}


class OverAll(stm.QNormRankingLoss):
    """scale="auto" with the mean norm of all documents, explicit negatives included."""

    def by_mean_norms(self, columns: list[Tensor], *_: Any) -> list[Tensor]:
        queries, *documents = columns
        mean = torch.cat(documents).norm(dim=1).mean()
        return [queries, *(column / mean for column in documents)]


WAYS: dict[str, Callable[[SentenceTransformer], stm.MagnitudeRankingLoss]] = {
    "cosine": stm.CosineRankingLoss,
    "qnorm, mean of all documents": OverAll,
    "qnorm": stm.QNormRankingLoss,
    "qnorm, tau .2": partial(stm.QNormRankingLoss, temperature=0.2),
    "qnorm, fixed scale, tau .2": partial(stm.QNormRankingLoss, scale=4.0, temperature=0.2),
}
BASES: dict[str, tuple[Callable[[], SentenceTransformer], int, int, float]] = {
    "minilm": (minilm, 40, 32, 1e-4),  # model, steps, batch, learning rate
    "static": (static_model, 200, 32, 1e-2),
}


@dataclass(frozen=True)
class Cell:
    """A training."""

    base: str
    kind: str
    way: str
    seed: int = 0


CELLS = Store(Path(__file__).with_name("cells.jsonl"), Cell)


def questions(folder: Path, split: str) -> dict[str, list[str]]:
    """The questions of every intent, in a fixed random order."""
    found = defaultdict(list)
    for text, intent in banking77.read(folder, split):
        found[intent].append(text)
    rng = np.random.default_rng(0)
    return {name: [texts[i] for i in rng.permutation(len(texts))] for name, texts in found.items()}


def pools(folder: Path, kind: str) -> tuple[list[str], list[str]]:
    """Negatives of a kind for training and for the test."""
    if kind == "middle":
        pool = [text for text, _ in clinc150.read(folder / "clinc150_full.json", "oos_test")]
        return pool[:600], pool[600:]
    articles = json.loads((folder / "xquad_en.json").read_text(encoding="utf-8"))["data"]
    pages = [[part["context"] for part in article["paragraphs"]] for article in articles]
    found = [[s for text in page for s in re.split(r"(?<=[.]) ", text)] for page in pages]
    found = [[sentence for sentence in page if len(sentence) > 40] for page in found]
    cut = len(pages) * 2 // 3
    return list(chain(*found[:cut])), list(chain(*found[cut:]))


def related(texts: list[str], rng: np.random.Generator) -> str:
    first, second = rng.choice(texts, 2, replace=False)
    return f"Related articles: {first} {second}"


def rows_of(folder: Path, kind: str, number: int, seed: int) -> Dataset:
    """Training rows: question, another one of its intent, explicit negative."""
    intents, rng = questions(folder, "train"), np.random.default_rng(seed)
    labels = rng.integers(len(intents), size=number)
    free = [intents[list(intents)[label]][5:] for label in labels]
    pairs = [list(map(str, rng.choice(texts, 2, replace=False))) for texts in free]
    if kind == "like":
        negatives = [related(texts, rng) for texts in free]
    else:
        negatives = np.random.default_rng(seed).choice(pools(folder, kind)[0], number).tolist()
    anchors, positives = zip(*pairs, strict=True)
    return Dataset.from_dict({"anchor": anchors, "positive": positives, "negative": negatives})


def first_of(intents: dict[str, list[str]], number: int) -> dict[str, str]:
    """Intent/number -> question."""
    return {f"{name}/{k}": texts[k] for name, texts in intents.items() for k in range(number)}


def test_of(folder: Path, kind: str) -> RetrievalData:
    """308 test questions, 5 answers of each intent, which no training reads, and 385 negatives."""
    intents, rng = questions(folder, "train"), np.random.default_rng(0)
    if kind == "like":
        unseen = [related(texts[:5], rng) for texts in intents.values() for _ in range(5)]
    else:
        unseen = rng.choice(pools(folder, kind)[1], 385, replace=False).tolist()
    corpus = first_of(intents, 5) | {f"negative/{i}": text for i, text in enumerate(unseen)}
    queries = first_of(questions(folder, "test"), 4)
    relevant = {query: {f"{query.split('/')[0]}/{k}" for k in range(5)} for query in queries}
    return RetrievalData(queries, corpus, relevant)


def pushes(loss: stm.MagnitudeRankingLoss, rows: Dataset, batch: int) -> dict[str, float]:
    """-dL / d log|d| = -d · dL/dd of a positive and of a negative, times the batch size.

    Means over ten batches; the cosine is that of the negatives and the queries.
    """
    model, found = loss.model.eval(), []
    for start in range(0, 10 * batch, batch):
        part = rows[start : start + batch]
        columns = [model.preprocess(part[name]) for name in ("anchor", "positive", "negative")]
        texts = loss.read(columns)
        with torch.no_grad():
            embeddings = [model(dict(c))["sentence_embedding"].clone() for c in columns]
        embeddings = [e.requires_grad_() for e in embeddings]
        total = loss.compute_loss_from_embeddings(embeddings, texts)
        total = sum(total.values()) if isinstance(total, dict) else total
        total.backward()
        push = [-batch * (e.detach() * e.grad).sum(dim=1).mean().item() for e in embeddings[1:]]
        found.append([*push, stm.COSINE(embeddings[0], embeddings[2]).mean().item()])
    positive, negative, cosine = np.mean(found, axis=0).tolist()
    return {"positive": positive, "negative": negative, "cosine": cosine}


def measured(model: Any, data: RetrievalData, similarity: stm.Similarity) -> dict[str, float]:
    """d and AUC of the norm, what half of the index keeps, and nDCG@10 as trained and by cosine."""
    task = stm.encode(model, data, similarity, before_normalize=True)
    norms, answers = geometry.norms(task.documents), data.is_relevant
    half = norms >= np.sort(norms)[len(norms) // 2]
    return {
        "d": geometry.cohens_d(norms[answers], norms[~answers]),
        "auc": float(roc_auc_score(answers, norms)),
        "kept": float(half[answers].mean()),
        "ndcg": task.search(10).mean,
        "by cosine": task.sweep([1.0])[1.0].mean,
    }


def trained(folder: Path, cell: Cell) -> Figures:
    """The figures before and after a training."""
    load, steps, batch, rate = BASES[cell.base]
    rows = rows_of(folder, cell.kind, steps * batch, cell.seed)
    data = test_of(folder, cell.kind)
    model, similarity = load(), stm.COSINE if cell.way == "cosine" else stm.QNORM
    before = measured(model, data, stm.COSINE)
    model.model_card_data.widget = [{"text": "a question"}]  # else every Trainer computes examples
    loss = WAYS[cell.way](stm.prepare(model, similarity))
    push = {"before": pushes(loss, rows, batch)}
    size = {"max_steps": steps, "per_device_train_batch_size": batch}
    train(model, loss, rows, cell.seed, learning_rate=rate, **size)
    push["after"] = pushes(loss, rows, batch)
    return {"before": before, "after": measured(model, data, similarity), "push": push}


def table(base: str) -> list[str]:
    """All cells of a base, means over seeds, and how often the push has the sign of the change."""
    rows, agree = [], []
    for kind, way in product(KINDS, WAYS):
        found = list(CELLS.of_seeds(Cell(base, kind, way), 10).values())
        if not found:
            continue
        pushes = [f["push"]["before"]["positive"] - f["push"]["before"]["negative"] for f in found]
        d, before = [f["after"]["d"] for f in found], found[0]["before"]["d"]
        agree += [p * (x - before) > 0 for p, x in zip(pushes, d, strict=True) if way != "cosine"]
        after = [[f["after"][key] for key in ("kept", "ndcg")] for f in found]
        end = "{:.0%}|{:.3f}".format(*np.mean(after, axis=0)).split("|")
        push, seeds = round(np.mean(pushes), 2) + 0.0, ", ".join(f"{x:+.2f}" for x in d)
        rows.append([KINDS[kind], way, f"{push:+.2f}", f"{before:+.2f}", seeds, *end])
    head = "negatives|loss|push apart|d before|d|kept|nDCG@10"
    return [
        *markdown(head.split("|"), rows, "ll"),
        "",
        f"Push apart and the change of d agree in {sum(agree)} of {len(agree)}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="When the norm marks the wrong documents.")
    parser.add_argument("data", type=Path)
    parser.add_argument("--base", choices=BASES, default="minilm")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    settings = product(range(given.seeds), WAYS, KINDS)
    cells = [Cell(given.base, kind, way, seed) for seed, way, kind in settings]
    CELLS.run(partial(trained, given.data), cells)


if __name__ == "__main__":
    main()

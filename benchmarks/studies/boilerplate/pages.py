"""An index with pages that name what is asked for and do not say it.

    python benchmarks/studies/boilerplate/pages.py [--seeds 3]

paraphrase-MiniLM-L3-v2 (its token table frozen) learns WordNet, lemma -> definition, each row with
one explicit negative that answers nothing: a title (the lemma itself), a question, a stub, a list,
or a fragment of a page. Other kinds are held out. Tests hold definitions alone and with pages of
each kind; dev has only kinds that were shown.

Controls, all with the same rows: Cosine at the temperature of .02, .05 and .1 that is best on dev;
that Cosine plus w times the log-probability of "answers a query", by a logistic regression on
surface features (w chosen on dev); and Cosine with prompts.
"""

from __future__ import annotations

import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.pages import (
    KINDS,
    SHOWN,
    SHOWN_FRAGMENTS,
    UNSEEN,
    UNSEEN_FRAGMENTS,
    fragments,
    page,
)
from benchmarks.data.surface import auroc, surface_features
from benchmarks.studies.cells import (
    BASES,
    DATA,
    SEED,
    Cell,
    Data,
    asked,
    data,
    encode,
    lexicons,
    seconds_of,
    train_cell,
)
from benchmarks.studies.estimates import gain_of, in_points, markdown, show
from benchmarks.studies.store import Figures, Store, packed, seeds_of, unpacked
from datasets import Dataset
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import st_magnitude as stm
from st_magnitude import geometry
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask, best_documents

# a corpus by what it has besides the definitions
PARTS = {"definitions alone": (), "with titles": ("title",), "with all": KINDS}
SIZES = {
    "num_test_queries": 400,
    "corpus_size": 800,
    "num_dev_queries": 200,
    "dev_corpus_size": 500,
    "num_foldoc_queries": 300,
    "foldoc_corpus_size": 600,
}
TAUS = (0.02, 0.05, 0.1)
WEIGHTS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
COSINE = Cell("L3frozen", "pages", "cosine", 0, 80, 32, 1e-4)
QNORM = replace(COSINE, loss="qnorm", scale="auto")
PROMPTS = ("query: ", "passage: ")
CELLS = Store(Path(__file__).with_name("cells.jsonl"), Cell)
TESTS = {"wordnet": "WordNet", "foldoc": "FOLDOC"}


# --- data -----------------------------------------------------------------------------------------


def with_pages(task: RetrievalData, names: list[str], unseen: bool, number: int) -> RetrievalData:
    """The task with pages about its queries: a title, another shown kind, and two unseen ones; and
    fragments."""
    rng = random.Random(SEED)
    added: dict[str, str] = {}
    for i, (query, name) in enumerate(sorted(task.queries.items())):
        kinds = ["title", SHOWN[1 + i % 3]]
        kinds += [UNSEEN[i % 4], UNSEEN[(i + 1 + i // 4 % 3) % 4]] if unseen else []
        added |= {f"{kind}-{query}": page(kind, name, names, rng) for kind in kinds}
    added |= fragments(task.corpus, number, kinds=SHOWN_FRAGMENTS)
    if unseen:
        added |= fragments(task.corpus, number, kinds=UNSEEN_FRAGMENTS)
    return RetrievalData(task.queries, {**task.corpus, **added}, task.relevant)


def pages() -> Data:
    """WordNet and FOLDOC with pages that answer nothing; each training row has one as its
    negative."""
    plain = lexicons(**SIZES)
    rng = random.Random(SEED)
    names, texts = plain.rows["anchor"], plain.rows["positive"]
    chosen = rng.sample(range(len(names)), 30_000)
    anchors, positives = [names[i] for i in chosen], [texts[i] for i in chosen]
    own = dict(zip(map(str, chosen), positives, strict=True))
    others = list(fragments(own, 6000, 1, SHOWN_FRAGMENTS).values())
    kinds = ("title", "title", *SHOWN, "fragment", "fragment")
    negatives = []
    for i, name in enumerate(anchors):
        kind = kinds[i % len(kinds)]
        is_fragment = kind == "fragment"
        negatives.append(rng.choice(others) if is_fragment else page(kind, name, anchors, rng))
    rows = Dataset.from_dict({"anchor": anchors, "positive": positives, "negative": negatives})
    tests = {name: with_pages(task, anchors, True, 200) for name, task in plain.tests.items()}
    return Data(rows, with_pages(plain.dev, anchors, False, 100), tests)


def prompted() -> Data:
    """The same with a prompt before each text, which depends on its side."""

    def task(plain: RetrievalData) -> RetrievalData:
        queries, corpus = (
            {key: prompt + text for key, text in texts.items()}
            for prompt, texts in zip(PROMPTS, (plain.queries, plain.corpus), strict=True)
        )
        return RetrievalData(queries, corpus, plain.relevant)

    plain = data("pages")
    columns = {
        name: [PROMPTS[name != "anchor"] + text for text in plain.rows[name]]
        for name in plain.rows.column_names
    }
    tests = {name: task(test) for name, test in plain.tests.items()}
    return Data(Dataset.from_dict(columns), task(plain.dev), tests)


DATA |= {"pages": pages, "pages, prompts": prompted}


def kinds_of(task: RetrievalData) -> NDArray[Any]:
    """Either "definition" or the kind of each document, by rising id."""
    heads = (document.partition("-")[0] for document in sorted(task.corpus))
    return np.array([head if head in KINDS else "definition" for head in heads])


# --- measuring ------------------------------------------------------------------------------------


def by_part(x: EncodedTask, exponent: float, kinds: NDArray[Any]) -> dict[str, str]:
    """nDCG@10 of every query by what the corpus holds."""
    found = {}
    for part, added in PARTS.items():
        if set(added) <= set(kinds):
            among = np.isin(kinds, ("definition", *added))
            found[part] = packed(ndcg(x, exponent, among))
    return found


def separated(x: EncodedTask, kinds: NDArray[Any]) -> dict[str, float]:
    """AUC of the norm for definitions against each kind."""
    norms = geometry.norms(x.documents)
    own = norms[kinds == "definition"]
    others = sorted(set(kinds) - {"definition"})
    return {kind: round(auroc(own, norms[kinds == kind]), 3) for kind in others}


def regression(name: str) -> Any:
    """A logistic regression of "answers a query" on the surface of training rows."""
    rows = data(name).rows.select(range(1000))
    labels = [True] * len(rows) + [False] * len(rows)
    scaled = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return scaled.fit(surface_features([*rows["positive"], *rows["negative"]]), labels)


def with_prior(encoded: EncodedTask, priors: NDArray[np.float64], weight: float) -> EncodedTask:
    """Scores by dot are cosine + weight * prior, by one more dimension."""
    queries = torch.nn.functional.pad(stm.COSINE.query(encoded.queries), (0, 1), value=1.0)
    last = weight * torch.from_numpy(priors).to(encoded.documents)[:, None]
    documents = torch.cat([stm.COSINE.document(encoded.documents), last], dim=1)
    return replace(encoded, queries=queries, documents=documents, similarity=stm.DOT)


def ndcg(encoded: EncodedTask, exponent: float, among: Any = ...) -> NDArray[np.float64]:
    kept = np.arange(len(encoded.documents))[among]
    similarity = stm.Similarity(1.0, exponent)
    (found,) = best_documents(encoded.queries, encoded.documents[kept], [similarity], 10)
    columns, scores = (x.numpy() for x in found)
    return Ranking(encoded.data, encoded.query_ids, kept[columns], scores).ndcg


def measure(cell: Cell) -> Figures:
    """nDCG@10 of every query by test, scoring and part, and the AUC of the norm by kind."""
    began = time.perf_counter()
    model, watch = train_cell(cell, evaluations=2)
    middle = time.perf_counter()
    texts = data(cell.data)
    figures: Figures = {"data": texts.fingerprint, "curve": watch.curve}
    figures |= {"scorings": {}, "tests": {}, "auc": {}}
    if "cosine" in watch.best:  # the model of "calibrated" without its norm
        watch.best["cosine"] = {**watch.best["calibrated"], "exponent": 1.0}
    if cell.loss == "qnorm" and cell.seed == 0:
        before = {"dev": watch.curve[0]["exponents"][-1], "step": 0, "exponent": 1.0}
        watch.best["before"] = before | {"weights": BASES[cell.base]().state_dict()}
    kinds = {name: kinds_of(task) for name, task in texts.tests.items()}
    for scoring in sorted(watch.best):  # matched is the last
        best = figures["scorings"][scoring] = watch.best[scoring]
        model.load_state_dict(best.pop("weights"))
        encoded = {name: encode(model, task) for name, task in texts.tests.items()}
        for name, x in encoded.items():
            of_test, auc = (figures[key].setdefault(name, {}) for key in ("tests", "auc"))
            of_test[scoring] = by_part(x, best["exponent"], kinds[name])
            auc[scoring] = separated(x, kinds[name])
    if cell == replace(COSINE, seed=cell.seed, temperature=cell.temperature):
        fitted = regression(cell.data)

        def prior(task: RetrievalData) -> NDArray[np.float64]:
            features = surface_features([task.corpus[x] for x in sorted(task.corpus)])
            return fitted.predict_log_proba(features)[:, 1]

        of_dev, on_dev = encode(model, texts.dev), prior(texts.dev)
        dev = {w: float(ndcg(with_prior(of_dev, on_dev, w), 0.0).mean()) for w in WEIGHTS}
        weight = max(WEIGHTS, key=dev.__getitem__)
        figures["scorings"]["surface prior"] = {"dev": round(dev[weight], 5), "weight": weight}
        for name, x in encoded.items():
            combined = with_prior(x, prior(texts.tests[name]), weight)
            figures["tests"][name]["surface prior"] = by_part(combined, 0.0, kinds[name])
    return figures | {"seconds": seconds_of(began, middle)}


def grid(cell: Cell) -> list[Cell]:
    return [replace(cell, temperature=tau) for tau in TAUS]


def chosen(cell: Cell) -> Cell:
    """The temperature that is best on dev with seed 0."""
    dev = {}
    for x in grid(cell):
        scorings = (CELLS.load(x) or {"scorings": {}})["scorings"].values()
        dev[x] = max((s["dev"] for s in scorings if "step" in s), default=0.0)
    return max(dev, key=dev.__getitem__)


def with_prompts(cell: Cell) -> Cell:
    return replace(cell, data=f"{cell.data}, prompts")


# --- tables ---------------------------------------------------------------------------------------


def rows() -> dict[str, tuple[Cell, str]]:
    """A cell and a scoring by name."""
    cosine, qnorm = chosen(COSINE), chosen(QNORM)
    return {
        "before training, by cosine": (qnorm, "before"),
        "Cosine": (cosine, "matched"),
        "Cosine + surface prior": (cosine, "surface prior"),
        "Cosine with prompts": (with_prompts(cosine), "matched"),
        "QNorm as trained": (qnorm, "matched"),
        "QNorm by cosine": (qnorm, "cosine"),
    }


def values(cell: Cell, scoring: str, test: str, part: str) -> dict[int, NDArray[np.float64]]:
    """nDCG@10 of every query by seed."""
    found = {seed: x["tests"][test] for seed, x in CELLS.of_seeds(cell).items()}
    return {seed: unpacked(x[scoring][part]) for seed, x in found.items() if scoring in x}


def table() -> list[str]:
    """nDCG@10 in points by what the corpus holds, and what QNorm gains with all."""
    lines = []
    for test, name in TESTS.items():
        qnorm = values(*rows()["QNorm as trained"], test, "with all")
        for model, row in rows().items():
            means = [in_points(list(values(*row, test, part).values())) for part in PARTS]
            found = values(*row, test, "with all")
            gained = None if model == "QNorm as trained" else gain_of(qnorm, found)
            lines.append([f"{name}, {model}", *means, show(gained)])
    return markdown(["test, model", *PARTS, "QNorm as trained less this"], lines)


def auc_table() -> list[str]:
    """AUC of the norm for definitions against each kind, mean over seeds and both tests."""
    lines = []
    for model in ("before training, by cosine", "Cosine", "QNorm as trained"):
        cell, scoring = rows()[model]
        seeds = CELLS.of_seeds(cell).values()
        found = [x["auc"][test].get(scoring) for x in seeds for test in TESTS]
        there = [x for x in found if x]
        means = [f"{np.mean([x[kind] for x in there]):.2f}" for kind in KINDS]
        lines.append([re.split("[ ,]", model)[0], *means])
    return markdown(["norms of", *KINDS], lines)


TABLES = {"pages": table, "norms of pages": auc_table}

if __name__ == "__main__":
    arguments = asked(__doc__)
    CELLS.run(measure, [*grid(COSINE), *grid(QNORM)])
    best = [chosen(COSINE), chosen(QNORM), with_prompts(chosen(COSINE))]
    CELLS.run(measure, (x for cell in best for x in seeds_of(cell, arguments.seeds)))

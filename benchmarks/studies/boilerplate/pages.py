"""An index with pages that name what is asked for and do not say it.

    python benchmarks/studies/boilerplate/pages.py [--seeds 3]

paraphrase-MiniLM-L3-v2 (its token table frozen) learns WordNet, lemma ->
definition, each row with one explicit negative that answers nothing: a title (the lemma itself),
a question, a stub, a list, or a fragment as in fragments.py. Other kinds are held out. Tests hold
definitions alone and with pages of each kind; dev has only kinds that were shown.

Controls, all with the same rows: Cosine at the temperature of .02, .05 and .1 that is best on dev;
that Cosine plus w times the log-probability of "answers a query", by a logistic regression on
surface features, or by one on Cosine's own embeddings (w chosen on dev); and Cosine with prompts.

What was expected is on the page, docs/research/boilerplate.md.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.data.surface import auroc, surface_features
from benchmarks.studies.boilerplate.fragments import (
    best_weight,
    directions_of,
    fragments,
    learned,
    ndcg,
    with_prior,
)
from benchmarks.studies.cells import (
    BASES,
    DATA,
    PICTURES,
    SEED,
    Cell,
    Data,
    Figures,
    Store,
    asked,
    data,
    encode,
    lexicons,
    packed,
    seconds_of,
    seeds_of,
    train_cell,
    unpacked,
)
from benchmarks.studies.estimates import Gain, gain_of, in_points, markdown
from benchmarks.studies.plot import draw
from datasets import Dataset
from numpy.typing import NDArray

import st_magnitude as stm
from st_magnitude import geometry
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask

TEMPLATES: dict[str, tuple[str, ...]] = {
    "title": ("{0}",),
    "question": (
        "What does {0} mean?",
        "Does anybody know what {0} is?",
        "Looking for the meaning of {0}, thanks",
    ),
    "stub": (
        "This entry on {0} is a stub. You can help by expanding it.",
        "Nobody has defined {0} yet.",
    ),
    "list": ("{1}, {0}, {2}", "Entries near {0}: {1}, {2}, {3}"),
    "see": ("{0}: see {1}.", "For {0}, see also {1} and {2}."),
    "sound": (
        "How to pronounce {0}: listen to a recording",
        "Audio of {0}, spoken slowly by a native speaker",
    ),
    "translation": (
        "Translations of {0} into French, German and Spanish",
        "Add a translation of {0}",
    ),
    "talk": (
        "Talk page of {0}. Please sign your comments.",
        "Edit history of {0}, last changed by a guest",
    ),
}
SHOWN, UNSEEN = ("title", "question", "stub", "list"), ("see", "sound", "translation", "talk")
SHOWN_FRAGMENTS, UNSEEN_FRAGMENTS = ("navigation", "url", "word"), ("contents", "licence")
PARTS = {  # name of a corpus to what it has beside the definitions
    "definitions alone": (),
    "with titles": ("title",),
    "with shown kinds": (*SHOWN, *SHOWN_FRAGMENTS),
    "with unseen kinds": (*UNSEEN, *UNSEEN_FRAGMENTS),
    "with fragments": (*SHOWN_FRAGMENTS, *UNSEEN_FRAGMENTS),
    "with all": (*SHOWN, *UNSEEN, *SHOWN_FRAGMENTS, *UNSEEN_FRAGMENTS),
}
SIZES = {
    "num_test_queries": 400,
    "corpus_size": 800,
    "num_dev_queries": 200,
    "dev_corpus_size": 500,
    "num_foldoc_queries": 300,
    "foldoc_corpus_size": 600,
}
TAUS = (0.02, 0.05, 0.1)
CELLS = {
    "L3": Cell("L3frozen", "pages", "cosine", 0, 80, 32, 1e-4),
}
PROMPTS = ("query: ", "passage: ")
STORE = Store(Path(__file__).parent / "pages")
TESTS = {"wordnet": "WordNet", "foldoc": "FOLDOC"}


# --- data -----------------------------------------------------------------------------------------


def page(kind: str, name: str, names: list[str], rng: random.Random) -> str:
    """A page about a name that answers nothing.

    Example:
        >>> page("see", "sea lion", ["otary"], random.Random(2))
        'sea lion: see otary.'
    """
    return rng.choice(TEMPLATES[kind]).format(name, *(rng.choice(names) for _ in range(3)))


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
    others = list(
        fragments(
            dict(zip(map(str, chosen), positives, strict=True)), 6000, 1, SHOWN_FRAGMENTS
        ).values()
    )
    kinds = ("title", "title", *SHOWN, "fragment", "fragment")
    negatives = [
        (
            rng.choice(others)
            if (kind := kinds[i % len(kinds)]) == "fragment"
            else page(kind, name, anchors, rng)
        )
        for i, name in enumerate(anchors)
    ]
    rows = Dataset.from_dict({"anchor": anchors, "positive": positives, "negative": negatives})
    tests = {name: with_pages(task, anchors, True, 200) for name, task in plain.tests.items()}
    return Data(rows, with_pages(plain.dev, anchors, False, 100), tests)


def prompted(name: str) -> Data:
    """The same with a prompt before each text, which depends on its side."""

    def task(plain: RetrievalData) -> RetrievalData:
        queries, corpus = (
            {key: prompt + text for key, text in texts.items()}
            for prompt, texts in zip(PROMPTS, (plain.queries, plain.corpus), strict=True)
        )
        return RetrievalData(queries, corpus, plain.relevant)

    plain = data(name)
    columns = {
        name: [PROMPTS[name != "anchor"] + text for text in plain.rows[name]]
        for name in plain.rows.column_names
    }
    return Data(
        Dataset.from_dict(columns),
        task(plain.dev),
        {name: task(test) for name, test in plain.tests.items()},
    )


DATA |= {
    "pages": pages,
    "pages, prompts": partial(prompted, "pages"),
}


def kinds_of(task: RetrievalData) -> NDArray[Any]:
    """ "definition" or the kind of each document, by rising id."""
    known = {*TEMPLATES, *SHOWN_FRAGMENTS, *UNSEEN_FRAGMENTS}
    heads = (document.partition("-")[0] for document in sorted(task.corpus))
    return np.array([head if head in known else "definition" for head in heads])


# --- measuring ------------------------------------------------------------------------------------


def priors(model: Any, name: str) -> dict[str, Callable[..., NDArray[np.float64]]]:
    """log P(answers a query) by name, from texts and embeddings; learned on training rows."""
    rows = data(name).rows.select(range(1000))
    texts = [*rows["positive"], *rows["negative"]]
    labels = [True] * len(rows) + [False] * len(rows)
    surface = learned(surface_features(texts), labels)
    directions = learned(directions_of(model, texts), labels)

    def on_surface(texts: list[str], embeddings: Any) -> NDArray[np.float64]:
        return surface.predict_log_proba(surface_features(texts))[:, 1]

    def on_embeddings(texts: list[str], embeddings: Any) -> NDArray[np.float64]:
        found = directions.predict_log_proba(stm.COSINE.document(embeddings).numpy())
        return np.maximum(found[:, 1], -50)

    return {"surface prior": on_surface, "embedding prior": on_embeddings}


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


def texts_of(task: RetrievalData) -> list[str]:
    return [task.corpus[document] for document in sorted(task.corpus)]


def measure(cell: Cell) -> Figures:
    """nDCG@10 of every query by test, scoring and part, and the AUC of the norm by kind."""
    began = time.perf_counter()
    model, watch = train_cell(cell, evaluations=2)
    middle = time.perf_counter()
    texts = data(cell.data)
    figures: Figures = {"settings": cell.name, "data": texts.fingerprint, "curve": watch.curve}
    figures |= {"scorings": {}, "tests": {}, "auc": {}}
    if "cosine" in watch.best:  # the model of "calibrated" without its norm
        watch.best["cosine"] = {**watch.best["calibrated"], "exponent": 1.0}
    if cell.loss == "qnorm" and cell.seed == 0:
        before = {"dev": watch.curve[0]["exponents"][-1], "step": 0, "exponent": 1.0}
        watch.best["before"] = before | {"weights": BASES[cell.base]().state_dict()}
    kinds = {name: kinds_of(task) for name, task in texts.tests.items()}
    at: dict[int, dict[str, EncodedTask]] = {}  # step to its embeddings
    for scoring in sorted(watch.best):  # matched is the last
        best = figures["scorings"][scoring] = watch.best[scoring]
        model.load_state_dict(best.pop("weights"))
        if best["step"] not in at:
            at[best["step"]] = {name: encode(model, task) for name, task in texts.tests.items()}
        encoded = at[best["step"]]
        for name, x in encoded.items():
            of_test, auc = (figures[key].setdefault(name, {}) for key in ("tests", "auc"))
            of_test[scoring] = by_part(x, best["exponent"], kinds[name])
            auc[scoring] = separated(x, kinds[name])
    if cell.loss == "cosine" and "prompts" not in cell.data:
        of_dev = encode(model, texts.dev)
        for scoring, prior in priors(model, cell.data).items():
            on_dev = prior(texts_of(texts.dev), of_dev.documents)
            weight = best_weight(of_dev, on_dev)
            dev = float(ndcg(with_prior(of_dev, on_dev, weight), 0.0).mean())
            figures["scorings"][scoring] = {"dev": round(dev, 5), "weight": weight}
            for name, x in encoded.items():
                found = prior(texts_of(texts.tests[name]), x.documents)
                combined = with_prior(x, found, weight)
                figures["tests"][name][scoring] = by_part(combined, 0.0, kinds[name])
    return figures | {"seconds": seconds_of(began, middle)}


def grid(base: str, loss: str) -> list[Cell]:
    """The temperatures; a loss that keeps a norm has the automatic scale."""
    scale: float | str = 20.0 if loss == "cosine" else "auto"
    return [replace(CELLS[base], loss=loss, temperature=tau, scale=scale) for tau in TAUS]


def chosen(base: str, loss: str) -> Cell:
    """The temperature that is best on dev with seed 0."""
    cells = grid(base, loss)
    found = {cell: x["scorings"].values() for cell in cells if (x := STORE.load(cell))}
    dev = {cell: max(s["dev"] for s in x if "step" in s) for cell, x in found.items()}
    return max(dev, key=lambda cell: dev[cell]) if dev else cells[1]


# --- tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A line of the table: a cell and a scoring."""

    cell: Cell
    scoring: str

    def seeds(self) -> dict[int, Figures]:
        found = STORE.of_seeds(self.cell)
        return {seed: x for seed, x in found.items() if self.scoring in x["scorings"]}

    def values(self, test: str, part: str) -> dict[int, NDArray[np.float64]]:
        """nDCG@10 of every query by seed."""
        found = {seed: x["tests"][test][self.scoring][part] for seed, x in self.seeds().items()}
        return {seed: unpacked(text) for seed, text in found.items()}


def rows(base: str) -> dict[str, Row]:
    cosine, qnorm = chosen(base, "cosine"), chosen(base, "qnorm")
    found = {
        "before training, by cosine": Row(qnorm, "before"),
        "Cosine": Row(cosine, "matched"),
        "Cosine calibrated": Row(cosine, "calibrated"),
        "Cosine + surface prior": Row(cosine, "surface prior"),
        "Cosine + embedding prior": Row(cosine, "embedding prior"),
        "Cosine with prompts": Row(replace(cosine, data=f"{cosine.data}, prompts"), "matched"),
        "QNorm as trained": Row(qnorm, "matched"),
        "QNorm calibrated": Row(qnorm, "calibrated"),
        "QNorm by cosine": Row(qnorm, "cosine"),
        "QNorm with prompts": Row(replace(qnorm, data=f"{qnorm.data}, prompts"), "calibrated"),
    }
    return {name: row for name, row in found.items() if row.seeds()}


def gain(after: Row, before: Row, test: str, part: str) -> Gain | None:
    return gain_of(after.values(test, part), before.values(test, part))


def table(base: str) -> list[str]:
    """nDCG@10 in points by what the corpus holds."""
    lines = []
    for test, name in TESTS.items():
        for model, row in rows(base).items():
            means = [in_points(list(row.values(test, part).values())) for part in PARTS]
            lines.append([f"{name}, {model}", len(row.seeds()), *means])
    return markdown(["test, model", "seeds", *PARTS], lines)


def auc_table(base: str) -> list[str]:
    """AUC of the norm for definitions against each kind, mean over seeds and both tests."""
    found, kinds, lines = rows(base), list(PARTS["with all"]), []
    for model in ("before training, by cosine", "Cosine", "QNorm calibrated"):
        if row := found.get(model):
            figures = [(x, test) for x in row.seeds().values() for test in TESTS]
            there = [x["auc"][test][row.scoring] for x, test in figures]
            means = [f"{np.mean([x[kind] for x in there]):.2f}" for kind in kinds]
            lines.append([re.split("[ ,]", model)[0], *means])
    return markdown(["norms of", *kinds], lines)


TABLES = {"pages": table, "norms of pages": auc_table}
PAINTED = {
    "before training, by cosine": "#b9bdc3",
    "Cosine": "#6f757d",
    "Cosine + surface prior": "#7d4fa8",
    "Cosine with prompts": "#c8500f",
    "QNorm calibrated": "#1f6fb4",
}


def paint(axis: Any) -> None:
    found, parts = rows("L3"), [part for part in PARTS if part != "with fragments"]
    width = 0.8 / len(PAINTED)
    for i, (model, color) in enumerate(PAINTED.items()):
        values = [found[model].values("wordnet", part) for part in parts]
        means = [100 * np.mean(list(x.values())) for x in values]
        places = np.arange(len(parts)) + (i + 0.5) * width - 0.4
        axis.bar(places, means, width, label=model, color=color)
    axis.set_xticks(range(len(parts)), [part.replace(" ", "\n", 1) for part in parts], fontsize=8)
    axis.set(ylabel="nDCG@10, WordNet")
    axis.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def picture() -> None:
    (PICTURES / "pages-L3.png").write_bytes(draw(paint, (7.2, 3.8)))


def run_all(base: str, seeds: int) -> None:
    """The temperatures with seed 0, then the other seeds of what the tables show."""
    losses = ("cosine", "qnorm")
    STORE.run(measure, (cell for loss in losses for cell in grid(base, loss)))
    best = [chosen(base, loss) for loss in losses]
    best += [replace(cell, data=f"{cell.data}, prompts") for cell in best]
    STORE.run(measure, (x for cell in best for x in seeds_of(cell, seeds)))


if __name__ == "__main__":
    arguments = asked(__doc__, CELLS)
    for base in arguments.names:
        run_all(base, arguments.seeds)

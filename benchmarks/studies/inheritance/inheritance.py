"""Is the gain of a norm inherited from pretraining with dot products?

    python benchmarks/studies/inheritance/inheritance.py [BASE ...] [--seeds 3]

Two bases are made from paraphrase-MiniLM-L3-v2 by InfoNCE on independent crops (10 to 50 % of the
words of a text, 4 to 22 words) of the descriptions of Debian's packages: one under dot, one under
cosine, two rounds of 400 steps of 64 pairs at 2e-4. Two more are made alike from all-MiniLM-L6-v2
without its Normalize, in bfloat16. The test is void unless the dot base is at least as good by dot
as by cosine on dev, but for a point.

Then each base learns WordNet, 100 steps of 32, learning rate 5e-5, the best of five states on dev.
Tests: WordNet, FOLDOC and docstrings. Cosine has the temperatures .02, .05 and .1, and the one that
is best on dev for its base is the control. The losses that keep a norm have the automatic scale.
What was expected is on the page, docs/research/inheritance.md.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from benchmarks.data.lexicons import default_cache, fetch
from benchmarks.data.search_tasks import man_pages, shrink
from benchmarks.data.texts import package_descriptions
from benchmarks.studies.cells import (
    BASES,
    DATA,
    EXPONENTS,
    SCORINGS,
    SEED,
    Cell,
    Data,
    Figures,
    Store,
    asked,
    best_of,
    data,
    docstring_task,
    encode,
    gain,
    lexicons,
    per_query,
    read,
    results,
    run,
    seeds_of,
    store,
    stored_seeds,
    train_cell,
)
from benchmarks.studies.estimates import Gain, in_points, markdown, paired, show
from datasets import Dataset
from sentence_transformers import SentenceTransformer

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData

CROP = (4, 22)  # words
MODELS = ("L3", "MiniLM")
KEPT = {"dot": "Dot", "qnorm": "QNorm", "dnorm": "DNorm", "learnable": "Learnable"}
NAMES = {
    f"{model}{pretraining}": f"{model} {how}"
    for model in MODELS
    for pretraining, how in {
        "": "of its authors",
        "dot": "pretrained with dot",
        "cosine": "pretrained with cosine",
    }.items()
}
TAUS = (0.02, 0.05, 0.1)
TESTS = {"wordnet": "WordNet", "foldoc": "FOLDOC", "docstrings": "docstrings"}
SCORED = {"matched": "as trained", "calibrated": "calibrated"}
STEPS, EVALUATIONS = 100, 4
PRETRAINED = Store(Path(__file__).parent / "cells")


def recipes(model: str, loss: str) -> list[Cell]:
    """Two rounds of 400 steps, the second from the weights of the first."""
    bf16 = model == "MiniLM"
    first = Cell(model, "crops", loss, 0, 400, 64, 2e-4, scale="auto", bf16=bf16)
    return [first, replace(first, base=f"{model}{loss}-1", seed=1)]


PRETRAINING = {f"{m}{loss}": recipes(m, loss) for m in MODELS for loss in ("dot", "cosine")}
FIRST = Cell("L3frozen", "crops", "dot", 0, 120, 40, 2e-4, scale="auto")  # other text; it failed


# --- raw text -------------------------------------------------------------------------------------


def crop(words: list[str], rng: random.Random) -> str:
    """A piece of 10 to 50 % of the words.

    Example:
        >>> len(crop([str(i) for i in range(100)], random.Random(0)).split()) in range(10, 23)
        True
    """
    number = min(max(round(len(words) * rng.uniform(0.1, 0.5)), CROP[0]), CROP[1])
    start = rng.randrange(len(words) - number + 1)
    return " ".join(words[start : start + number])


def crops(number: int = 40_000) -> Data:
    """Two crops of one text in each row; dev is that of the fine-tuning."""
    rng = random.Random(SEED)
    found = {f"{short} {long}".strip() for short, long in package_descriptions()}
    long = sorted(text for text in found if len(text.split()) >= 24)
    texts = [text.split() for text in random.Random(SEED).sample(long, len(long))]
    chosen = [texts[i % len(texts)] for i in range(number)]
    rows = {name: [crop(words, rng) for words in chosen] for name in ("anchor", "positive")}
    return Data(Dataset.from_dict(rows), data("inheritance").dev, {})


def finetuning() -> Data:
    """WordNet, with FOLDOC and docstrings as other domains."""
    plain = lexicons(corpus_size=3000, dev_corpus_size=1000, foldoc_corpus_size=1500)
    added = {"docstrings": shrink(docstring_task().test, 300, 1000, SEED)}
    return replace(plain, tests=plain.tests | added)


DATA |= {"inheritance": finetuning, "crops": crops}


# --- the bases ------------------------------------------------------------------------------------


def weights_path(recipe: Cell) -> Path:
    return default_cache() / "evidence" / f"{recipe.name}.pt"


def pretrain(recipe: Cell) -> Figures:
    """Trains a base, keeps its weights in the cache, and returns its curve on dev."""
    weights_path(recipe).parent.mkdir(parents=True, exist_ok=True)
    model, watch = train_cell(recipe, evaluations=5)
    torch.save(model.state_dict(), weights_path(recipe))
    pages = man_pages([fetch(package) for package in ("manpages", "manpages-dev")])
    return {"settings": recipe.name, "curve": watch.curve, "man pages": by_exponent(model, pages)}


def by_exponent(model: SentenceTransformer, task: RetrievalData) -> list[float]:
    """nDCG@10 by the document exponent."""
    encoded = encode(model, task)
    tops = encoded.tops([stm.Similarity(1.0, exponent) for exponent in EXPONENTS])
    return [round(float(encoded.ndcg(top).mean()), 5) for top in tops]


def check(base: str) -> None:
    """Says so if a dot base is worse by dot than by cosine on dev, by more than a point."""
    found = read(PRETRAINED.path(PRETRAINING[base][-1])) or {}
    by_dot, *_, by_cosine = found["curve"][-1]["exponents"]
    if by_dot < by_cosine - 0.01:
        print(f"The test is void: {base} has {by_dot:.3f} by dot, {by_cosine:.3f} by cosine.")


def pretrained(recipe: Cell) -> SentenceTransformer:
    model = stm.strip_normalize(BASES[recipe.base]())
    model.load_state_dict(torch.load(weights_path(recipe), weights_only=True, map_location="cpu"))
    return model


for name, rounds in PRETRAINING.items():
    BASES |= {f"{name}-{i}": partial(pretrained, recipe) for i, recipe in enumerate(rounds, 1)}
    BASES[name] = partial(pretrained, rounds[-1])


# --- fine-tuning ----------------------------------------------------------------------------------


def cosine(base: str, tau: float = 0.05) -> Cell:
    bf16 = base.startswith("MiniLM")
    return Cell(base, "inheritance", "cosine", 0, STEPS, 32, 5e-5, temperature=tau, bf16=bf16)


def control(base: str) -> Cell:
    """Cosine at the temperature that is best on dev."""
    return best_of([cosine(base, tau) for tau in TAUS], "matched") or cosine(base)


def keeping(base: str, loss: str, tau: float = 0.05) -> Cell:
    return replace(cosine(base, tau), loss=loss, scale="auto")


def best(base: str, loss: str, scoring: str) -> Cell:
    """A loss that keeps the norm at the stored temperature that is best on dev."""
    return best_of([keeping(base, loss, tau) for tau in TAUS], scoring) or keeping(base, loss)


def run_all(bases: list[str], seeds: int) -> None:
    """The bases, everything with seed 0, then the other seeds of what the table shows."""
    for together in zip(*(PRETRAINING[base] for base in bases if base in PRETRAINING), strict=True):
        missing = [recipe for recipe in together if not weights_path(recipe).is_file()]
        for recipe, figures in results(pretrain, missing):
            store(PRETRAINED.path(recipe), figures)
    for base in bases:
        if base.endswith("dot"):
            check(base)
    pairs = list(product(bases, KEPT))
    cells = [cosine(base, tau) for base in bases for tau in TAUS]
    run([*cells, *(keeping(*pair, tau) for pair in pairs for tau in TAUS)], EVALUATIONS)
    shown = [*map(control, bases), *(keeping(*pair) for pair in pairs)]
    shown += [best(*pair, scoring) for pair in pairs for scoring in SCORINGS]
    run((x for cell in shown for x in seeds_of(cell, seeds)), EVALUATIONS)


# --- tables ---------------------------------------------------------------------------------------


def base_table() -> list[str]:
    """nDCG@10 by dot and by cosine before and after each round of pretraining."""
    labels = {
        recipe: f"{base.removesuffix(recipe.loss)}, {recipe.loss}, round {i}"
        for base, rounds in PRETRAINING.items()
        for i, recipe in enumerate(rounds, 1)
    }
    rows = []
    for recipe, label in {**labels, FIRST: "L3, dot, the first recipe"}.items():
        if found := PRETRAINED.load(recipe):
            points = [found["curve"][i]["exponents"] for i in (0, -1)] + [found.get("man pages")]
            scores = [in_points(x[i]) if x else "" for x in points for i in (0, -1)]
            rows.append([label, *scores])
    head = ["pretraining on crops", "dev before, by dot", "by cosine", "dev after, by dot"]
    return markdown([*head, "by cosine", "man pages after, by dot", "by cosine"], rows)


def tuned_table() -> list[str]:
    """nDCG@10 of Cosine at its best temperature, and the gain of the others over it."""
    rows = []
    for base, how in NAMES.items():
        plain = control(base)
        if not (there := stored_seeds(plain)):
            continue
        means = [in_points(per_query(there, test, "matched")) for test in TESTS]
        label = f"{how}, Cosine, τ {plain.temperature:g}"
        rows.append([label, "as trained", len(there), *means])
        for loss, scoring in product(KEPT, SCORED):
            if loss == "dnorm" and scoring != "matched":
                continue
            for cell in dict.fromkeys([keeping(base, loss), best(base, loss, scoring)]):
                gains = [gain(cell, plain, [test], scoring, plain="matched") for test in TESTS]
                if gains[0]:
                    label = f"{how}, {KEPT[loss]}, τ {cell.temperature:g}"
                    rows.append([label, SCORED[scoring], gains[0][1], *map(show, gains)])
    return markdown(["base, loss", "scored", "seeds", *TESTS.values()], rows, "ll")


def inherited(model: str, loss: str, tests: list[str], scoring: str = "matched") -> Gain | None:
    """The gain of a loss over Cosine at .05 from the dot base, less that from the cosine base."""
    bases = (f"{model}dot", f"{model}cosine")
    four = [seeds_of(x) for base in bases for x in (keeping(base, loss), cosine(base))]
    complete = [x for x in zip(*four, strict=True) if all(cell.is_stored for cell in x)]
    if not complete:
        return None
    after, before, other, plain = zip(*complete, strict=True)

    def gained(test: str, cells: tuple[Cell, ...], controls: tuple[Cell, ...]) -> np.ndarray:
        return per_query(cells, test, scoring) - per_query(controls, test, "matched")

    found = [gained(test, after, before) - gained(test, other, plain) for test in tests]
    return paired(found), len(complete)


def inherited_table() -> list[str]:
    """How much more each loss gains from the dot base than from the cosine base."""
    rows = []
    for model, loss, scoring in product(MODELS, KEPT, SCORED):
        found = [inherited(model, loss, [test], scoring) for test in TESTS if loss != "dnorm"]
        if any(found):
            rows.append([f"{model}, {KEPT[loss]}", SCORED[scoring], *map(show, found)])
    head = ["gain from the dot base less that from the cosine base", "scored"]
    return markdown([*head, *TESTS.values()], rows, "ll")


TABLES = {
    "bases": base_table,
    "inheritance": tuned_table,
    "inherited": inherited_table,
}

if __name__ == "__main__":
    arguments = asked(__doc__, NAMES)
    run_all(arguments.names, arguments.seeds)

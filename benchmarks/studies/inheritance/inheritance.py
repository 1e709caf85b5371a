"""Is the gain of a norm inherited from pretraining with dot products?

    python benchmarks/studies/inheritance/inheritance.py [BASE ...] [--seeds 3]

Two bases are made from all-MiniLM-L6-v2 without its Normalize by InfoNCE on independent crops (10
to 50 % of the words of a text, 4 to 22 words) of the descriptions of Debian's packages: one under
dot, one under cosine, two rounds of 400 steps of 64 pairs at 2e-4, in bfloat16. The test is void
unless the dot base is at least as good by dot as by cosine on dev, but for a point.

Then each base learns WordNet, 100 steps of 32, learning rate 5e-5, the best of five states on dev.
Tests: WordNet, FOLDOC and docstrings. Cosine has the temperatures .02, .05 and .1, and the one that
is best on dev for its base is the control. Dot and QNorm have .05 and the automatic scale.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from benchmarks.data.debian import cache_folder, fetch, package_descriptions
from benchmarks.data.docstrings import docstring_task
from benchmarks.data.search_tasks import man_pages, shrink
from benchmarks.studies.cells import (
    BASES,
    DATA,
    EXPONENTS,
    SEED,
    Cell,
    Data,
    asked,
    best_of,
    data,
    encode,
    gain,
    lexicons,
    per_query,
    run_missing,
    stored_seeds,
    train_cell,
)
from benchmarks.studies.estimates import in_points, markdown, show
from benchmarks.studies.store import Figures, Store, seeds_of
from datasets import Dataset
from sentence_transformers import SentenceTransformer

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData

CROP = (4, 22)  # words
KEPT = {"dot": "Dot", "qnorm": "QNorm"}
NAMES = {
    "MiniLM": "of its authors",
    "MiniLMdot": "pretrained with dot",
    "MiniLMcosine": "pretrained with cosine",
}
TAUS = (0.02, 0.05, 0.1)
TESTS = {"wordnet": "WordNet", "foldoc": "FOLDOC", "docstrings": "docstrings"}
SCORED = {"matched": "as trained", "calibrated": "calibrated"}
STEPS, EVALUATIONS = 100, 4
PRETRAINED = Store(Path(__file__).with_name("cells.jsonl"), Cell)


def recipes(loss: str) -> list[Cell]:
    """Two rounds of 400 steps, the second from the weights of the first."""
    first = Cell("MiniLM", "crops", loss, 0, 400, 64, 2e-4, scale="auto", bf16=True)
    return [first, replace(first, base=f"MiniLM{loss}-1", seed=1)]


PRETRAINING = {f"MiniLM{loss}": recipes(loss) for loss in ("dot", "cosine")}


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
    return cache_folder() / "evidence" / f"{recipe.base}-{recipe.loss}-{recipe.seed}.pt"


def pretrain(recipe: Cell) -> Figures:
    """Trains a base, keeps its weights in the cache, and returns its curve on dev."""
    weights_path(recipe).parent.mkdir(parents=True, exist_ok=True)
    model, watch = train_cell(recipe, evaluations=5)
    torch.save(model.state_dict(), weights_path(recipe))
    pages = man_pages([fetch(package) for package in ("manpages", "manpages-dev")])
    return {"curve": watch.curve, "man pages": by_exponent(model, pages)}


def by_exponent(model: SentenceTransformer, task: RetrievalData) -> list[float]:
    """nDCG@10 by the document exponent."""
    encoded = encode(model, task)
    tops = encoded.tops([stm.Similarity(1.0, exponent) for exponent in EXPONENTS])
    return [round(float(encoded.ndcg(top).mean()), 5) for top in tops]


def pretrained(recipe: Cell) -> SentenceTransformer:
    model = stm.strip_normalize(BASES[recipe.base]())
    model.load_state_dict(torch.load(weights_path(recipe), weights_only=True, map_location="cpu"))
    return model


for name, rounds in PRETRAINING.items():
    BASES |= {f"{name}-{i}": partial(pretrained, recipe) for i, recipe in enumerate(rounds, 1)}
    BASES[name] = partial(pretrained, rounds[-1])


# --- fine-tuning ----------------------------------------------------------------------------------


def cosine(base: str, tau: float = 0.05) -> Cell:
    return Cell(base, "inheritance", "cosine", 0, STEPS, 32, 5e-5, temperature=tau, bf16=True)


def control(base: str) -> Cell:
    """Cosine at the temperature that is best on dev."""
    return best_of([cosine(base, tau) for tau in TAUS], "matched") or cosine(base)


def keeping(base: str, loss: str) -> Cell:
    return replace(cosine(base), loss=loss, scale="auto")


def run_all(bases: list[str], seeds: int) -> None:
    """The bases, everything with seed 0, then the other seeds of what the table shows."""
    for recipe in (recipe for base in bases for recipe in PRETRAINING.get(base, ())):
        if not weights_path(recipe).is_file():
            PRETRAINED.add(recipe, pretrain(recipe))
    run_missing([cosine(base, tau) for base in bases for tau in TAUS], EVALUATIONS)
    shown = [*map(control, bases), *(keeping(*pair) for pair in product(bases, KEPT))]
    run_missing((x for cell in shown for x in seeds_of(cell, seeds)), EVALUATIONS)


# --- tables ---------------------------------------------------------------------------------------


def base_table() -> list[str]:
    """nDCG@10 by dot and by cosine before and after each round of pretraining."""
    rows = []
    for recipes in PRETRAINING.values():
        for i, recipe in enumerate(recipes, 1):
            found = PRETRAINED.load(recipe) or {}
            points = [found["curve"][k]["exponents"] for k in (0, -1)] + [found["man pages"]]
            scores = [in_points(x[k]) for x in points for k in (0, -1)]
            rows.append([f"{recipe.loss}, round {i}", *scores])
    head = ["pretraining on crops", "dev before, by dot", "by cosine", "dev after, by dot"]
    return markdown([*head, "by cosine", "man pages after, by dot", "by cosine"], rows)


def tuned_table() -> list[str]:
    """nDCG@10 of Cosine at its best temperature, and the gain of the others over it."""
    rows = []
    for base, how in NAMES.items():
        plain = control(base)
        there = stored_seeds(plain)
        means = [in_points(per_query(there, test, "matched")) for test in TESTS]
        rows.append([f"{how}, Cosine", "as trained", len(there), *means])
        for (loss, name), scoring in product(KEPT.items(), SCORED):
            cell = keeping(base, loss)
            gains = [gain(cell, plain, [test], scoring, plain="matched") for test in TESTS]
            seeds = len(stored_seeds(cell))
            rows.append([f"{how}, {name}", SCORED[scoring], seeds, *map(show, gains)])
    return markdown(["base, loss", "scored", "seeds", *TESTS.values()], rows, "ll")


TABLES = {
    "bases": base_table,
    "inheritance": tuned_table,
}

if __name__ == "__main__":
    arguments = asked(__doc__, NAMES)
    run_all(arguments.names, arguments.seeds)

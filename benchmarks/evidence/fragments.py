"""Part D of the evidence: corpora with fragments that answer nothing, and an index that is pruned by norm.

    python benchmarks/evidence/fragments.py [--tables] [--seeds 3] [--steps 60]

Real crawls hold navigation lines, URLs, single words, tables of contents and licences. paraphrase-MiniLM-L3-v2 learns
the demo's docstrings, 60 steps of 32 queries, each with its answer and one piece of boilerplate, once with Cosine and
once with QNorm (learning rate 1e-4, the demo's). Then fragments, which no training has shown, are added to the test
corpora until they are 0, 25, 50 and 75 % of the corpus: docstrings of scipy, networkx and scikit-learn (300 queries
over 1,000 chunks, boilerplate among them) and FOLDOC (200 over 500).

- By share: nDCG@10 of the model before training and of Cosine, by cosine; of QNorm as trained, at the exponent that is
  best on dev (which has no fragments), and by cosine; and the control, Cosine plus w times the log-probability that a
  logistic regression on surface features gives to "answers a query" (w is chosen on dev).
- By pruning, docstrings with 50 % fragments: the share of the index that is dropped against the answers that are kept,
  by the norm of QNorm, beside three baselines: text length (short ones first), the logistic regression on surface
  features, and a logistic regression on the embeddings of Cosine. Both learn from the training split: answers against
  boilerplate, as QNorm does.

Fragments are made from names and words of the corpus itself and from the licences of the installed packages.

Expected before the run: at 0 % QNorm at the exponent of dev is within 2 points of Cosine. Fragments cost Cosine 3
points or more at 75 %, and QNorm less, so that the gain grows with the share and is clear at 75 %. Cosine plus the
surface prior does as well as QNorm within 2 points. Pruning half of an index with 50 % fragments by norm keeps 95 % of
the answers; the surface regression is within 3 points of that, the regression on embeddings is as good, and length is
worst.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parent))
from cells import (
    DEVICE,
    RESULTS,
    SEED,
    Cell,
    data,
    docstring_task,
    encode,
    kept,
    packed,
    results,
    store,
    train_cell,
    unpacked,
)
from lexicons import default_cache, fetch, foldoc
from magnitude_tables import Estimate, paired
from paraphrase import paraphrase
from search_tasks import shrink
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from surface import auroc, surface_features

import st_magnitude as stm
from st_magnitude import geometry
from st_magnitude._plot import draw
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.surgery.raw import encode_raw

SHARES = (0.0, 0.25, 0.5, 0.75)
DROPPED = (0.25, 0.5, 0.75)
PRUNED_AT = 0.5  # share of fragments in the index that is pruned
WEIGHTS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
KINDS = ("navigation", "url", "word", "contents", "licence")
CELL = Cell("L3", "docstrings", "cosine", 0, 60, 32, 1e-4)
PICTURE = Path(__file__).parents[2] / "docs" / "assets" / "evidence" / "pruning.png"
Figures = dict[str, Any]


# --- fragments --------------------------------------------------------------------------------------------------------


def fragments(corpus: Mapping[str, str], number: int, seed: int = SEED, kinds: Sequence[str] = KINDS) -> dict[str, str]:
    """Fragments of the kinds in turn, all different, from the words of a corpus.

    Example:
        >>> made = fragments({"d": "sparse matrices are stored by rows and columns"}, 4)
        >>> sorted(made)
        ['contents-3', 'navigation-0', 'url-1', 'word-2']
        >>> made["url-1"].startswith("https://"), len(made["word-2"].split())
        (True, 1)
    """
    rng = random.Random(seed)
    words = sorted({word.strip(".,:;()`'\"") for text in corpus.values() for word in text.split()} - {""})
    words = [word for word in words if word.isalpha() and len(word) > 3] or ["page"]
    licences = licence_chunks()
    found: dict[str, str] = {}  # text to kind
    attempts = 0
    while len(found) < number:
        kind = kinds[attempts % len(kinds)] if attempts < 20 * number else "contents"
        attempts += 1
        a, b, c, d = (rng.choice(words) for _ in range(4))
        text = {
            "navigation": rng.choice(
                (f"Home » {a.title()} » {b.title()} | Next | Previous", f"Skip to content  {a}  {b}  Search  About")
            ),
            "url": f"https://docs.{a.lower()}.org/en/stable/{b.lower()}/{c.lower()}.html",
            "word": a,
            "contents": " ".join(
                f"{i}. {w.title()} {' .' * 5} {7 * i + rng.randrange(9)}" for i, w in enumerate((a, b, c, d), 1)
            ),
            "licence": rng.choice(licences) if licences else f"Copyright (c) {a.title()} and {b.title()} contributors.",
        }[kind]
        found.setdefault(text, kind)
    return {f"{kind}-{i}": text for i, (text, kind) in enumerate(found.items())}


@lru_cache(maxsize=1)
def licence_chunks() -> list[str]:
    """400 pieces of the licences of the installed packages, of 40 words."""
    return kept("licences", _licence_chunks)


def _licence_chunks(words: int = 40, most: int = 400) -> list[str]:
    texts = set()
    for distribution in distributions():
        for file in distribution.files or ():
            path = Path(str(distribution.locate_file(file)))
            if "licen" in path.name.lower() and path.suffix.lower() in ("", ".txt", ".md") and path.is_file():
                texts.add(path.read_text(encoding="utf-8", errors="ignore"))
    split = [text.split() for text in sorted(texts)]
    chunks = sorted({" ".join(w[i : i + words]) for w in split for i in range(0, min(len(w), 2000), words)})
    return random.Random(SEED).sample(chunks, min(most, len(chunks)))


def with_fragments(task: RetrievalData, share: float) -> RetrievalData:
    """The task with fragments that are a share of its corpus. A larger share begins with those of a smaller one."""
    number = round(len(task.corpus) * share / (1 - share))
    most = round(len(task.corpus) * max(SHARES) / (1 - max(SHARES)))
    added = dict(list(fragments(task.corpus, most).items())[:number])
    return RetrievalData(task.queries, {**task.corpus, **added}, task.relevant)


# --- models -----------------------------------------------------------------------------------------------------------


def trained(cell: Cell) -> tuple[SentenceTransformer, dict[str, Figures]]:
    """The model of a cell, and step, exponent and weights of both scorings, which the cache keeps."""
    path = default_cache() / "evidence" / f"{cell.name}.pt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(train_cell(cell, evaluations=4)[1].best, path)
    return before(), torch.load(path, weights_only=True, map_location="cpu")


def before() -> SentenceTransformer:
    return stm.strip_normalize(paraphrase()).to(DEVICE)


def classifiers(cosine: SentenceTransformer) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """log P(answers a query) from the surface of a corpus and from embeddings, learned on the training split."""
    task = docstring_task().train
    ids = random.Random(SEED).sample(sorted(task.corpus), min(2000, len(task.corpus)))
    texts, answers = [task.corpus[document] for document in ids], set().union(*task.relevant.values())
    labels = [document in answers for document in ids]

    def on_surface(corpus: Mapping[str, str]) -> NDArray[np.float64]:
        features = surface_features([corpus[document] for document in sorted(corpus)])
        return surface.predict_log_proba(features)[:, 1]

    def on_embeddings(embeddings: torch.Tensor) -> NDArray[np.float64]:
        with np.errstate(divide="ignore"):  # a probability of 0 is dropped first
            return directions.predict_log_proba(stm.COSINE.document(embeddings).numpy())[:, 1]

    surface, directions = (
        make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(features, labels)
        for features in (
            surface_features(texts),
            stm.COSINE.document(
                encode_raw(cosine, texts, "document", batch_size=128, show_progress_bar=False).cpu()
            ).numpy(),
        )
    )
    return on_surface, on_embeddings


def with_prior(encoded: EncodedTask, priors: NDArray[np.float64], weight: float) -> EncodedTask:
    """Scores by dot are cosine + weight * prior: an inner product of vectors with one more dimension."""
    queries = torch.nn.functional.pad(stm.COSINE.query(encoded.queries), (0, 1), value=1.0)
    last = weight * torch.from_numpy(priors).to(encoded.documents)[:, None]
    return EncodedTask(queries, torch.cat([stm.COSINE.document(encoded.documents), last], dim=1), encoded.columns)


def ndcg(encoded: EncodedTask, exponent: float, among: Any = None) -> NDArray[np.float64]:
    return encoded.ndcg(encoded.top(stm.Similarity(1.0, exponent), among=among))


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(cell: Cell) -> Figures:
    """All figures of one pair of models."""
    models = {"before": before()}
    models["Cosine"], best = trained(cell)
    models["Cosine"].load_state_dict(best["matched"]["weights"])
    models["QNorm"], best = trained(replace(cell, loss="qnorm", scale="auto"))
    models["QNorm"].load_state_dict(best["calibrated"]["weights"])
    exponent = best["calibrated"]["exponent"]
    surface, on_embeddings = classifiers(models["Cosine"])

    dev = docstring_task().dev
    encoded_dev = encode(models["Cosine"], dev)
    priors = surface(dev.corpus)
    weight = max(WEIGHTS, key=lambda w: ndcg(with_prior(encoded_dev, priors, w), 0.0).mean())

    tasks = {
        "foldoc": foldoc(fetch("dict-foldoc"), SEED, num_queries=200, corpus_size=500),
        "docstrings": shrink(docstring_task().test, 300, 1000, SEED),  # the last: it is pruned below
    }
    shares: Figures = {}
    for name, task in tasks.items():
        full = with_fragments(task, max(SHARES))
        encoded = {key: encode(model, full) for key, model in models.items()}
        priors = surface(full.corpus)
        for share in SHARES:
            among = held(task, full, share)
            found = {
                "before training": ndcg(encoded["before"], 1.0, among),
                "Cosine": ndcg(encoded["Cosine"], 1.0, among),
                "Cosine + surface prior": ndcg(with_prior(encoded["Cosine"], priors, weight), 0.0, among),
                "QNorm as trained": ndcg(encoded["QNorm"], 0.0, among),
                "QNorm calibrated": ndcg(encoded["QNorm"], exponent, among),
                "QNorm by cosine": ndcg(encoded["QNorm"], 1.0, among),
            }
            shares.setdefault(name, {})[str(share)] = {key: packed(x) for key, x in found.items()}

    texts = [full.corpus[document] for document in sorted(full.corpus)]
    index = np.flatnonzero(held(task, full, PRUNED_AT))
    answers = encoded["Cosine"].degrees[index] > 0
    scores = {
        "norm of QNorm": geometry.norms(encoded["QNorm"].documents),
        "norm of Cosine": geometry.norms(encoded["Cosine"].documents),
        "text length": np.array([len(text.split()) for text in texts], dtype=float),
        "surface features": priors,
        "embeddings of Cosine": on_embeddings(encoded["Cosine"].documents),
    }
    pruning: Figures = {}
    for name, values in scores.items():
        rank = np.empty(len(index))
        rank[np.argsort(values[index], kind="stable")] = np.arange(len(index)) / len(index)  # dropped first
        model, gamma = ("QNorm", exponent) if name == "norm of QNorm" else ("Cosine", 1.0)
        found = {str(d): round(float(ndcg(encoded[model], gamma, index[rank >= d]).mean()), 5) for d in DROPPED}
        pruning[name] = {"ranks of answers": packed(rank[answers]), "ndcg@10": found}
    relevant = set().union(*task.relevant.values())
    ids = sorted(full.corpus)
    kinds = np.array(
        ["answer" if d in relevant else "boilerplate" if d in task.corpus else d.split("-")[0] for d in ids]
    )
    separation = {
        model: {
            kind: round(auroc(values[kinds == "answer"], values[kinds == kind]), 4) for kind in ("boilerplate", *KINDS)
        }
        for model, values in ((name, geometry.norms(x.documents)) for name, x in encoded.items())
    }
    return {
        "settings": {"cell": cell.name, "exponent": exponent, "prior weight": weight},
        "data": data("docstrings").fingerprint,
        "shares": shares,
        "pruning": pruning,
        "separation": separation,
    }


def held(task: RetrievalData, full: RetrievalData, share: float) -> NDArray[np.bool_]:
    """The documents of the corpus with most fragments that are in the one with a smaller share, by rising id."""
    smaller = with_fragments(task, share).corpus
    return np.array([document in smaller for document in sorted(full.corpus)])


def path_of(cell: Cell) -> Path:
    return RESULTS / "fragments" / f"{cell.name}.json"


def stored(steps: int = CELL.steps) -> list[Figures]:
    """The figures of all seeds that are there."""
    paths = [path_of(replace(CELL, seed=seed, steps=steps)) for seed in range(3)]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]


# --- tables -----------------------------------------------------------------------------------------------------------


def by_share(found: list[Figures], task: str, share: float, model: str) -> NDArray[np.float64]:
    """nDCG@10 of every query, (S, n)."""
    return np.array([unpacked(x["shares"][task][str(share)][model]) for x in found])


def gain_at(found: list[Figures], task: str, share: float, model: str, plain: str = "Cosine") -> Estimate:
    return paired([by_share(found, task, share, model) - by_share(found, task, share, plain)])


def share_table(found: list[Figures]) -> list[str]:
    """nDCG@10 in points by share of fragments, and the gain over Cosine with its interval."""
    lines = [
        "| corpus, model | " + " | ".join(f"{share:.0%}" for share in SHARES) + " | over Cosine at 0 % | at 75 % |"
    ]
    lines.append("| --- |" + " ---: |" * (len(SHARES) + 2))
    for task, shares in found[0]["shares"].items():
        for model in shares["0.0"]:
            means = [f"{100 * by_share(found, task, share, model).mean():.1f}" for share in SHARES]
            gains = [
                gain_at(found, task, s, model).show() if model != "Cosine" else "" for s in (SHARES[0], SHARES[-1])
            ]
            lines.append(f"| {task}, {model} | " + " | ".join([*means, *gains]) + " |")
    return lines


def answers_kept(found: list[Figures], name: str, dropped: float) -> NDArray[np.float64]:
    """Whether each answer is kept, (S, answers)."""
    ranks = np.array([unpacked(x["pruning"][name]["ranks of answers"]) for x in found])
    return (ranks >= dropped).astype(float)


def pruning_table(found: list[Figures]) -> list[str]:
    """Answers kept in % and nDCG@10 in points after dropping a share of the index."""
    lines = ["| dropped by | " + " | ".join(f"{d:.0%}: answers kept | nDCG@10" for d in DROPPED) + " |"]
    lines.append("| --- |" + " ---: |" * (2 * len(DROPPED)))
    for name in found[0]["pruning"]:
        row = []
        for d in DROPPED:
            ndcg_of = np.mean([x["pruning"][name]["ndcg@10"][str(d)] for x in found])
            row += [f"{100 * answers_kept(found, name, d).mean():.1f}", f"{100 * ndcg_of:.1f}"]
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return lines


def kept_gain(found: list[Figures], name: str, dropped: float = 0.5) -> Estimate:
    """Share of answers that the norm of QNorm keeps, less that of another criterion."""
    return paired([answers_kept(found, "norm of QNorm", dropped) - answers_kept(found, name, dropped)])


def separation_table(found: list[Figures]) -> list[str]:
    """AUC of the norm for answers against each kind of document that answers nothing, mean over seeds."""
    found = [x for x in found if "separation" in x]
    if not found:
        return ["(No cells are stored yet.)"]
    lines = ["| norms of | boilerplate | " + " | ".join(KINDS) + " |", "| --- |" + " ---: |" * (1 + len(KINDS))]
    for model, name in {"before": "before training", "Cosine": "Cosine", "QNorm": "QNorm"}.items():
        means = [np.mean([x["separation"][model][kind] for x in found]) for kind in ("boilerplate", *KINDS)]
        lines.append(f"| {name} | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")
    return lines


def paint(axis: Any, found: list[Figures]) -> None:
    drops = np.linspace(0, 0.95, 96)
    for i, name in enumerate(found[0]["pruning"]):
        values = [100 * answers_kept(found, name, d).mean() for d in drops]
        axis.plot(100 * drops, values, color=f"C{i}", label=name, lw=1.8 if i == 0 else 1.2)
    axis.set(xlabel="share of the index dropped, %", ylabel="answers kept, %")
    axis.legend(fontsize=8)
    axis.grid()


def picture(found: list[Figures]) -> None:
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_bytes(draw(lambda axis: paint(axis, found), (5.2, 3.6), "png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="train and measure nothing")
    parser.add_argument("--seeds", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--steps", type=int, default=CELL.steps)
    arguments = parser.parse_args()
    if not arguments.tables:
        cells = [replace(CELL, seed=seed, steps=arguments.steps) for seed in range(arguments.seeds)]
        for cell, figures in results(measure, [cell for cell in cells if not path_of(cell).is_file()]):
            store(path_of(cell), figures)
            print(f"{path_of(cell).name} is stored", flush=True)
    if not (found := stored(arguments.steps)):
        parser.exit(1, "Nothing is stored yet: call without --tables.\n")
    print("\n".join([*share_table(found), "", *pruning_table(found), "", *separation_table(found)]))
    picture(found)


if __name__ == "__main__":
    main()

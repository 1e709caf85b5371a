"""Corpora with fragments that answer nothing, and an index that is pruned by norm.

    python benchmarks/studies/boilerplate/fragments.py [--seeds 3]

Real crawls hold navigation lines, URLs, single words, tables of contents and licences.
paraphrase-MiniLM-L3-v2 learns docstrings, 60 steps of 32 queries, each with its answer and one
piece of boilerplate, once with Cosine and once with QNorm. Then fragments, which no training has
shown, are added to the test corpora until they are 0, 25, 50 and 75 % of the corpus. The control is
Cosine plus w times the log-probability that a logistic regression on surface features gives to
"answers a query" (w is chosen on dev). An index with 50 % fragments is pruned by the norm of QNorm,
by text length, and by regressions on surface features and on the embeddings of Cosine, which learn
from the negatives that QNorm has. Fragments are made from words of the corpus itself and from the
licences of the installed packages. What was expected is on the page, docs/research/boilerplate.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.lexicons import default_cache, fetch, foldoc
from benchmarks.data.paraphrase import paraphrase
from benchmarks.data.search_tasks import shrink
from benchmarks.data.surface import auroc, surface_features
from benchmarks.studies.cells import (
    DEVICE,
    PICTURES,
    SEED,
    Cell,
    Figures,
    Store,
    asked,
    data,
    docstring_task,
    encode,
    kept,
    packed,
    seeds_of,
    train_cell,
    unpacked,
)
from benchmarks.studies.estimates import NOTHING, Estimate, in_points, markdown, paired
from benchmarks.studies.plot import draw
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import st_magnitude as stm
from st_magnitude import geometry
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.surgery.raw import encode_raw

SHARES = (0.0, 0.25, 0.5, 0.75)
DROPPED = (0.25, 0.5, 0.75)
PRUNED_AT = 0.5  # share of fragments in the index that is pruned
WEIGHTS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
KINDS = ("navigation", "url", "word", "contents", "licence")
CELL = Cell("L3", "docstrings", "cosine", 0, 60, 32, 1e-4)
CELLS = Store(Path(__file__).parent / "fragments")


# --- fragments ------------------------------------------------------------------------------------


def fragments(
    corpus: Mapping[str, str], number: int, seed: int = SEED, kinds: Sequence[str] = KINDS
) -> dict[str, str]:
    """Fragments of the kinds in turn, all different, from the words of a corpus.

    Example:
        >>> made = fragments({"d": "sparse matrices are stored by rows and columns"}, 4)
        >>> sorted(made)
        ['contents-3', 'navigation-0', 'url-1', 'word-2']
        >>> made["url-1"].startswith("https://"), len(made["word-2"].split())
        (True, 1)
    """
    rng = random.Random(seed)
    found_words = {word.strip(".,:;()`'\"") for text in corpus.values() for word in text.split()}
    words = [word for word in sorted(found_words - {""}) if word.isalpha() and len(word) > 3]
    licences = licence_chunks()
    found: dict[str, str] = {}  # text to kind
    attempts = 0
    while len(found) < number:
        kind = kinds[attempts % len(kinds)] if attempts < 20 * number else "contents"
        attempts += 1
        text = fragment(kind, [rng.choice(words or ["page"]) for _ in range(4)], licences, rng)
        found.setdefault(text, kind)
    return {f"{kind}-{i}": text for i, (text, kind) in enumerate(found.items())}


def fragment(kind: str, words: Sequence[str], licences: Sequence[str], rng: random.Random) -> str:
    a, b, c, _ = words
    navigation = rng.choice(
        (
            f"Home » {a.title()} » {b.title()} | Next | Previous",
            f"Skip to content  {a}  {b}  Search  About",
        )
    )
    entries = enumerate(words, 1)
    contents = [f"{i}. {w.title()} {' .' * 5} {7 * i + rng.randrange(9)}" for i, w in entries]
    copyright = f"Copyright (c) {a.title()} and {b.title()} contributors."
    return {
        "navigation": navigation,
        "url": f"https://docs.{a.lower()}.org/en/stable/{b.lower()}/{c.lower()}.html",
        "word": a,
        "contents": " ".join(contents),
        "licence": rng.choice(licences) if licences else copyright,
    }[kind]


@lru_cache(maxsize=1)
def licence_chunks() -> list[str]:
    """400 pieces of the licences of the installed packages, of 40 words."""
    return kept("licences", _licence_chunks)


def _licence_chunks(words: int = 40, most: int = 400) -> list[str]:
    texts = set()
    for distribution in distributions():
        for file in distribution.files or ():
            path = Path(str(distribution.locate_file(file)))
            is_text = path.suffix.lower() in ("", ".txt", ".md")
            if "licen" in path.name.lower() and is_text and path.is_file():
                texts.add(path.read_text(encoding="utf-8", errors="ignore"))
    chunks = set()
    for found in (text.split() for text in texts):
        starts = range(0, min(len(found), 2000), words)
        chunks |= {" ".join(found[i : i + words]) for i in starts}
    return random.Random(SEED).sample(sorted(chunks), min(most, len(chunks)))


def with_fragments(task: RetrievalData, share: float) -> RetrievalData:
    """The task with fragments that are a share of its corpus, a larger one with the same first."""
    number = round(len(task.corpus) * share / (1 - share))
    most = round(len(task.corpus) * max(SHARES) / (1 - max(SHARES)))
    added = dict(list(fragments(task.corpus, most).items())[:number])
    return RetrievalData(task.queries, {**task.corpus, **added}, task.relevant)


# --- models ---------------------------------------------------------------------------------------


def trained(cell: Cell) -> tuple[SentenceTransformer, dict[str, Figures]]:
    """The model of a cell, and the best of each scoring, which the cache keeps."""
    path = default_cache() / "evidence" / f"{cell.name}.pt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(train_cell(cell, evaluations=4)[1].best, path)
    return before(), torch.load(path, weights_only=True, map_location="cpu")


def before() -> SentenceTransformer:
    return stm.strip_normalize(paraphrase()).to(DEVICE)


def directions_of(model: SentenceTransformer, texts: Sequence[str]) -> NDArray[np.float64]:
    found = encode_raw(model, texts, "document", batch_size=128, show_progress_bar=False)
    return stm.COSINE.document(found.cpu()).numpy()


def learned(features: Any, labels: Sequence[bool]) -> Any:
    """A logistic regression."""
    scaled = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return scaled.fit(features, labels)


def classifiers(cosine: SentenceTransformer) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """log P(answers a query) from the surface of a corpus and from embeddings."""
    task = docstring_task().train
    ids = random.Random(SEED).sample(sorted(task.corpus), min(2000, len(task.corpus)))
    texts = [task.corpus[document] for document in ids]
    answers = set().union(*task.relevant.values())
    labels = [document in answers for document in ids]
    surface = learned(surface_features(texts), labels)
    directions = learned(directions_of(cosine, texts), labels)

    def on_surface(corpus: Mapping[str, str]) -> NDArray[np.float64]:
        features = surface_features([corpus[document] for document in sorted(corpus)])
        return surface.predict_log_proba(features)[:, 1]

    def on_embeddings(embeddings: torch.Tensor) -> NDArray[np.float64]:
        with np.errstate(divide="ignore"):  # a probability of 0 is dropped first
            return directions.predict_log_proba(stm.COSINE.document(embeddings).numpy())[:, 1]

    return on_surface, on_embeddings


def with_prior(encoded: EncodedTask, priors: NDArray[np.float64], weight: float) -> EncodedTask:
    """Scores by dot are cosine + weight * prior, by one more dimension."""
    queries = torch.nn.functional.pad(stm.COSINE.query(encoded.queries), (0, 1), value=1.0)
    last = weight * torch.from_numpy(priors).to(encoded.documents)[:, None]
    documents = torch.cat([stm.COSINE.document(encoded.documents), last], dim=1)
    return EncodedTask(queries, documents, encoded.columns)


def best_weight(encoded: EncodedTask, priors: NDArray[np.float64]) -> float:
    return max(WEIGHTS, key=lambda w: ndcg(with_prior(encoded, priors, w), 0.0).mean())


def ndcg(encoded: EncodedTask, exponent: float, among: Any = None) -> NDArray[np.float64]:
    return encoded.ndcg(encoded.top(stm.Similarity(1.0, exponent), among=among))


# --- measuring ------------------------------------------------------------------------------------


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
    weight = best_weight(encode(models["Cosine"], dev), surface(dev.corpus))
    tasks = {
        "foldoc": foldoc(fetch("dict-foldoc"), SEED, num_queries=200, corpus_size=500),
        "docstrings": shrink(docstring_task().test, 300, 1000, SEED),  # the last: it is pruned
    }
    shares: Figures = {}
    for name, task in tasks.items():
        full = with_fragments(task, max(SHARES))
        encoded = {key: encode(model, full) for key, model in models.items()}
        priors = surface(full.corpus)
        combined = with_prior(encoded["Cosine"], priors, weight)
        for share in SHARES:
            among = held(task, full, share)
            found = {
                "before training": ndcg(encoded["before"], 1.0, among),
                "Cosine": ndcg(encoded["Cosine"], 1.0, among),
                "Cosine + surface prior": ndcg(combined, 0.0, among),
                "QNorm as trained": ndcg(encoded["QNorm"], 0.0, among),
                "QNorm calibrated": ndcg(encoded["QNorm"], exponent, among),
                "QNorm by cosine": ndcg(encoded["QNorm"], 1.0, among),
            }
            shares.setdefault(name, {})[str(share)] = {key: packed(x) for key, x in found.items()}
    texts = [full.corpus[document] for document in sorted(full.corpus)]
    criteria = {
        "norm of QNorm": geometry.norms(encoded["QNorm"].documents),
        "norm of Cosine": geometry.norms(encoded["Cosine"].documents),
        "text length": np.array([len(text.split()) for text in texts], dtype=float),
        "surface features": priors,
        "embeddings of Cosine": on_embeddings(encoded["Cosine"].documents),
    }
    index = np.flatnonzero(held(task, full, PRUNED_AT))
    return {
        "settings": {"cell": cell.name, "exponent": exponent, "prior weight": weight},
        "data": data("docstrings").fingerprint,
        "shares": shares,
        "pruning": {k: pruned(x, k, index, encoded, exponent) for k, x in criteria.items()},
        "separation": separation(task, full, encoded),
    }


def pruned(
    values: NDArray[np.float64],
    name: str,
    index: NDArray[np.int_],
    encoded: Mapping[str, EncodedTask],
    exponent: float,
) -> Figures:
    """Ranks of the answers by a criterion, and nDCG@10 after dropping a share by it."""
    rank = np.empty(len(index))
    rank[np.argsort(values[index], kind="stable")] = np.arange(len(index)) / len(index)
    model, gamma = ("QNorm", exponent) if name == "norm of QNorm" else ("Cosine", 1.0)
    left = {str(d): ndcg(encoded[model], gamma, index[rank >= d]).mean() for d in DROPPED}
    answers = encoded["Cosine"].degrees[index] > 0
    scores = {d: round(float(mean), 5) for d, mean in left.items()}
    return {"ranks of answers": packed(rank[answers]), "ndcg@10": scores}


def separation(
    task: RetrievalData, full: RetrievalData, encoded: Mapping[str, EncodedTask]
) -> Figures:
    """AUC of the norm for answers against each kind of document that answers nothing."""
    relevant = set().union(*task.relevant.values())

    def kind_of(document: str) -> str:
        kind = "boilerplate" if document in task.corpus else document.split("-")[0]
        return "answer" if document in relevant else kind

    kinds = np.array([kind_of(document) for document in sorted(full.corpus)])
    found: Figures = {}
    for model, x in encoded.items():
        norms = geometry.norms(x.documents)
        answers = norms[kinds == "answer"]
        others = ("boilerplate", *KINDS)
        found[model] = {kind: round(auroc(answers, norms[kinds == kind]), 4) for kind in others}
    return found


def held(task: RetrievalData, full: RetrievalData, share: float) -> NDArray[np.bool_]:
    """The documents of the fullest corpus that are in one with a smaller share, by rising id."""
    smaller = with_fragments(task, share).corpus
    return np.array([document in smaller for document in sorted(full.corpus)])


# --- tables ---------------------------------------------------------------------------------------


def stored() -> list[Figures]:
    """The figures of all seeds that are there."""
    return list(CELLS.of_seeds(CELL).values())


def by_share(found: list[Figures], task: str, share: float, model: str) -> NDArray[np.float64]:
    """nDCG@10 of every query, (S, n)."""
    return np.array([unpacked(x["shares"][task][str(share)][model]) for x in found])


def gain_at(found: list[Figures], task: str, share: float, model: str) -> Estimate:
    """Over Cosine."""
    after, before = (by_share(found, task, share, name) for name in (model, "Cosine"))
    return paired([after - before])


def share_table() -> list[str]:
    """nDCG@10 in points by share of fragments, and the gain over Cosine."""
    if not (found := stored()):
        return NOTHING
    rows = []
    for task, shares in found[0]["shares"].items():
        for model in shares["0.0"]:
            means = [in_points(by_share(found, task, share, model)) for share in SHARES]
            gains = [gain_at(found, task, share, model).show() for share in (0.0, 0.75)]
            row = [f"{task}, {model}", *means]
            rows.append([*row, *(["", ""] if model == "Cosine" else gains)])
    shares = [f"{share:.0%}" for share in SHARES]
    return markdown(["corpus, model", *shares, "over Cosine at 0 %", "at 75 %"], rows)


def answers_kept(found: list[Figures], name: str, dropped: float) -> NDArray[np.float64]:
    """Whether each answer is kept, (S, answers)."""
    ranks = np.array([unpacked(x["pruning"][name]["ranks of answers"]) for x in found])
    return (ranks >= dropped).astype(float)


def pruning_table() -> list[str]:
    """Answers kept in % and nDCG@10 in points after dropping a share of the index."""
    if not (found := stored()):
        return NOTHING
    rows = []
    for name in found[0]["pruning"]:
        row = [name]
        for d in DROPPED:
            scores = [x["pruning"][name]["ndcg@10"][str(d)] for x in found]
            row += [in_points(answers_kept(found, name, d)), in_points(scores)]
        rows.append(row)
    columns = [x for d in DROPPED for x in (f"{d:.0%}: answers kept", "nDCG@10")]
    return markdown(["dropped by", *columns], rows)


def kept_gain(found: list[Figures], name: str) -> Estimate:
    """Share of answers that the norm of QNorm keeps at half, less that of another criterion."""
    own, other = (answers_kept(found, x, 0.5) for x in ("norm of QNorm", name))
    return paired([own - other])


def separation_table() -> list[str]:
    """AUC of the norm for answers against each kind, mean over seeds."""
    names = {"before": "before training", "Cosine": "Cosine", "QNorm": "QNorm"}
    kinds = ("boilerplate", *KINDS)
    rows = []
    for model, name in names.items() if stored() else ():
        found = [[x["separation"][model][kind] for kind in kinds] for x in stored()]
        rows.append([name, *(f"{mean:.2f}" for mean in np.mean(found, axis=0))])
    return markdown(["norms of", *kinds], rows)


TABLES = {"fragments": share_table, "pruning": pruning_table, "separation": separation_table}


def paint(axis: Any) -> None:
    found, drops = stored(), np.linspace(0, 0.95, 96)
    for i, name in enumerate(found[0]["pruning"]):
        values = [100 * answers_kept(found, name, d).mean() for d in drops]
        axis.plot(100 * drops, values, color=f"C{i}", label=name, lw=1.8 if i == 0 else 1.2)
    axis.set(xlabel="share of the index dropped, %", ylabel="answers kept, %")
    axis.legend(fontsize=8)
    axis.grid()


def picture() -> None:
    (PICTURES / "pruning.png").write_bytes(draw(paint, (5.2, 3.6)))


if __name__ == "__main__":
    CELLS.run(measure, seeds_of(CELL, asked(__doc__).seeds))

"""In-batch softmax forgets how often a document is the answer, log p(d).

    python benchmarks/studies/prior/prior.py [NAME ...] [--seeds 3]

In-batch negatives are drawn from p(d). The optimum of InfoNCE then is pointwise mutual information,
in which p(d) cancels. Two ways to have it back: subtract log q of each column from its
logit in training (logQ; Yi et al., RecSys 2019; `prior=` of a ranking loss), or add weight · log
p(d) to the logits when scoring, with the weight that is best on dev. log p is counted in the
training pairs (data/dependencies.py). Each loss has the temperature of .02, .05 and .1 that is best
on dev with seed 0, for each training and scoring.

Measured is nDCG@10 over all documents, and without the 50 most frequent ones, which then leave the
index and the judgments. Baselines: ranking by popularity alone, BM25, and BM25 with the prior
added. What was expected is on the page, docs/research/prior.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.dependencies import Task, dependencies
from benchmarks.studies.cells import BASES, Cell, asked, how_of, seconds_of
from benchmarks.studies.estimates import Estimate, in_points, markdown, paired, show
from benchmarks.studies.models import train
from benchmarks.studies.store import Figures, Store, packed, seeds_of, unpacked
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor

import st_magnitude as stm
from st_magnitude.data.ranking import ndcg
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.losses.named import LOSSES
from st_magnitude.surgery.raw import encode_raw

TAUS = (0.02, 0.05, 0.1)
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # of log p at scoring
NAMES = {"mnrl": "MNRL", "cosine": "Cosine", "qnorm": "QNorm"}
SUBSETS = {"all": "all documents", "tail": "without the 50 most frequent"}
WAYS = {  # (training, scoring)
    ("in-batch", "plain"): "in-batch",
    ("in-batch", "prior"): "in-batch, prior at scoring",
    ("logq", "plain"): "logQ",
    ("logq", "prior"): "logQ, prior at scoring",
}
SETTINGS = {  # Cosine in-batch at .05 with seed 0
    "dependencies": Cell("static", "dependencies", "cosine", 0, 200, 256, 0.03),
    "dependencies, longer": Cell("static", "dependencies", "cosine", 0, 800, 256, 0.03),
}
CELLS = Store(Path(__file__).with_name("cells.jsonl"), Cell)
BASELINES = replace(SETTINGS["dependencies"], loss="baselines")


# --- one training ---------------------------------------------------------------------------------


def objective(model: SentenceTransformer, cell: Cell, data: Task) -> Any:
    name, _, way = cell.loss.partition("-")
    tau = float(cell.temperature)
    if name == "mnrl":
        return MultipleNegativesRankingLoss(model, scale=1 / tau)
    texts = data.rows["positive"]
    prior = stm.DocumentPrior.from_texts(model, texts) if way == "logq" else None
    return LOSSES[name].load()(model, temperature=tau, prior=prior, same_text="exclude")


def measure(cell: Cell) -> Figures:
    """Trains and measures."""
    began = time.perf_counter()
    data = dependencies()
    torch.manual_seed(cell.seed)
    model = stm.strip_normalize(BASES[cell.base]())
    loss = objective(model, cell, data)
    train(model, loss, data.rows, cell.seed, **how_of(cell))
    middle = time.perf_counter()
    model.eval()
    exponents = [float(x) for x in getattr(loss, "similarity", stm.COSINE).exponents]
    similarity, sides = stm.Similarity(*exponents), embeddings(model, data)
    sizes = [float(sides[side].norm(dim=1).mean()) for side in ("dev", "documents")]
    # losses divide scores by the mean norms that the similarity leaves
    left = math.prod(size ** (1 - x) for size, x in zip(sizes, exponents, strict=True))
    tau = float(cell.temperature) * left
    found = {x: scorings(sides, data, similarity, tau, x == "tail") for x in SUBSETS}
    return {
        "data": data.fingerprint,
        "exponents": exponents,
        "scorings": found,
        "seconds": seconds_of(began, middle),
    }


def embeddings(model: SentenceTransformer, data: Task) -> dict[str, Tensor]:
    """Of the queries of dev and test, and of their documents, by rising id."""
    documents = data.dev.corpus
    texts = {part: (getattr(data, part).queries.values(), "query") for part in ("dev", "test")}
    texts["documents"] = ([documents[d] for d in sorted(documents)], "document")
    options: Figures = {"batch_size": 128, "show_progress_bar": False}
    return {side: encode_raw(model, list(x), role, **options) for side, (x, role) in texts.items()}


def ranked(
    logits: Tensor,
    log_p: Tensor,
    weights: Sequence[float],
    part: RetrievalData,
    ids: list[str],
) -> list[NDArray[np.float64]]:
    """nDCG@10 of each query by the weight of the prior: (n, m) logits in the order of the ids."""
    column = {document: i for i, document in enumerate(ids)}
    relevant = [{column[d] for d in part.relevant[query] if d in column} for query in part.queries]
    rows = [i for i, wanted in enumerate(relevant) if wanted]
    found = []
    for weight in weights:
        split = logits[rows].split(256)
        tops = torch.cat([(x + weight * log_p).topk(min(10, len(ids))).indices for x in split])
        pairs = zip(rows, tops.tolist(), strict=True)
        gains = [[d in relevant[i] for d in top] for i, top in pairs]
        found.append(ndcg(gains, [[1] * len(relevant[i]) for i in rows]))
    return found


def places(data: Task, part: str, tail: bool) -> tuple[RetrievalData, list[str], Tensor]:
    """The task, the documents of its index and their log p."""
    found: RetrievalData = getattr(data, part)
    ids = [d for d in sorted(found.corpus) if not (tail and d in data.frequent)]
    return found, ids, data.log_p(ids)


def scorings(
    sides: dict[str, Tensor], data: Task, similarity: stm.Similarity, tau: float, tail: bool
) -> Figures:
    """As trained, and with the prior at scoring."""

    def of(part: str, weights: Sequence[float]) -> list[NDArray[np.float64]]:
        texts, ids, log_p = places(data, part, tail)
        kept = torch.tensor([not tail or d not in data.frequent for d in sorted(texts.corpus)])
        documents = similarity.document(sides["documents"][kept])
        logits = similarity.query(sides[part]) @ documents.T / tau
        return ranked(logits, log_p, weights, texts, ids)

    how = {"plain": (0.0,), "prior": WEIGHTS}
    return {scoring: chosen(of, weights) for scoring, weights in how.items()}


def chosen(of: Any, weights: Sequence[float]) -> Figures:
    """The smallest weight that is best on dev, and every query of the test with it."""
    dev = [round(float(values.mean()), 5) for values in of("dev", weights)]
    weight = weights[int(np.argmax(dev))]
    return {"dev": max(dev), "weight": weight, "test": packed(of("test", [weight])[0])}


# --- baselines ------------------------------------------------------------------------------------


def baselines() -> Figures:
    """Popularity alone, BM25, and BM25 with the prior."""
    import bm25s

    data = dependencies()

    def split(texts: Iterable[str]) -> Any:
        return bm25s.tokenize(list(texts), stopwords="en", show_progress=False, return_ids=False)

    def lexical(part: str, tail: bool) -> tuple[Tensor, RetrievalData, list[str], Tensor]:
        texts, ids, log_p = places(data, part, tail)
        index = bm25s.BM25()
        index.index(split(texts.corpus[d] for d in ids), show_progress=False)
        nothing = np.zeros(len(ids), dtype=np.float32)  # for a query of stop words alone
        queries = split(texts.queries.values())
        scores = [index.get_scores(query) if query else nothing for query in queries]
        return torch.tensor(np.stack(scores)), texts, ids, log_p

    found: Figures = {"data": data.fingerprint, "scorings": {}}
    for subset in SUBSETS:
        both = {part: lexical(part, subset == "tail") for part in ("dev", "test")}

        def of(
            part: str, weights: Sequence[float], factor: float = 1.0, both: Any = both
        ) -> list[NDArray[np.float64]]:
            scores, texts, ids, log_p = both[part]
            return ranked(factor * scores, log_p, weights, texts, ids)

        found["scorings"][subset] = {
            "popularity": chosen(partial(of, factor=0.0), (1.0,)),
            "BM25": chosen(of, (0.0,)),
            "BM25, prior": chosen(of, (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)),
        }
    return found


# --- what is stored -------------------------------------------------------------------------------


def cell_of(name: str, loss: str, training: str, tau: float) -> Cell:
    scale = 20.0 if loss in ("mnrl", "cosine") else "batch"
    way = "" if training == "in-batch" else f"-{training}"
    return replace(SETTINGS[name], loss=f"{loss}{way}", temperature=tau, scale=scale)


def best_on_dev(name: str, loss: str, training: str, scoring: str) -> Cell | None:
    """The stored temperature that is best on dev over all documents with seed 0."""
    cells = [cell_of(name, loss, training, tau) for tau in TAUS]
    return CELLS.best(cells, "scorings", "all", scoring, "dev")


def run_task(name: str, seeds: int) -> None:
    """Baselines, all temperatures with seed 0, then the other seeds of the best ones."""
    print(f"{name}: {dependencies()}", flush=True)
    CELLS.run(lambda _: baselines(), [BASELINES])
    pairs = [(loss, "in-batch") for loss in NAMES]
    pairs += [(loss, "logq") for loss in NAMES if loss != "mnrl"]
    CELLS.run(measure, [cell_of(name, *pair, tau) for pair in pairs for tau in TAUS])
    ways = product(pairs, ("plain", "prior"))
    shown = [x for pair, scoring in ways if (x := best_on_dev(name, *pair, scoring))]
    CELLS.run(measure, [x for cell in shown for x in seeds_of(cell, seeds)])


# --- tables ---------------------------------------------------------------------------------------


def stored_seeds(cell: Cell | None) -> dict[int, Figures]:
    return CELLS.of_seeds(cell) if cell else {}


def per_query(figures: Iterable[Figures], subset: str, scoring: str) -> NDArray[np.float64]:
    return np.array([unpacked(x["scorings"][subset][scoring]["test"]) for x in figures])


def gain(after: Cell | None, before: Cell | None, by: str, plain: str) -> Estimate | None:
    """nDCG@10 of one less that of the other, over the seeds that both have on the same texts."""
    a, b = stored_seeds(after), stored_seeds(before)
    seeds = [seed for seed in a.keys() & b.keys() if a[seed]["data"] == b[seed]["data"]]
    if not seeds:
        return None
    x = per_query([a[seed] for seed in seeds], "all", by)
    return paired([x - per_query([b[seed] for seed in seeds], "all", plain)])


def table(name: str) -> list[str]:
    """nDCG@10 in percent, the gain over the loss in-batch, and over Cosine alike."""
    rows: list[list[Any]] = []
    if name == "dependencies" and (fixed := CELLS.load(BASELINES)):
        for what in fixed["scorings"]["all"]:
            means = [in_points(per_query([fixed], subset, what)) for subset in SUBSETS]
            rows.append([what, *means])
    shown = [f"| {what} | | | | {' | '.join(means)} | | |" for what, *means in rows]
    rows = []
    for ((training, scoring), way), loss in product(WAYS.items(), NAMES):
        cell = best_on_dev(name, loss, training, scoring)
        if cell is None or not (found := stored_seeds(cell)):
            continue
        means = [in_points(per_query(found.values(), subset, scoring)) for subset in SUBSETS]
        alike = gain(cell, best_on_dev(name, "cosine", training, scoring), scoring, scoring)
        plain = gain(cell, best_on_dev(name, loss, "in-batch", "plain"), scoring, "plain")
        over = ["" if way == "in-batch" else show(plain), "" if loss == "cosine" else show(alike)]
        rows.append([NAMES[loss], way, f"{cell.temperature:g}", len(found), *means, *over])
    head = ["loss", "training, scoring", "τ", "seeds", *SUBSETS.values()]
    head += ["over in-batch", "over Cosine alike"]
    lines = markdown(head, rows, "ll")
    return lines[:2] + shown + lines[2:]


if __name__ == "__main__":
    arguments = asked(__doc__, SETTINGS)
    for name in arguments.names:
        run_task(name, arguments.seeds)

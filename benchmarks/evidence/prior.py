"""What in-batch softmax forgets: how often a document is the answer, log p(d).

    python benchmarks/evidence/prior.py [TASK ...] [--seeds 3] [--tables]

In-batch negatives are drawn from p(d), so that the optimum of InfoNCE is pointwise mutual information, in which p(d)
cancels. Two ways to have it back: subtract log q of each column from its logit in training (logQ; Yi et al., RecSys
2019; `prior=` of a ranking loss), or add weight · log p(d) to the logits when scoring, with the weight that is best on
dev. log p is counted in the training pairs. The tasks are described in prior_data.py; the static table of wordllama
trains on them, and a table with a token for each film; MiniLM on the first with smaller tasks. Each loss has the
temperature of .02, .05 and .1 that is best on dev with seed 0, of those that were run, for each training and scoring;
losses that keep a norm divide scores by the mean norms of the batch at hand.

Measured is nDCG@10 over all documents, and without the 50 most frequent ones, which then leave the index and the
judgments. The weight of the prior is chosen on dev for each of the two. Baselines: ranking by popularity alone, BM25,
and BM25 with the prior added.

Expected before the run. "dependencies" (a pilot with another split had .25 in-batch, .53 with the prior at scoring, .52
with logQ, popularity .28): Cosine .25 in-batch and .5 with either correction, QNorm behind in-batch by 3 to 7 points
and within 2 with logQ; MNRL of sentence-transformers as Cosine; without the 50 most frequent .29 and .33. "film ids" (a
pilot: .087 in-batch, .285 with logQ): in-batch Cosine is behind popularity, both corrections take it to twice
popularity or more; Dot and QNorm, whose norm can hold the prior, are ahead of Cosine in-batch and level with it with
logQ, where their norm follows log p (Spearman above .8). "films": titles say little about taste, so popularity is ahead
of every in-batch loss, and the corrections end level with popularity or a point ahead. BM25 is near 0 for both.
"lemmas": all within half a point of in-batch, because its documents are about equally frequent and those of dev and
test are not trained on; the weight that dev chooses changes nothing, because their prior is the same number. MiniLM on
dependencies, 50 steps: the same order as the static table, with half of the gain by logQ, because 50 steps are few.

Expected of the losses that were added later: the expectations are on the page, docs/research/prior.md, and were written
there before their figures.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor

sys.path.append(str(Path(__file__).parent))
from cells import BASES, RESULTS, Cell, packed, prepare_process, store, unpacked
from magnitude_tables import Estimate, paired
from packing import without_padding
from prior_data import Task, task
from scipy.stats import spearmanr
from temperature import train

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import ndcg
from st_magnitude.finetune.run import LOSSES
from st_magnitude.surgery.raw import encode_raw

TAUS = (0.02, 0.05, 0.1)
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # of log p at scoring
NAMES = {"mnrl": "MNRL", "cosine": "Cosine", "qnorm": "QNorm", "dot": "Dot", "learnable": "Learnable"}
SUBSETS = {"all": "all documents", "tail": "without the 50 most frequent"}
WAYS = {  # (training, scoring)
    ("in-batch", "plain"): "in-batch",
    ("in-batch", "prior"): "in-batch, prior at scoring",
    ("logq", "plain"): "logQ",
    ("logq", "prior"): "logQ, prior at scoring",
    ("joint", "plain"): "joint directions",
    ("joint", "prior"): "joint directions, prior at scoring",
}
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")  # of "joint", in one softmax
SETTINGS = {  # Cosine in-batch at .05 with seed 0
    "dependencies": Cell("static", "dependencies", "cosine", 0, 200, 256, 0.03),
    "dependencies, longer": Cell("static", "dependencies", "cosine", 0, 800, 256, 0.03),
    "films": Cell("static", "films", "cosine", 0, 100, 256, 0.03),
    "film ids": Cell("film ids", "film ids", "cosine", 0, 400, 256, 0.01),
    "lemmas": Cell("static", "lemmas", "cosine", 0, 200, 256, 0.03),
    "dependencies, small": Cell("MiniLM", "dependencies, small", "cosine", 0, 50, 32, 1e-4),
}
Figures = dict[str, Any]


def film_tokens(films: Iterable[str]) -> Tokenizer:
    """A token for each film that was liked, qNUMBER, and another one where it is searched for, dNUMBER."""
    words = ["[UNK]", *(f"{side}{film}" for film in films for side in "qd")]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return tokenizer


def film_table() -> SentenceTransformer:
    """A random vector for each token."""
    tokenizer = film_tokens(sorted(task("film ids").corpus))
    weights = torch.randn(tokenizer.get_vocab_size(), 64, generator=torch.Generator().manual_seed(0)) / 8
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights)], device="cpu")


BASES["film ids"] = film_table


# --- one training -----------------------------------------------------------------------------------------------------


def objective(model: SentenceTransformer, cell: Cell, data: Task) -> Any:
    name, _, way = cell.loss.partition("-")
    if name == "mnrl":
        return MultipleNegativesRankingLoss(model, scale=1 / float(cell.temperature))
    options: dict[str, Any] = {"directions": DIRECTIONS} if way == "joint" else {}
    if way == "logq":
        options["prior"] = stm.DocumentPrior.from_texts(model, data.rows["positive"])
    return LOSSES[name](model, temperature=cell.temperature, **options)


def measure(cell: Cell) -> Figures:
    """Trains and measures."""
    began = time.perf_counter()
    data = task(cell.data)
    torch.manual_seed(cell.seed)
    model = without_padding(stm.strip_normalize(BASES[cell.base]()))
    loss = objective(model, cell, data)
    how: dict[str, Any] = {
        "max_steps": cell.steps,
        "per_device_train_batch_size": cell.batch,
        "learning_rate": cell.rate,
    }
    if cell.loss.startswith("learnable"):
        how["learning_rate_mapping"] = stm.LearnableNormLoss.learning_rate_mapping()
    train(model, loss, data.rows, cell.seed, **how)
    middle = time.perf_counter()
    model.eval()
    exponents = [float(x) for x in getattr(loss, "similarity", stm.COSINE).exponents]
    similarity, encoded = stm.Similarity(*exponents), Encoded(model, data)
    tau = float(cell.temperature) * encoded.size(similarity)
    return {
        "settings": asdict(cell),
        "data": data.fingerprint,
        "exponents": exponents,
        "scorings": {subset: scorings(encoded, similarity, tau, subset == "tail") for subset in SUBSETS},
        "norm": encoded.follows(),
        "seconds": {"training": round(middle - began), "tests": round(time.perf_counter() - middle)},
    }


class Encoded:
    """The embeddings of both tasks, of which each text is encoded once."""

    def __init__(self, model: SentenceTransformer, data: Task) -> None:
        self.data = data
        how: Any = {"batch_size": 128, "show_progress_bar": False}
        corpus = data.dev.corpus | data.test.corpus
        self.documents = dict(zip(corpus, encode_raw(model, list(corpus.values()), "document", **how), strict=True))
        queries = {part: list(getattr(data, part).queries.values()) for part in ("dev", "test")}
        self.queries = {part: encode_raw(model, texts, "query", **how) for part, texts in queries.items()}

    def size(self, similarity: stm.Similarity) -> float:
        """The mean norms that the similarity leaves, by which losses divide scores as well as by tau."""
        sides = self.queries["dev"], torch.stack(list(self.documents.values()))
        means = [float(side.norm(dim=1).mean()) for side in sides]
        return math.prod(mean ** (1 - gamma) for mean, gamma in zip(means, similarity.exponents, strict=True))

    def follows(self) -> float:
        """Spearman's correlation of the norm of documents with log p, over documents that were trained on."""
        known = [document for document in self.documents if self.data.counts[document]]
        norms = [float(self.documents[document].norm()) for document in known]
        return round(float(spearmanr(norms, self.data.log_p(known).numpy()).statistic), 4) if known else 0.0


def ranked(
    logits: Tensor, log_p: Tensor, weights: Sequence[float], part: RetrievalData, ids: list[str], data: Task
) -> list[NDArray[np.float64]]:
    """nDCG@10 of each query by the weight of the prior: (n, m) logits in the order of the ids."""
    column = {document: i for i, document in enumerate(ids)}
    relevant = [{column[d] for d in part.relevant[query] if d in column} for query in part.queries]
    asked = [i for i, wanted in enumerate(relevant) if wanted]
    for i, query in enumerate(part.queries):
        if hidden := [column[d] for d in data.seen.get(query, ()) if d in column]:
            logits[i, hidden] = -torch.inf
    found = []
    for weight in weights:
        tops = [(rows + weight * log_p).topk(min(10, len(ids))).indices for rows in logits[asked].split(256)]
        gains = [[d in relevant[i] for d in top] for i, top in zip(asked, torch.cat(tops).tolist(), strict=True)]
        found.append(ndcg(gains, [[1] * len(relevant[i]) for i in asked]))
    return found


def places(data: Task, part: str, tail: bool) -> tuple[RetrievalData, list[str], Tensor]:
    """The task, the documents of its index and their log p."""
    found: RetrievalData = getattr(data, part)
    ids = [d for d in sorted(found.corpus) if not (tail and d in data.frequent)]
    return found, ids, data.log_p(ids)


def scorings(encoded: Encoded, similarity: stm.Similarity, tau: float, tail: bool) -> Figures:
    """As trained and with the prior; by cosine if the loss kept a norm."""
    how = {"plain": (similarity, (0.0,)), "prior": (similarity, WEIGHTS)}
    if similarity.exponents[1] < 1:
        how["cosine"] = (stm.COSINE, (0.0,))
    found: Figures = {}
    for scoring, (by, weights) in how.items():

        def of(part: str, weights: Sequence[float], by: stm.Similarity = by) -> list[NDArray[np.float64]]:
            texts, ids, log_p = places(encoded.data, part, tail)
            documents = torch.stack([encoded.documents[document] for document in ids])
            logits = by.query(encoded.queries[part]) @ by.document(documents).T / tau
            return ranked(logits, log_p, weights, texts, ids, encoded.data)

        found[scoring] = chosen(of, weights)
    return found


def chosen(of: Any, weights: Sequence[float]) -> Figures:
    """The weight that is best on dev, the smaller of two equal ones, and every query of the test with it."""
    dev = [round(float(values.mean()), 5) for values in of("dev", weights)]
    weight = weights[int(np.argmax(dev))]
    return {"dev": max(dev), "weight": weight, "test": packed(of("test", [weight])[0])}


# --- baselines --------------------------------------------------------------------------------------------------------


def baselines(name: str) -> Figures:
    """Popularity alone, BM25, and BM25 with the prior."""
    import bm25s

    data = task(SETTINGS[name].data)

    def lexical(part: str, tail: bool) -> tuple[Tensor, RetrievalData, list[str], Tensor]:
        texts, ids, log_p = places(data, part, tail)
        index = bm25s.BM25()
        tokens = bm25s.tokenize([texts.corpus[d] for d in ids], stopwords="en", show_progress=False, return_ids=False)
        index.index(tokens, show_progress=False)
        asked = bm25s.tokenize(list(texts.queries.values()), stopwords="en", show_progress=False, return_ids=False)
        nothing = np.zeros(len(ids), dtype=np.float32)  # for a query of stop words alone
        scores = torch.tensor(np.stack([index.get_scores(query) if query else nothing for query in asked]))
        return scores, texts, ids, log_p

    found: Figures = {"data": data.fingerprint, "scorings": {}}
    for subset in SUBSETS:
        both = {part: lexical(part, subset == "tail") for part in ("dev", "test")}

        def of(part: str, weights: Sequence[float], factor: float = 1.0, both: Any = both) -> list[NDArray[np.float64]]:
            scores, texts, ids, log_p = both[part]
            return ranked(factor * scores, log_p, weights, texts, ids, data)

        found["scorings"][subset] = {
            "popularity": chosen(partial(of, factor=0.0), (1.0,)),
            "BM25": chosen(of, (0.0,)),
            "BM25, prior": chosen(of, (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)),
        }
    return found


# --- what is stored ---------------------------------------------------------------------------------------------------


def path_of(cell: Cell) -> Path:
    return RESULTS / "prior" / f"{cell.name}.json"


def baselines_path(name: str) -> Path:
    data = SETTINGS[name].data.replace(", ", "-").replace(" ", "-")
    return RESULTS / "prior" / f"baselines-{data}.json"


def load(path: Path) -> Figures | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def cell_of(name: str, loss: str, training: str, tau: float, seed: int = 0) -> Cell:
    scale = 20.0 if loss in ("mnrl", "cosine") else "batch"
    way = "" if training == "in-batch" else f"-{training}"
    return replace(SETTINGS[name], loss=f"{loss}{way}", seed=seed, temperature=tau, scale=scale)


def best(name: str, loss: str, training: str, scoring: str) -> Cell | None:
    """The temperature that is best on dev over all documents with seed 0, of those that are stored."""
    found = {}
    for tau in TAUS:
        cell = cell_of(name, loss, training, tau)
        if stored := load(path_of(cell)):
            found[cell] = stored["scorings"]["all"][scoring]["dev"]
    return max(found, key=lambda cell: found[cell]) if found else None


def run(cells: Sequence[Cell]) -> None:
    """Runs the cells that are missing."""
    prepare_process()
    for cell in dict.fromkeys(cells):
        if not path_of(cell).is_file():
            found = measure(cell)
            store(path_of(cell), found)
            shown = {
                f"{subset}, {scoring}": round(float(unpacked(figures["test"]).mean()), 3)
                for subset, by in found["scorings"].items()
                for scoring, figures in by.items()
            }
            print(cell.name, shown, found["norm"], found["seconds"], flush=True)


def run_task(name: str, losses: Sequence[str], seeds: int, taus: Sequence[float]) -> None:
    """Baselines, all temperatures with seed 0, then the other seeds of the best ones."""
    print(f"{name}: {task(SETTINGS[name].data)}", flush=True)
    if not baselines_path(name).is_file():
        store(baselines_path(name), baselines(name))
    pairs = [(loss, "in-batch") for loss in losses] + [(loss, "logq") for loss in losses if loss != "mnrl"]
    pairs += [("cosine", "joint")] if "cosine" in losses and name == "dependencies" else []
    run([cell_of(name, *pair, tau) for pair in pairs for tau in taus])
    chosen = [x for pair in pairs for scoring in ("plain", "prior") if (x := best(name, *pair, scoring))]
    run([replace(cell, seed=seed) for seed in range(1, seeds) for cell in chosen])


# --- tables -----------------------------------------------------------------------------------------------------------


def stored_seeds(cell: Cell | None) -> dict[int, Figures]:
    found = {seed: load(path_of(replace(cell, seed=seed))) for seed in range(3)} if cell else {}
    return {seed: figures for seed, figures in found.items() if figures}


def per_query(figures: Sequence[Figures], subset: str, scoring: str) -> NDArray[np.float64]:
    return np.array([unpacked(x["scorings"][subset][scoring]["test"]) for x in figures])


def gain(after: Cell | None, before: Cell | None, subset: str, by: str, plain: str) -> Estimate | None:
    """nDCG@10 of one less that of the other, over the seeds that both have on the same texts."""
    a, b = stored_seeds(after), stored_seeds(before)
    seeds = [seed for seed in a.keys() & b.keys() if a[seed]["data"] == b[seed]["data"]]
    if not seeds:
        return None
    x, y = (per_query([found[seed] for seed in seeds], subset, how) for found, how in ((a, by), (b, plain)))
    return paired([x - y])


def table(name: str) -> list[str]:
    """nDCG@10 in percent, and the gain over Cosine trained and scored alike."""
    lines = ["| loss | training, scoring | τ | seeds | " + " | ".join(SUBSETS.values()) + " | over Cosine alike |"]
    lines.append("| --- | --- |" + " ---: |" * 5)
    if fixed := load(baselines_path(name)):
        for what in fixed["scorings"]["all"]:
            means = [f"{100 * per_query([fixed], subset, what).mean():.1f}" for subset in SUBSETS]
            lines.append(f"| {what} | | | | " + " | ".join(means) + " | |")
    for (training, scoring), way in WAYS.items():
        for loss, label in NAMES.items():
            cell = best(name, loss, training, scoring)
            if not (found := stored_seeds(cell)) or cell is None:
                continue
            means = [f"{100 * per_query(list(found.values()), subset, scoring).mean():.1f}" for subset in SUBSETS]
            alike = gain(cell, best(name, "cosine", training, scoring), "all", scoring, scoring)
            over = alike.show() if alike and loss != "cosine" else ""
            row = [label, way, f"{cell.temperature:g}", str(len(found)), *means, over]
            lines.append("| " + " | ".join(row) + " |")
    return lines if len(lines) > 2 else ["(No cells are stored yet.)"]


def gain_table() -> list[str]:
    """What the prior and joint directions gain over in-batch training, each at its best temperature."""
    lines = ["| task | loss | with | " + " | ".join(SUBSETS.values()) + " |", "| --- | --- | --- | ---: | ---: |"]
    for name, (loss, label) in product(SETTINGS, NAMES.items()):
        plain = best(name, loss, "in-batch", "plain")
        for training, scoring in [("in-batch", "prior"), ("logq", "plain"), ("joint", "plain")]:
            gains = [gain(best(name, loss, training, scoring), plain, subset, scoring, "plain") for subset in SUBSETS]
            if gains[0] is not None:
                shown = " | ".join(x.show() if x else "" for x in gains)
                how = "prior at scoring" if scoring == "prior" else WAYS[training, scoring]
                lines.append(f"| {name} | {label} | {how} | {shown} |")
    return lines if len(lines) > 2 else ["(No cells are stored yet.)"]


def norm_table() -> list[str]:
    """Losses that keep the norm: does it hold the prior? As trained, by their own cosine, and the correlation."""
    lines = ["| task | loss | training | as trained | by cosine | norm with log p |"]
    lines.append("| --- | --- | --- | ---: | ---: | ---: |")
    for name, loss, training in product(SETTINGS, ("qnorm", "dot", "learnable"), ("in-batch", "logq")):
        if found := list(stored_seeds(best(name, loss, training, "plain")).values()):
            means = [f"{100 * per_query(found, 'all', scoring).mean():.1f}" for scoring in ("plain", "cosine")]
            norm = f"{np.mean([x['norm'] for x in found]):+.2f}"
            lines.append(f"| {name} | {NAMES[loss]} | {training} | " + " | ".join([*means, norm]) + " |")
    return lines if len(lines) > 2 else ["(No cells are stored yet.)"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help=f"some of {', '.join(SETTINGS)}; default: all")
    parser.add_argument("--losses", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--taus", nargs="+", type=float, default=TAUS)
    parser.add_argument("--seeds", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--tables", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    for name in arguments.tasks or SETTINGS:
        if not arguments.tables:
            run_task(name, arguments.losses, arguments.seeds, arguments.taus)
        print("\n".join(["", name, "", *table(name)]))
    print("\n".join(["", *gain_table(), "", *norm_table()]))


if __name__ == "__main__":
    main()

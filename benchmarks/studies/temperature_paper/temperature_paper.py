"""Temperature, aggregation and compression on real text, next to the paper's tables.

    python benchmarks/studies/temperature_paper/temperature_paper.py [--models static,MiniLM]

Trains all-MiniLM-L6-v2 and a static model (wordllama's table) on WordNet, lemma -> definition, at
the temperatures and with the sums of the temperature paper (Dinu et al., ICLR 2025), over three
seeds. A seed is another split of the data and another order; batches have synsets of one part of
speech. Measured on held-out synsets and on FOLDOC: nDCG@10 in full, at a quarter of the dimensions,
in int8, at one bit a dimension, and rescored; the v-measure of k-means against WordNet's
lexicographer files; the intrinsic dimension. Differences are printed next to those of the paper's
Tables 1, 2 and 4, whose lowest temperature is .04, here .03.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.debian import fetch
from benchmarks.data.lexicons import Lexicons, build, chance, wordnet_splits
from benchmarks.studies.cells import prepare_process
from benchmarks.studies.estimates import markdown
from benchmarks.studies.models import minilm, static_model, train
from sentence_transformers import SentenceTransformer
from sklearn.cluster import MiniBatchKMeans
from sklearn.metrics import v_measure_score

import st_magnitude as stm
from st_magnitude._upstream import has_fast_bf16
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import CompressionEvaluator
from st_magnitude.losses import MagnitudeRankingLoss

TAUS = (0.03, 0.06, 0.1, 0.3)
Figures = dict[str, float]
Results = dict[str, list[Figures]]  # by condition, for every seed

CONDITIONS: dict[str, Callable[[SentenceTransformer], MagnitudeRankingLoss]] = {
    **{f"tau {tau:g}": partial(stm.TempAggLoss, temperatures=[tau]) for tau in TAUS},
    "TempAgg": stm.TempAggLoss,
    "TempAggMRL": stm.TempAggMRLLoss,
}


@dataclass
class Study:
    load: Callable[[], SentenceTransformer]
    how: dict[str, Any]  # chosen on the development split, at tau = .06, once for all conditions
    sizes: dict[str, int]  # of the data


def how(steps: int, batch: int, rate: float, bf16: bool = False) -> dict[str, Any]:
    size = {"max_steps": steps, "per_device_train_batch_size": batch}
    return {**size, "learning_rate": rate, "bf16": bf16}


SMALL = {"num_test_queries": 700, "corpus_size": 2000}
SMALL |= {"num_foldoc_queries": 300, "foldoc_corpus_size": 800}
LARGE = {"corpus_size": 2500, "foldoc_corpus_size": 1500}
MODELS = {
    "static": Study(static_model, how(400, 128, 3e-2), LARGE),
    "MiniLM": Study(minilm, how(40, 64, 5e-5, has_fast_bf16()), SMALL),
}


def grid(model: SentenceTransformer, task: RetrievalData) -> Figures:
    """nDCG@10 in points by name of the cell."""
    width = model.get_embedding_dimension() or 0
    dims = [width // 4, width]
    evaluator = CompressionEvaluator(task.queries, task.corpus, task.relevant, dims)
    evaluator(model)
    cells = {(c.dim, c.precision, c.rescoring): 100 * c.ndcg for c in evaluator.cells}
    return {
        "full": cells[width, "float32", "none"],
        "quarter": cells[width // 4, "float32", "none"],
        "int8": cells[width, "int8", "none"],
        "binary": cells[width, "binary", "none"],
        "rescored": cells[width, "binary", "query"],
    }


def clustering(seed: int) -> tuple[list[str], list[str]]:
    """Held-out definitions and their lexicographer files: 50 to 100 of each of nouns and verbs."""
    members = defaultdict(list)
    held_out = wordnet_splits(fetch("wordnet-base"), seed)["test"]
    for entry in sorted(held_out, key=lambda entry: chance(seed, "entry", entry.key)):
        members[entry.label].append(entry)
    files = [x for file, x in members.items() if file.startswith(("noun.", "verb."))]
    chosen = [entry for found in files if len(found) >= 50 for entry in found[:100]]
    chosen.sort(key=lambda entry: chance(seed, "cluster", entry.key))
    return [entry.text for entry in chosen], [entry.label for entry in chosen]


def measure(
    model: SentenceTransformer, data: Lexicons, clustered: tuple[list[str], list[str]], seed: int
) -> Figures:
    """All figures of one trained model."""
    found = grid(model, data.test)
    for size in ("quarter", "binary"):
        found[f"{size} / full"] = 100 * found[size] / found["full"]
    found |= {f"FOLDOC {key}": value for key, value in grid(model, data.foldoc).items()}
    texts, labels = clustered
    embeddings = model.encode_document(texts, batch_size=128, show_progress_bar=False)
    directions = stm.COSINE.document(embeddings).numpy()
    guesses = [
        MiniBatchKMeans(len(set(labels)), random_state=5 * seed + i, n_init=1).fit_predict(
            directions
        )
        for i in range(5)
    ]
    found["v-measure"] = 100 * float(np.mean([v_measure_score(labels, x) for x in guesses]))
    found["intrinsic dim."] = stm.geometry.intrinsic_dimension(embeddings)
    return found


# metric to the paper's figures at .03 (.04 there), .1, .3, TempAgg and TempAggMRL
PAPER = {
    "full": (46.7, 45.9, 38.6, 46.4, 46.6),
    "v-measure": (34.1, 37.7, 39.24, 36.4, 36.9),
    "quarter": (43.6, None, None, 44.6, 45.1),
    "binary": (44.6, None, None, 45.2, 45.2),
    "rescored": (45.6, None, None, 45.9, 46.1),
    "quarter / full": (93.2, 96.4, 98.8, None, None),
    "binary / full": (95.3, 97.8, 98.1, None, None),
    "intrinsic dim.": (654, 623, 430, 629, 623),
}
CHANGES = ("tau 0.1", "tau 0.3", "TempAgg", "TempAggMRL")


def table(results: Results) -> list[str]:
    metrics = list(results["pretrained"][0])
    rows = []
    for condition, runs in results.items():
        rows.append([condition, *(f"{np.mean([run[x] for run in runs]):.1f}" for x in metrics)])
    return markdown(["", *metrics], rows)


def claims(results: Results) -> list[str]:
    """A difference is clear if its mean over seeds is beyond one standard deviation."""
    rows = []
    for metric, (base, *values) in PAPER.items():
        for name, value in zip(CHANGES, values, strict=True):
            if value is None:
                continue
            pairs = zip(results["tau 0.03"], results[name], strict=True)  # of one seed
            gains = np.array([after[metric] - before[metric] for before, after in pairs])
            mean, spread = gains.mean(), gains.std(ddof=1)
            sign = "agrees" if mean * (value - base) > 0 else "disagrees"
            verdict = sign if abs(mean) > spread else f"unclear ({sign})"
            theirs, ours = f"{value - base:+.1f}", f"{mean:+.1f} ± {spread:.1f}"
            rows.append([f"{name} against .03", metric, theirs, ours, verdict])
    return markdown(["change", "metric", "paper", "here", "sign"], rows, "llrrl")


def results_of(name: str, record: Path) -> Results:
    """The study of a model; what ``record`` holds already is not done again."""
    results: Results = json.loads(record.read_text()) if record.exists() else {}
    for seed in range(3):
        data = build(seed, **MODELS[name].sizes)
        clustered = clustering(seed)
        for condition in ("pretrained", *CONDITIONS):
            runs = results.setdefault(condition, [])
            if len(runs) > seed:
                continue
            torch.manual_seed(seed)
            model = MODELS[name].load()
            if condition != "pretrained":
                loss = CONDITIONS[condition](model)
                train(model, loss, data.train, seed, **MODELS[name].how)
            runs.append(measure(model, data, clustered, seed))
            record.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{name}, seed {seed}, {condition}: {runs[-1]['full']:.1f}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("runs/temperature"))
    arguments = parser.parse_args()
    prepare_process()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.models.split(","):
        results = results_of(name, arguments.output / f"{name}.json")
        print("\n".join([f"\n## {name}\n", *table(results), "", *claims(results)]), flush=True)


if __name__ == "__main__":
    main()

"""Temperature, aggregation and compression on real text, beside the paper's tables.

    python benchmarks/studies/temperature_paper/temperature_paper.py [--models static,MiniLM]

Trains all-MiniLM-L6-v2 and a static model (wordllama's table) on WordNet, lemma -> definition, with
every loss of the temperature paper (Dinu et al., ICLR 2025), over three seeds. A seed is another
split of the data and another order. Measured on held-out synsets and on FOLDOC: nDCG@10 in full, at
a quarter of the dimensions, at one bit a dimension, and rescored; the v-measure of k-means against
WordNet's lexicographer files; the intrinsic dimension. Batches are homogeneous, synsets of one part
of speech, except those of "mixed". The gain from one norm stored beside the bits is also measured
on docstrings. Differences are printed beside those of the paper's Tables 1, 2 and 4, whose lowest
temperature is .04, here .03.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.docstrings import DocstringTask, build_docstring_task
from benchmarks.data.lexicons import Lexicons, build
from benchmarks.studies.cells import prepare_process
from benchmarks.studies.estimates import markdown
from benchmarks.studies.models import minilm, static_model, train
from datasets import concatenate_datasets
from sentence_transformers import SentenceTransformer
from sklearn.cluster import MiniBatchKMeans
from sklearn.metrics import v_measure_score

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import CompressionEvaluator
from st_magnitude.losses import MagnitudeRankingLoss, temp_spec_mrl
from st_magnitude.training.run_folder import has_fast_bf16

TAUS = (0.03, 0.06, 0.1, 0.3)
Loss = Callable[[SentenceTransformer], MagnitudeRankingLoss]
Figures = dict[str, float]
Results = dict[str, list[Figures]]  # by condition, for every seed


def quarters(model: SentenceTransformer) -> list[int]:
    width = model.get_embedding_dimension() or 0
    return [width // 4, width // 2, width]


CONDITIONS: dict[str, Loss] = {
    **{f"tau {tau:g}": partial(stm.TempAggLoss, temperatures=[tau]) for tau in TAUS},
    **{f"MRL {tau:g}": partial(stm.TempAggMRLLoss, temperatures=[tau]) for tau in TAUS},
    "TempAgg": stm.TempAggLoss,
    "TempAggMRL": stm.TempAggMRLLoss,
    "TempSpecMRL": lambda model: stm.CosineRankingLoss(
        model, terms=temp_spec_mrl(dict(zip(quarters(model), (0.03, 0.06, 0.1), strict=True)))
    ),
    "QNorm TempAggMRL": lambda model: stm.TempAggMRLLoss(
        stm.prepare(model, "qnorm"), similarity="qnorm"
    ),
    **{f"mixed {tau:g}": partial(stm.TempAggLoss, temperatures=[tau]) for tau in (0.03, 0.3)},
}
TABLE = ["pretrained", *CONDITIONS]


@dataclass
class Study:
    load: Callable[[], SentenceTransformer]
    how: dict[str, Any]  # chosen on the development split, at tau = .06, once for all conditions
    sizes: dict[str, int]  # of the data
    conditions: list[str]


def how(steps: int, batch: int, rate: float, bf16: bool = False) -> dict[str, Any]:
    size = {"max_steps": steps, "per_device_train_batch_size": batch}
    return {**size, "learning_rate": rate, "bf16": bf16}


ALONE = ("MRL 0.06", "MRL 0.1", "MRL 0.3", "mixed 0.03", "mixed 0.3")  # of the static model
SMALL = {"num_test_queries": 700, "corpus_size": 2000}
SMALL |= {"num_foldoc_queries": 300, "foldoc_corpus_size": 800}
MODELS = {
    "static": Study(
        static_model,
        how(400, 128, 3e-2),
        {"corpus_size": 2500, "foldoc_corpus_size": 1500},
        list(CONDITIONS),
    ),
    "MiniLM": Study(
        minilm,
        how(40, 64, 5e-5, has_fast_bf16()),
        SMALL,
        [name for name in CONDITIONS if name not in ALONE],
    ),
}


def grid(
    model: SentenceTransformer, task: RetrievalData, similarity: stm.Similarity | None = None
) -> Figures:
    """nDCG@10 by name of the cell, and its share of the full one."""
    dims = quarters(model)
    evaluator = CompressionEvaluator(
        task.queries, task.corpus, task.relevant, dims, similarity=similarity
    )
    evaluator(model)
    cells = {(c.dim // dims[0], c.precision, c.rescoring): c.ndcg for c in evaluator.cells}
    full = cells[4, "float32", "none"]
    found = {"full": full}
    for label, cell in {
        "half": (2, "float32", "none"),
        "quarter": (1, "float32", "none"),
        "int8": (4, "int8", "none"),
        "binary": (4, "binary", "none"),
        "binary rescored": (4, "binary", "query"),
        "quarter binary": (1, "binary", "none"),
        "quarter binary rescored": (1, "binary", "query"),
    }.items():
        found |= {label: cells[cell], f"{label} / full": cells[cell] / full}
    for share, label in ((4, "binary"), (1, "quarter binary")):
        plain = cells[share, "binary", "query"]
        found[f"{label} rescored with norm"] = cells.get((share, "binary", "norm"), plain)
    return found


def scorings(
    model: SentenceTransformer, dev: RetrievalData, tasks: dict[str, RetrievalData]
) -> Figures:
    """The grid of every task as trained and at the document exponent that is best on dev."""
    found = {
        f"{name}{key}": value
        for name, task in tasks.items()
        for key, value in grid(model, task).items()
    }
    if model.similarity_fn_name == "dot":
        curve = stm.calibrate_exponent(
            model, dev, np.linspace(0, 1, 5), encode={"show_progress_bar": False}
        )
        found["chosen exponent"] = curve.highest
        for name, task in tasks.items():
            chosen = grid(model, task, stm.Similarity(1.0, curve.highest))
            found |= {f"chosen {name}{key}": value for key, value in chosen.items()}
    return found


def measure(model: SentenceTransformer, data: Lexicons, seed: int) -> Figures:
    """All figures of one trained model."""
    found = scorings(model, data.dev, {"": data.test, "FOLDOC ": data.foldoc})
    texts, labels = data.clustering
    embeddings = model.encode_document(texts, batch_size=128, show_progress_bar=False)
    found["intrinsic dimension"] = stm.geometry.intrinsic_dimension(embeddings)
    directions, clusters = stm.COSINE.document(embeddings).numpy(), len(set(labels))
    guesses = [
        MiniBatchKMeans(clusters, random_state=5 * seed + i, n_init=1).fit_predict(directions)
        for i in range(5)
    ]
    found["v-measure"] = float(np.mean([v_measure_score(labels, guess) for guess in guesses]))
    return found


# --- the paper ------------------------------------------------------------------------------------

# metric to the paper's figures at .03 (.04 there), .1, .3, TempAgg, TempAggMRL and TempSpecMRL
METRICS = {
    "full": (46.7, 45.9, 38.6, 46.4, 46.6, 46.0),
    "v-measure": (34.1, 37.7, 39.24, 36.4, 36.9, 37.4),
    "quarter": (43.6, None, None, 44.6, 45.1, 44.6),
    "binary": (44.6, None, None, 45.2, 45.2, 44.8),
    "binary rescored": (45.6, None, None, 45.9, 46.1, 45.5),
    "quarter / full": (93.2, 96.4, 98.8, None, None, None),
    "binary / full": (95.3, 97.8, 98.1, None, None, None),
    "intrinsic dimension": (654, 623, 430, 629, 623, 617),
}
CHANGES = {
    "tau 0.1": "tau .03 -> .1",
    "tau 0.3": "tau .03 -> .3",
    "TempAgg": "TempAgg against .03",
    "TempAggMRL": "TempAggMRL against .03",
    "TempSpecMRL": "TempSpecMRL against .03",
}
# (what changes, from, to, metric, the paper's difference): Tables 1, 2 and 4
CLAIMS = [
    ("MRL at .03", "tau 0.03", "MRL 0.03", "full", 47.2 - 46.7),
    ("MRL at .03", "tau 0.03", "MRL 0.03", "quarter", 45.2 - 43.6),
    ("MRL at .03", "tau 0.03", "MRL 0.03", "binary", 45.3 - 44.6),
    ("MRL at .03", "tau 0.03", "MRL 0.03", "intrinsic dimension", 626 - 654),
    ("MRL at .1", "tau 0.1", "MRL 0.1", "full", 45.4 - 45.9),
    ("MRL at .1", "tau 0.1", "MRL 0.1", "quarter", 44.4 - 44.2),
    ("MRL at .1", "tau 0.1", "MRL 0.1", "intrinsic dimension", 616 - 623),
    ("MRL at .3", "tau 0.3", "MRL 0.3", "quarter", 38.5 - 38.2),
    ("MRL at .3", "tau 0.3", "MRL 0.3", "intrinsic dimension", 396 - 430),
    ("mixed batches at .03", "tau 0.03", "mixed 0.03", "full", 45.70 - 46.73),
    ("mixed batches at .03", "tau 0.03", "mixed 0.03", "quarter / full", 93.46 - 93.10),
    ("mixed batches at .3", "tau 0.3", "mixed 0.3", "full", 35.80 - 38.64),
    ("mixed batches at .3", "tau 0.3", "mixed 0.3", "quarter / full", 98.59 - 98.80),
]
for metric, (base, *values) in METRICS.items():
    for (name, change), value in zip(CHANGES.items(), values, strict=True):
        if value is not None:
            CLAIMS.append((change, "tau 0.03", name, metric, value - base))


def in_points(metric: str) -> float:
    return 1.0 if metric == "intrinsic dimension" else 100.0


def table(results: Results) -> list[str]:
    conditions = [name for name in TABLE if name in results]
    rows = []
    for metric in results["pretrained"][0]:
        row = []
        for name in conditions:
            values = np.array([run[metric] for run in results[name]]) * in_points(metric)
            row.append(f"{values.mean():.1f} ± {values.std(ddof=1):.1f}")
        rows.append([metric, *row])
    return markdown(["", *conditions], rows)


def claims(results: Results) -> list[str]:
    """A difference is clear if its mean over seeds is beyond one standard deviation."""
    rows = []
    for change, before, after, metric, paper in CLAIMS:
        if before in results and after in results:
            pairs = zip(results[before], results[after], strict=True)  # of one seed
            gains = np.array([(b[metric] - a[metric]) * in_points(metric) for a, b in pairs])
            mean, spread = gains.mean(), gains.std(ddof=1)
            sign = "agrees" if mean * paper > 0 else "disagrees"
            verdict = sign if abs(mean) > spread else f"unclear ({sign})"
            rows.append([change, metric, f"{paper:+.1f}", f"{mean:+.1f} ± {spread:.1f}", verdict])
    verdicts = [row[-1] for row in rows]
    clear = verdicts.count("agrees") + verdicts.count("disagrees")
    lines = markdown(["change", "metric", "paper", "here", "sign"], rows, "llrrl")
    return [*lines, "", f"{verdicts.count('agrees')} of {clear} clear differences agree."]


def norm_rescoring(results: dict[str, Results]) -> list[str]:
    """The gain of one stored norm per document over plain rescoring, by task and scoring."""
    tasks = {"WordNet": ("lexicons", ""), "FOLDOC": ("lexicons", "FOLDOC ")}
    tasks["docstrings"] = ("docstrings", "")
    rows = []
    for name, (study, prefix) in tasks.items():
        runs = results[study]["QNorm TempAggMRL"]
        exponents = ", ".join(f"{run['chosen exponent']:g}" for run in runs)
        for scoring, how in (("", "as trained"), ("chosen ", exponents)):
            for label in ("binary rescored", "quarter binary rescored"):
                keys = [f"{scoring}{prefix}{key}" for key in ("full", label, f"{label} with norm")]
                full, plain, normed = (np.array([100 * run[key] for run in runs]) for key in keys)
                gains = ", ".join(f"{gain:+.1f}" for gain in normed - plain)
                means = [f"{x.mean():.1f}" for x in (full, plain, normed)]
                rows.append([name, how, label, *means, gains])
    head = ["task", "document exponent", "", "full", "rescored", "with norm", "gain by seed"]
    return markdown(head, rows, "lllrrrl")


def on_lexicons(name: str, condition: str, seed: int, data: Lexicons) -> Figures:
    torch.manual_seed(seed)
    model = MODELS[name].load()
    is_mixed = condition.startswith("mixed")
    rows = concatenate_datasets(list(data.train.values())) if is_mixed else data.train
    if condition != "pretrained":
        train(model, CONDITIONS[condition](model), rows, seed, **MODELS[name].how)
    return measure(model, data, seed)


def on_docstrings(name: str, condition: str, seed: int, task: DocstringTask) -> Figures:
    """Data where the norm has something to learn: boilerplate as explicit negatives."""
    torch.manual_seed(seed)
    model = MODELS[name].load()
    rows = task.train.triplets(1, seed)
    train(model, CONDITIONS[condition](model), rows, seed, **MODELS[name].how)
    return scorings(model, task.dev, {"": task.test})


def run(name: str, record: Path, cache: Path | None) -> dict[str, Results]:
    """Both studies of a model; what ``record`` holds already is not done again."""
    results: dict[str, Results] = {"lexicons": {}, "docstrings": {}}
    if record.exists():
        results = json.loads(record.read_text())

    def keep(
        study: str, condition: str, seed: int, measure: Callable[..., Figures], x: Any
    ) -> None:
        runs = results[study].setdefault(condition, [])
        if len(runs) <= seed:
            runs.append(measure(name, condition, seed, x))
            record.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{name}, seed {seed}, {condition}: {runs[-1]['full']:.3f}", flush=True)

    for seed in range(3):
        data = build(cache=cache, seed=seed, **MODELS[name].sizes)
        for condition in ["pretrained", *MODELS[name].conditions]:
            keep("lexicons", condition, seed, on_lexicons, data)
        keep("docstrings", "QNorm TempAggMRL", seed, on_docstrings, build_docstring_task(seed=seed))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("runs/temperature"))
    parser.add_argument("--cache", type=Path, default=None, help="where the data is unpacked")
    arguments = parser.parse_args()
    prepare_process()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.models.split(","):
        results = run(name, arguments.output / f"{name}.json", arguments.cache)
        found = results["lexicons"]
        tables = (table(found), claims(found), norm_rescoring(results))
        print("\n\n".join([f"## {name}", *("\n".join(lines) for lines in tables)]), flush=True)


if __name__ == "__main__":
    main()

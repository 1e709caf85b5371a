"""Does the norm of a document tell answers from boilerplate? all-MiniLM trained with cosine and
with QNorm.

    pip install ".[dev]"
    python examples/norms.py --output runs/norms

Both models train on the API docs of this Python environment, with parameter lists, references and
examples as explicit negatives, and are measured on packages that they were not trained on. The
control is the pretrained model and a classifier that sees only length and punctuation. The picture
shows the norms of answers and of boilerplate.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from _data import DocstringTask, build_docstring_task, bundled_minilm
from benchmarks.data.surface import SurfacePrior
from numpy.typing import NDArray
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sklearn.metrics import roc_auc_score

import st_magnitude as stm
from st_magnitude import geometry
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.task import EncodedTask, best_documents
from st_magnitude.judge import judge, norm_warning
from st_magnitude.result import Table, to_plain

ENCODE = {"batch_size": 64, "before_normalize": True}
LOSSES = {"cosine": stm.CosineRankingLoss, "qnorm": stm.QNormRankingLoss}
ROWS = {
    "nDCG@10, scored as trained": "matched",
    "nDCG@10, scored by cosine": "cosine",
    "boilerplate among the top 10": "boilerplate",
    "Cohen's d of norms, answers - boilerplate": "d",
    "AUC for 'answers a query'": "auc",
    "index halved: answers kept": "kept",
    "nDCG@10 of that half": "half",
}


def measure(
    encoded: EncodedTask, similarity: stm.Similarity, tells: NDArray[np.float64]
) -> dict[str, Any]:
    """The figures of one search, and of what tells answers from boilerplate: a norm, (m,)."""
    answers = encoded.data.is_relevant  # (m,)
    half = tells >= np.median(tells)
    (found,) = encoded.searches([similarity], 10)
    kept = np.flatnonzero(half)
    (smaller,) = best_documents(encoded.queries, encoded.documents[kept], [similarity], 10)
    columns, scores = (x.numpy() for x in smaller)
    return {
        "matched": found.ndcg,
        "boilerplate": float((~answers)[found.columns].mean()),
        "auc": roc_auc_score(answers, tells),
        "kept": float(half[answers].mean()),
        "half": Ranking(encoded.data, encoded.query_ids, kept[columns], scores).ndcg,
    }


def with_norms(encoded: EncodedTask, similarity: stm.Similarity) -> dict[str, Any]:
    norms, answers = geometry.norms(encoded.documents), encoded.data.is_relevant
    found = measure(encoded, similarity, norms)
    found["cosine"] = encoded.sweep([1.0])[1.0].ndcg
    found["d"] = geometry.cohens_d(norms[answers], norms[~answers])
    return {**found, "norms": norms}


def surface_control(task: DocstringTask, model: SentenceTransformer) -> dict[str, Any]:
    """The model by cosine, plus the log-probability of a classifier, whose weight dev chooses."""
    prior = SurfacePrior(task.train)
    weight = prior.chosen((stm.encode(model, task.dev, **ENCODE), task.dev))
    added = prior.added(stm.encode(model, task.test, **ENCODE), task.test, weight)
    return measure(added, stm.DOT, added.documents[:, -1].double().numpy())


def train(
    model: SentenceTransformer, name: str, task: DocstringTask, folder: Path, steps: int, seed: int
) -> None:
    """Trains a model on triplets of a query, its answer and a piece of its own boilerplate, and
    saves it."""
    stm.prepare(model, name)
    arguments = SentenceTransformerTrainingArguments(
        str(folder / "checkpoints"),
        max_steps=steps,
        per_device_train_batch_size=32,
        learning_rate=1e-4,
        warmup_steps=max(1, steps // 10),
        seed=seed,
        batch_sampler="no_duplicates",  # a text twice in a batch would be its own negative
        dataloader_drop_last=True,
        save_strategy="no",
        report_to=[],
        logging_steps=10**6,
    )
    rows = task.train.triplets(1, seed=seed)
    SentenceTransformerTrainer(
        model, arguments, train_dataset=rows, loss=LOSSES[name](model)
    ).train()
    stm.export(model, folder, overwrite=True)


def plot(measured: dict[str, dict[str, Any]], answers: NDArray[np.bool_], path: Path) -> None:
    """Histograms of document norms, answers against boilerplate, one panel for each model."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1, len(measured), figsize=(12, 3.4), sharey=True, layout="constrained"
    )
    for axis, (name, m) in zip(axes, measured.items(), strict=True):
        bins = np.linspace(m["norms"].min(), m["norms"].max(), 41).tolist()
        looks: dict[str, Any] = {"bins": bins, "alpha": 0.65}
        never, ever = m["norms"][~answers], m["norms"][answers]
        axis.hist(never, color="#9a9a9a", label="boilerplate, never relevant", **looks)
        axis.hist(ever, color="#1f6fb4", label="answers a query", **looks)
        axis.set_title(f"{name}: d = {m['d']:+.2f}, AUC = {m['auc']:.2f}", fontsize=10)
        axis.set_xlabel("norm of the document embedding")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("documents")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/norms"))
    parser.add_argument("--steps", type=int, default=20, help="of each of the two models")
    parser.add_argument("--train-queries", type=int, default=1000)
    parser.add_argument("--test-queries", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    output = options.output

    def fresh() -> SentenceTransformer:
        model = SentenceTransformer(bundled_minilm())
        model.max_seq_length = 32
        return model

    task = build_docstring_task(
        train_queries=options.train_queries,
        test_queries=options.test_queries,
        max_train_files=40,
        seed=options.seed,
    )
    task.test.save(output / "data", "test")
    pretrained = fresh()
    encoded = stm.encode(pretrained, task.test, **ENCODE)
    measured = {
        "pretrained": with_norms(encoded, stm.COSINE),
        "surface": surface_control(task, pretrained),
    }
    for name in LOSSES:
        model = fresh()
        train(model, name, task, output / name, options.steps, options.seed)
        measured[name] = with_norms(
            stm.encode(model, task.test, **ENCODE), stm.Similarity.named(name)
        )

    means = {
        name: {key: float(np.mean(value)) for key, value in m.items()}
        for name, m in measured.items()
    }
    rows = [
        [row, *(f"{m[key]:.3f}" if key in m else "" for m in means.values())]
        for row, key in ROWS.items()
    ]
    print(Table(["", *means], rows).to_text())
    print("surface: pretrained, plus a classifier on length and punctuation in place of the norm")
    pairs = {
        "cosine - pretrained": ("cosine", "pretrained", "matched"),
        "qnorm - cosine": ("qnorm", "cosine", "matched"),
        "surface - cosine": ("surface", "cosine", "matched"),
        "half of the index: qnorm - cosine": ("qnorm", "cosine", "half"),
        "half of the index: qnorm - surface": ("qnorm", "surface", "half"),
    }
    differences = {
        name: judge(measured[a][key] - measured[b][key]) for name, (a, b, key) in pairs.items()
    }
    said = [[name, str(difference)] for name, difference in differences.items()]
    print(Table(["nDCG@10, paired over queries", "difference"], said).to_text())
    answers = encoded.data.is_relevant
    error = geometry.cohens_d_error(means["qnorm"]["d"], answers.sum(), (~answers).sum())
    if warning := norm_warning(means["qnorm"]["d"], error, means["pretrained"]["d"]):
        print(warning)
    plot({name: m for name, m in measured.items() if "norms" in m}, answers, output / "norms.png")
    figures = {"models": means, "differences": differences, "packages": task.packages}
    (output / "results.json").write_text(json.dumps(to_plain(figures), indent=2) + "\n")
    print(f"saved {output / 'cosine'}, {output / 'qnorm'} and {output / 'norms.png'}")


if __name__ == "__main__":
    main()

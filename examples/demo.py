"""Teach a retriever the API docs of your own Python environment, once with cosine and once with
QNorm.

    make demo                                  # or:
    pip install -e ".[dev]"
    python examples/demo.py --output runs/demo

The docstrings of the installed packages are the data. Descriptions answer queries. Parameter lists,
references and examples never do: they are explicit negatives in training and distractors in the
index. Both models are measured on packages that neither of them was trained on, next to a
classifier that sees only the surface of a text.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _data import DocstringTask, build_docstring_task, bundled_minilm, surface_features
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import st_magnitude as stm
from st_magnitude import geometry
from st_magnitude.data.task import EncodedTask
from st_magnitude.evaluation.metrics import judge
from st_magnitude.result import Table

ENCODE = {"batch_size": 64, "before_normalize": True}
LOSSES = {"cosine": stm.CosineRankingLoss, "qnorm": stm.QNormRankingLoss}
ROWS = {
    "nDCG@10, scored as trained": "matched",
    "nDCG@10, scored by cosine": "cosine",
    "document exponent, chosen on dev": "exponent",
    "nDCG@10 at that exponent": "chosen",
    "boilerplate among the top 10": "boilerplate",
    "Cohen's d of norms, answers - boilerplate": "d",
    "AUC of the norm for 'answers a query'": "auc",
    "index halved by norm: answers kept": "kept",
    "nDCG@10 of that half": "half",
}


def measure(encoded: EncodedTask, matched: stm.Similarity, exponent: float) -> dict[str, Any]:
    """The figures of one model; those of nDCG@10 are arrays with a number for each query."""
    answers, norms = encoded.degrees > 0, geometry.norms(encoded.documents)  # (m,), (m,)
    larger_half = norms >= np.sort(norms)[len(norms) // 2]
    calibrated = stm.Similarity(1.0, exponent)
    top = encoded.top(calibrated)
    return {
        "matched": encoded.ndcg(encoded.top(matched)),
        "cosine": encoded.ndcg(encoded.top(stm.COSINE)),
        "exponent": exponent,
        "chosen": encoded.ndcg(top),
        "boilerplate": float((~answers)[top.numpy()].mean()),
        "d": geometry.cohens_d(norms[answers], norms[~answers]),
        "auc": roc_auc_score(answers, norms),
        "kept": float(larger_half[answers].mean()),
        "half": encoded.ndcg(encoded.top(calibrated, among=larger_half)),
        "norms": norms,
    }


def surface_control(task: DocstringTask, encoded: dict[str, EncodedTask]) -> dict[str, Any]:
    """The figures of pretrained cosine + weight · log P(answer), by a classifier on length and
    punctuation; dev chooses the weight."""
    answers = set().union(*task.train.relevant.values())
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    classifier.fit(
        surface_features(list(task.train.corpus.values())),
        [d in answers for d in task.train.corpus],
    )

    def with_prior(split: str, weight: float) -> EncodedTask:
        """Cosine + weight · prior is the inner product of vectors with one more dimension."""
        data = getattr(task, split)
        features = surface_features([data.corpus[d] for d in data.document_ids])
        log_prior = torch.from_numpy(classifier.predict_log_proba(features)[:, 1:])  # (m, 1)
        queries = stm.COSINE.query(encoded[split].queries)
        queries = torch.nn.functional.pad(queries, (0, 1), value=1.0)
        documents = stm.COSINE.document(encoded[split].documents)
        documents = torch.cat([documents, weight * log_prior.to(documents)], dim=1)
        return EncodedTask(queries, documents, encoded[split].columns)

    def dev_score(weight: float) -> float:
        augmented = with_prior("dev", weight)
        return augmented.ndcg(augmented.top(stm.DOT)).mean()

    weight = max((0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6), key=dev_score)
    augmented = with_prior("test", weight)
    top = augmented.top(stm.DOT)
    is_answer = augmented.degrees > 0
    prior = augmented.documents[:, -1].numpy()  # (m,)
    return {
        "matched": augmented.ndcg(top),
        "boilerplate": float((~is_answer)[top.numpy()].mean()),
        "auc": roc_auc_score(is_answer, prior),
        "kept": float((prior >= np.sort(prior)[len(prior) // 2])[is_answer].mean()),
    }


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
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    rows = task.train.triplets(1, seed=seed)
    SentenceTransformerTrainer(
        model, arguments, train_dataset=rows, loss=LOSSES[name](model)
    ).train()
    stm.export(model, folder, overwrite=True)


def plot(measured: dict[str, dict[str, Any]], answers: Any, path: Path) -> None:
    """Histograms of document norms, answers against boilerplate, one panel for each model."""
    from matplotlib import pyplot as plt

    measured = {name: m for name, m in measured.items() if "norms" in m}
    figure, axes = plt.subplots(
        1, len(measured), figsize=(12, 3.4), sharey=True, layout="constrained"
    )
    for axis, (name, m) in zip(axes, measured.items(), strict=True):
        bins = np.linspace(m["norms"].min(), m["norms"].max(), 41).tolist()
        axis.hist(
            m["norms"][~answers],
            bins=bins,
            alpha=0.65,
            color="#9a9a9a",
            label="boilerplate, never relevant",
        )
        axis.hist(
            m["norms"][answers], bins=bins, alpha=0.65, color="#1f6fb4", label="answers a query"
        )
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
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), help="new folder for models and figures"
    )
    parser.add_argument(
        "--model", help="SentenceTransformer to start from; default: all-MiniLM-L6-v2 from PyPI"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="training steps of each of the two models"
    )
    parser.add_argument("--train-queries", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    output, began = options.output, time.perf_counter()
    if output.exists() and any(output.iterdir()):
        parser.error(f"{output} is not empty: choose another --output, or remove it.")

    def say(text: str) -> None:
        print(f"\n[{time.perf_counter() - began:4.0f} s] {text}", flush=True)

    def fresh() -> SentenceTransformer:
        model = SentenceTransformer(options.model or bundled_minilm())
        model.max_seq_length = 32
        return model

    say("Reading the docstrings of this environment (parsed, never imported)")
    sizes = {"train_queries": options.train_queries, "test_queries": 300, "max_train_files": 40}
    task = build_docstring_task(**sizes, seed=options.seed)
    for name, data in (("train", task.train), ("dev", task.dev), ("test", task.test)):
        print(f"{name:5} {data}")
    task.test.save(output / "data", "test")
    task.dev.save(output / "dev-data", "dev")

    say("Encoding with the pretrained model")
    untrained = fresh()
    encoded = {
        name: data.encode(untrained, **ENCODE)
        for name, data in (("dev", task.dev), ("test", task.test))
    }
    measured = {"pretrained": measure(encoded["test"], stm.COSINE, 1.0)}
    measured["surface"] = surface_control(task, encoded)
    for name in LOSSES:
        say(f"Training with {name}: {options.steps} steps of 32 queries")
        model, exponent = fresh(), 1.0
        train(model, name, task, output / name, options.steps, options.seed)
        if name == "qnorm":
            exponent = stm.calibrate_exponent(
                model, task.dev, exponents=np.linspace(0, 1, 5)
            ).highest
        measured[name] = measure(
            task.test.encode(model, **ENCODE), stm.Similarity.named(name), exponent
        )

    say("Results on packages that were never trained on")
    means = {
        name: {key: float(np.mean(value)) for key, value in m.items()}
        for name, m in measured.items()
    }
    rows = [
        [row, *(f"{m[key]:.3f}" if key in m else "" for m in means.values())]
        for row, key in ROWS.items()
    ]
    print(Table(["", *means], rows).to_text())
    print(
        "surface: pretrained, plus a classifier on length and punctuation, whose\n"
        "probability takes the place of the norm. It trains no encoder."
    )
    cosine, qnorm = measured["cosine"], measured["qnorm"]
    compared = {
        "cosine - pretrained": (cosine["chosen"], measured["pretrained"]["chosen"]),
        "half of the index: qnorm - cosine": (qnorm["half"], cosine["half"]),
        "qnorm as trained - cosine": (qnorm["matched"], cosine["matched"]),
        f"qnorm at exponent {qnorm['exponent']:g} - cosine": (qnorm["chosen"], cosine["matched"]),
        "surface - cosine": (measured["surface"]["matched"], cosine["matched"]),
    }
    differences = {name: judge(a - b).gain for name, (a, b) in compared.items()}
    print(
        Table(
            ["nDCG@10, paired over queries", "difference"],
            [list(item) for item in differences.items()],
        ).to_text()
    )
    is_answer = encoded["test"].degrees > 0
    error = geometry.cohens_d_error(qnorm["d"], is_answer.sum(), (~is_answer).sum())
    if warning := geometry.norm_warning(qnorm["d"], error, measured["pretrained"]["d"]):
        print(warning)
    plot(measured, is_answer, output / "norms.png")

    say("Scoring the saved model with mteb in a fresh process")
    command = ["mteb", str(output / "qnorm"), str(output / "data"), "--json"]
    scored = subprocess.run(
        [sys.executable, "-m", "st_magnitude", *command], capture_output=True, text=True, check=True
    )
    (there,) = json.loads(scored.stdout)["scores"].values()
    print(f"  nDCG@10 here {means['qnorm']['matched']:.4f}, mteb {there:.4f}")
    if abs(there - means["qnorm"]["matched"]) > 1e-3:
        raise SystemExit("The saved model scores differently in a fresh process.")
    figures = {
        "models": means,
        "differences": differences,
    }
    figures |= {
        "mteb": there,
        "seed": options.seed,
        "steps": options.steps,
        "packages": task.packages,
    }
    (output / "results.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    say(
        f"Done: models in {output / 'cosine'} and {output / 'qnorm'}, {output / 'norms.png'},"
        f" {output / 'results.json'}"
    )


if __name__ == "__main__":
    main()

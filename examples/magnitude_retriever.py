"""Train a retriever whose norm carries information, from the data to a saved model.

    pip install ".[dev]"
    python examples/magnitude_retriever.py --steps 30

The data are the API docs of this Python environment. The script trains with explicit negatives,
follows the metrics on validation data, chooses the document exponent there, saves the model and
loads it again. The picture shows the norms of the test documents before and after training: those
that answer a query, and those that never do.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from _data import build_docstring_task, bundled_minilm
from numpy.typing import NDArray
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sklearn.metrics import roc_auc_score

import st_magnitude as stm
from st_magnitude import geometry
from st_magnitude.data.task import EncodedTask
from st_magnitude.evaluation import MagnitudeEvaluator
from st_magnitude.judge import norm_warning


def report(
    name: str,
    encoded: EncodedTask,
    answers: NDArray[np.bool_],
    similarity: stm.Similarity,
    before: float = math.nan,
) -> float:
    """Prints how well a model ranks, and how its norms tell answers from boilerplate: their d."""
    norms = geometry.norms(encoded.documents)  # (m,)
    larger_half, d = norms > np.median(norms), geometry.cohens_d(norms[answers], norms[~answers])
    error = geometry.cohens_d_error(d, answers.sum(), (~answers).sum())
    print(
        f"{name}: nDCG@10 {encoded.searches([similarity])[0].mean:.3f}, "
        f"Cohen's d {d:+.2f}, "
        f"AUC of the norm {roc_auc_score(answers, norms):.3f}, "
        f"half of the index, by norm, keeps {larger_half[answers].mean():.0%} of the answers"
    )
    if warning := norm_warning(d, error, before):
        print(warning)
    return d


def plot(tasks: dict[str, EncodedTask], answers: NDArray[np.bool_], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(tasks), figsize=(8, 3.4), sharey=True, layout="constrained")
    for axis, (name, encoded) in zip(axes, tasks.items(), strict=True):
        norms = geometry.norms(encoded.documents)
        bins = np.linspace(norms.min(), norms.max(), 41)
        axis.hist(
            norms[~answers], bins, alpha=0.65, color="#9a9a9a", label="boilerplate, never relevant"
        )
        axis.hist(norms[answers], bins, alpha=0.65, color="#1f6fb4", label="answers a query")
        axis.set(title=name, xlabel="norm of the document embedding")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("documents")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--data",
        type=Path,
        help="BEIR folder with qrels of train, dev and test, instead of the docs",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/magnitude_retriever"))
    arguments = parser.parse_args()
    if arguments.data:
        splits = stm.load_splits(arguments.data)
        train, dev, test = splits["train"], splits["dev"], splits["test"]
    else:
        task = build_docstring_task(
            train_queries=1000, dev_queries=100, test_queries=200, cache="runs/docstrings"
        )
        train, dev, test = task.train, task.dev, task.test

    # removes Normalize, so norms survive
    model = stm.prepare(SentenceTransformer(bundled_minilm()), "qnorm")
    model.max_seq_length = 64
    relevant = [ids for part in (train, dev, test) for ids in part.relevant.values()]
    of_all_splits = set().union(*relevant)
    answers = np.isin(test.document_ids, list(of_all_splits))
    pretrained = stm.encode(model, test)

    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(arguments.output / "checkpoints"),
            max_steps=arguments.steps,
            per_device_train_batch_size=16,
            learning_rate=5e-5,
            warmup_steps=0.1,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=max(1, arguments.steps // 2),
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=train.triplets(num_negatives=1),
        loss=stm.QNormRankingLoss(model),
        evaluator=MagnitudeEvaluator(
            dev.queries, dev.corpus, dev.relevant, also_relevant=of_all_splits, name="dev"
        ),
    )
    trainer.train()

    curve = stm.calibrate_exponent(model, dev)
    print(curve)
    trained = stm.encode(model, test)
    before = report("pretrained", pretrained, answers, stm.COSINE)
    report("trained", trained, answers, curve.best_similarity, before)
    picture = arguments.output / "magnitude_retriever.png"
    plot({"pretrained": pretrained, f"QNorm, {arguments.steps} steps": trained}, answers, picture)

    stm.prepare(model, curve.best_similarity)
    stm.export(model, arguments.output / "model")
    reloaded = stm.load(arguments.output / "model")
    evaluator = MagnitudeEvaluator(
        test.queries, test.corpus, test.relevant, also_relevant=of_all_splits, name="test"
    )
    for name, value in evaluator(reloaded).items():
        print(f"{name:30} {value:.4f}")
    print(f"saved {arguments.output / 'model'} and {picture}")


if __name__ == "__main__":
    main()

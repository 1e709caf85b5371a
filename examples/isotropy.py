"""Train embeddings that use more directions: InfoNCE with and without SIGReg.

    pip install ".[dev]"
    python examples/isotropy.py --steps 30 --weight 0.05

The script trains all-MiniLM twice on the API docs of this Python environment. The picture shows the
spectrum of the test documents' embeddings (the share of the variance in each principal component,
divided by that of the pretrained model) and the cosines of pairs of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from _data import build_docstring_task, bundled_minilm
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sklearn.decomposition import PCA

import st_magnitude as stm
from st_magnitude import geometry
from st_magnitude.evaluation import MagnitudeEvaluator


def fresh() -> SentenceTransformer:
    model = SentenceTransformer(bundled_minilm())
    model.max_seq_length = 32
    return model


def plot(embeddings: dict[str, np.ndarray], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    before = PCA().fit(embeddings["pretrained"]).explained_variance_ratio_  # decreasing
    kept = int((before.cumsum() < 0.95).sum())
    for (name, x), colour in zip(
        embeddings.items(), ("#6f757d", "#c8500f", "#1f6fb4"), strict=True
    ):
        shares = PCA().fit(x).explained_variance_ratio_[:kept]
        left.plot(np.arange(1, kept + 1), shares / before[:kept], color=colour, label=name)
        cosines = (x @ x.T)[np.triu_indices(len(x), k=1)]  # rows have norm 1
        right.hist(
            cosines,
            np.linspace(-0.4, 1, 71),
            density=True,
            histtype="stepfilled" if name == "pretrained" else "step",
            color=colour,
            alpha=0.4 if name == "pretrained" else 1,
            linewidth=1.5,
        )
        right.axvline(cosines.mean(), color=colour, linestyle="--", linewidth=1)
    left.set(
        xscale="log",
        xlabel="principal component",
        ylabel="share of the variance\n(1: as in the pretrained model)",
    )
    left.legend(frameon=False)
    right.set(xlabel="cosine of two documents (dashed: mean)", ylabel="density")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--weight", type=float, default=0.05, help="weight of SIGReg")
    parser.add_argument(
        "--data", type=Path, help="BEIR folder with qrels of train and test, instead of the docs"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/isotropy"))
    arguments = parser.parse_args()
    if arguments.data:
        splits = stm.load_splits(arguments.data)
        train, test = splits["train"], splits["test"]
    else:
        task = build_docstring_task(
            train_queries=1000, dev_queries=100, test_queries=200, cache="runs/docstrings"
        )
        train, test = task.train, task.test

    models = {"pretrained": fresh(), "InfoNCE": fresh(), "InfoNCE and SIGReg": fresh()}
    losses = {
        "InfoNCE": stm.CosineRankingLoss(models["InfoNCE"]),
        "InfoNCE and SIGReg": stm.SIGRegInfoNCE(
            models["InfoNCE and SIGReg"], weight=arguments.weight
        ),
    }
    for name, loss in losses.items():
        args = SentenceTransformerTrainingArguments(
            output_dir=str(arguments.output / "checkpoints"),
            max_steps=arguments.steps,
            per_device_train_batch_size=32,
            learning_rate=5e-5,
            warmup_steps=0.1,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
        )
        SentenceTransformerTrainer(
            models[name], args, train.triplets(num_negatives=0), loss=loss
        ).train()

    evaluator = MagnitudeEvaluator(test.queries, test.corpus, test.relevant)
    embeddings = {}
    for name, model in models.items():
        x = embeddings[name] = model.encode_document(list(test.corpus.values()))  # (m, D)
        print(
            f"{name:20} nDCG@10 {evaluator(model)['matched_ndcg@10']:.3f}, mean cosine"
            f" {geometry.mean_cosine(x):.3f}, IsoScore {geometry.isoscore(x):.3f},"
            f" {geometry.intrinsic_dimension(x)} components explain 95 % of the variance"
        )
    models["InfoNCE and SIGReg"].save_pretrained(str(arguments.output / "model"))
    plot(embeddings, arguments.output / "isotropy.png")
    print(f"saved {arguments.output / 'model'} and {arguments.output / 'isotropy.png'}")


if __name__ == "__main__":
    main()

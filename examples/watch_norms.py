"""Watch how cosine training changes norms, and two ways to intervene: cut_init and
attach_grad_scale.

    pip install ".[dev]"
    python examples/watch_norms.py --steps 60

The script trains the word vectors of all-MiniLM three times with SGD on the API docs of this Python
environment, which takes seconds. The embedding of a text is the mean of its word vectors. A
NormMonitor records each run, and its picture shows norms, lr / norm², and the geometry of each
batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from _data import build_docstring_task, bundled_minilm
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

import st_magnitude as stm

PANELS = {
    "norm_mean": "mean norm",
    "norm_cv": "standard deviation / mean of the norms",
    "norm_p95": "95 % of the norms are below",
    "effective_lr": "learning rate / squared mean norm",
    "isoscore": "IsoScore",
    "mean_cosine": "mean cosine of two documents",
}
RUNS = {"unchanged": "SGD", "cut_init": "after cut_init", "grad_scale": "with GradScale"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=10.0)
    parser.add_argument(
        "--data", type=Path, help="BEIR folder with qrels of train, instead of the docs"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/watch_norms"))
    arguments = parser.parse_args()
    if arguments.data:
        train = stm.load_splits(arguments.data)["train"]
    else:
        task = build_docstring_task(
            train_queries=1000, dev_queries=100, test_queries=200, cache="runs/docstrings"
        )
        train = task.train

    minilm = SentenceTransformer(bundled_minilm())
    words = minilm[0].model.get_input_embeddings().weight.detach().cpu().numpy()  # (vocabulary, D)
    rows: list[dict[str, float]] = []
    for run in RUNS:
        table = StaticEmbedding(minilm.tokenizer, embedding_weights=words.copy())
        model = SentenceTransformer(modules=[table])
        if run == "cut_init":
            stm.cut_init(model, c=3.0, where="all")
        elif run == "grad_scale":
            stm.attach_grad_scale(model, power=1.0)
        loss = stm.CosineRankingLoss(model)
        monitor = stm.NormMonitor(loss, every=2)
        trainer = SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(
                output_dir=str(arguments.output / "checkpoints"),
                max_steps=arguments.steps,
                per_device_train_batch_size=64,
                learning_rate=arguments.learning_rate,
                lr_scheduler_type="constant",
                # the theory describes its steps; Adam's do not follow the size of the gradient
                optim="sgd",
                logging_steps=min(10, arguments.steps),
                save_strategy="no",
                report_to=[],
            ),
            train_dataset=train.triplets(num_negatives=0),
            loss=loss,
            callbacks=[monitor],
        )
        trainer.train()
        model.save_pretrained(str(arguments.output / run))
        norm, rate = (
            [row[f"document_{key}"] for row in monitor.rows]
            for key in ("norm_mean", "effective_lr")
        )
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        print(
            f"{run}: mean norm {norm[0]:.2f} -> {norm[-1]:.2f}, lr / norm² {rate[0]:.0f} ->"
            f" {rate[-1]:.0f}, loss of the last steps {losses[-1]:.3f}"
        )
        # Queries look alike, so the picture shows documents only: one line per run.
        rows += [
            {
                key.replace("document", run): value
                for key, value in row.items()
                if key.startswith(("step", "document"))
            }
            for row in monitor.rows
        ]

    table = pd.DataFrame(rows)
    table.to_csv(arguments.output / "watch_norms.csv", index=False)
    title = "documents, word vectors trained with cosine and SGD"
    figure, axes = plt.subplots(2, 3, figsize=(11, 5.6), sharex=True, layout="constrained")
    for axis, (panel, name) in zip(axes.flat, PANELS.items(), strict=True):
        lines = table.set_index("step").filter(regex=f"_{panel}$")
        is_rate = panel == "effective_lr"
        lines.plot(ax=axis, title=name, legend=False, logy=is_rate)
        if not is_rate:
            axis.set_ylim(0)
    figure.legend(
        axis.get_lines(), RUNS.values(), loc="outside lower center", ncols=3, frameon=False
    )
    figure.suptitle(title)
    figure.savefig(arguments.output / "watch_norms.png", dpi=150)
    print(f"saved {arguments.output / 'watch_norms.png'}")


if __name__ == "__main__":
    main()

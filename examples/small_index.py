"""Train for a small index: several temperatures and prefixes in one loss, and what each way of
storing vectors keeps.

    pip install ".[dev]"
    python examples/small_index.py --steps 20

The script trains all-MiniLM twice on the API docs of this Python environment, once at a single low
temperature and once with TempAggMRLLoss. It measures prefixes in float32, int8 and bits. The
picture shows nDCG@10 against the bytes that each document takes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from _data import build_docstring_task, bundled_minilm
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)

import st_magnitude as stm
from st_magnitude.evaluation import CompressionEvaluator
from st_magnitude.evaluation.compression import CompressionCell, summary

DIMS = (384, 192, 96, 48)


def fresh() -> SentenceTransformer:
    model = SentenceTransformer(bundled_minilm())
    model.max_seq_length = 32
    return model


def plot(cells: dict[str, list[CompressionCell]], path: Path) -> None:
    """Two lines for each model: its prefixes in float32, and their bits, rescored."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    looks = {("float32", "none"): ("o-", "float32"), ("binary", "query"): ("^--", "bits, rescored")}
    for (name, own), colour in zip(cells.items(), ("#6f757d", "#c8500f", "#1f6fb4"), strict=True):
        axis.plot([], [], color=colour, linewidth=3, label=name)
        for (precision, rescoring), (look, _) in looks.items():
            line = [
                cell for cell in own if (cell.precision, cell.rescoring) == (precision, rescoring)
            ]
            axis.plot(
                [cell.bytes_per_document for cell in line],
                [cell.ndcg for cell in line],
                look,
                color=colour,
            )
    for look, label in looks.values():
        axis.plot(
            [], [], look, color="#1d2127", label=f"{' / '.join(map(str, DIMS))} dims in {label}"
        )
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set(xlabel="bytes per document", ylabel="nDCG@10", ylim=0)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--temperature", type=float, default=0.03, help="temperature of the first model"
    )
    parser.add_argument(
        "--data", type=Path, help="BEIR folder with qrels of train and test, instead of the docs"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/small_index"))
    arguments = parser.parse_args()
    if arguments.data:
        splits = stm.load_splits(arguments.data)
        train, test = splits["train"], splits["test"]
    else:
        task = build_docstring_task(
            train_queries=1000, dev_queries=100, test_queries=200, cache="runs/docstrings"
        )
        train, test = task.train, task.test

    single = f"temperature {arguments.temperature:g}"
    models = {"pretrained": fresh(), single: fresh(), "TempAggMRL": fresh()}
    losses = {
        single: stm.CosineRankingLoss(models[single], scale=1 / arguments.temperature),
        "TempAggMRL": stm.TempAggMRLLoss(
            models["TempAggMRL"], dims=DIMS[:3], temperatures=(0.03, 0.06, 0.1)
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

    evaluator = CompressionEvaluator(test.queries, test.corpus, test.relevant, dims=DIMS)
    cells = {}
    for name, model in models.items():
        evaluator(model)
        cells[name] = evaluator.cells
        print(f"\n{name}\n{summary(evaluator.cells)}")
    models["TempAggMRL"].save_pretrained(str(arguments.output / "model"))
    plot(cells, arguments.output / "small_index.png")
    print(f"saved {arguments.output / 'model'} and {arguments.output / 'small_index.png'}")


if __name__ == "__main__":
    main()

"""What training does to norms that nobody sees, and two ways to interfere: cut_init and attach_grad_scale.

    pip install "st-magnitude[demo]"
    python examples/watch_norms.py --steps 40

Trains all-MiniLM three times by cosine on the API docs of this Python environment, with one NormMonitor that listens to
all runs. The picture is the monitor's own: norms before Normalize, lr / norm², and the geometry of each batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)

import st_magnitude as stm
from st_magnitude.data import load_beir
from st_magnitude.demo import bundled_minilm
from st_magnitude.docstrings import build_docstring_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--data", type=Path, help="a BEIR folder with qrels of train, in place of the docs")
    parser.add_argument("--output", type=Path, default=Path("runs/watch_norms"))
    arguments = parser.parse_args()
    if arguments.data:
        train = load_beir(arguments.data, "train")
    else:
        task = build_docstring_task(train_queries=1000, dev_queries=100, test_queries=200, cache="runs/docstrings")
        train = task.train

    monitor = stm.NormMonitor(every=2)
    for run in ("as it is", "cut_init", "grad_scale"):
        model = SentenceTransformer(bundled_minilm())
        model.max_seq_length = 32
        if run == "cut_init":
            print(stm.cut_init(model, c=3.0))
        elif run == "grad_scale":
            stm.attach_grad_scale(model, power=1.0)
        monitor.roles = (f"{run}: queries", run)  # names of the columns, so of the lines in the picture
        args = SentenceTransformerTrainingArguments(
            output_dir=str(arguments.output / "checkpoints"),
            max_steps=arguments.steps,
            per_device_train_batch_size=32,
            learning_rate=1e-4,
            warmup_steps=0.1,
            save_strategy="no",
            report_to=[],
        )
        trainer = SentenceTransformerTrainer(
            model, args, train.triplets(num_negatives=0), loss=stm.CosineRankingLoss(model), callbacks=[monitor]
        )
        trainer.train()
        model.save_pretrained(str(arguments.output / run.replace(" ", "_")))
        own = [row for row in monitor.rows if f"{run}_norm_mean" in row]
        norms = f"{own[0][f'{run}_norm_mean']:.2f} -> {own[-1][f'{run}_norm_mean']:.2f}"
        print(f"{run}: mean norm {norms}, lr / norm² {own[-1][f'{run}_effective_lr']:.1e} at the end")

    # Queries look alike: documents alone are easier to read.
    monitor.rows = [{key: value for key, value in row.items() if ": queries" not in key} for row in monitor.rows]
    monitor.plot(arguments.output / "watch_norms.png", title="documents, all-MiniLM trained by cosine")
    print(f"saved {arguments.output / 'watch_norms.png'}")


if __name__ == "__main__":
    main()

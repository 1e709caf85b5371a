"""A magnitude-aware retriever from start to finish, on the API docs of this Python environment.

    pip install "st-magnitude[demo]"
    python examples/magnitude_retriever.py --steps 30

Builds the data, trains with hard negatives, follows the metrics, chooses the document exponent, saves, and loads again.
"""

from __future__ import annotations

import argparse

from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)

import st_magnitude as stm
from st_magnitude.demo import bundled_minilm
from st_magnitude.docstrings import build_docstring_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", default="runs/example")
    arguments = parser.parse_args()

    task = build_docstring_task(train_queries=1000, dev_queries=100, test_queries=200)
    dev = (task.dev.queries, task.dev.corpus, task.dev.relevant_docs)

    model = stm.prepare(SentenceTransformer(bundled_minilm()), "qnorm")
    model.max_seq_length = 64
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=f"{arguments.output}/checkpoints",
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
        train_dataset=task.train.triplets(num_negatives=1),
        loss=stm.QNormRankingLoss(model),
        evaluator=stm.MagnitudeEvaluator(*dev, name="pandas"),
    )
    trainer.train()

    curve = stm.calibrate_exponent(model, *dev)
    print(curve)
    stm.prepare(model, curve.best_similarity)
    stm.export(model, f"{arguments.output}/model")

    reloaded = stm.load(f"{arguments.output}/model")
    test = stm.MagnitudeEvaluator(task.test.queries, task.test.corpus, task.test.relevant_docs, name="test")
    for name, value in test(reloaded).items():
        print(f"{name:30} {value:.4f}")


if __name__ == "__main__":
    main()

"""A magnitude-aware retriever from start to finish, on the API docs of this Python environment.

    pip install "st-magnitude[demo]"
    python examples/magnitude_retriever.py --steps 30

Builds the data, trains with hard negatives, follows the metrics, chooses the document exponent, saves, and loads again.
The picture: norms of test documents before and after, those that answer a query against those that never do.
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
from st_magnitude.commands.demo import build_docstring_task, bundled_minilm
from st_magnitude.commands.demo.run import encode, measure, plot_norms
from st_magnitude.corpus.beir import load_beir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--data", type=Path, help="a BEIR folder with qrels of train, dev and test, in place of the docs"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/magnitude_retriever"))
    arguments = parser.parse_args()
    if arguments.data:
        train, dev, test = (load_beir(arguments.data, split) for split in ("train", "dev", "test"))
    else:
        task = build_docstring_task(train_queries=1000, dev_queries=100, test_queries=200, cache="runs/docstrings")
        train, dev, test = task.train, task.dev, task.test

    model = stm.prepare(SentenceTransformer(bundled_minilm()), "qnorm")
    model.max_seq_length = 64
    before = measure(encode(model, test), stm.COSINE, exponent=1.0)
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
        evaluator=stm.MagnitudeEvaluator(dev.queries, dev.corpus, dev.relevant_docs, name="dev"),
    )
    trainer.train()

    curve = stm.calibrate_exponent(model, dev.queries, dev.corpus, dev.relevant_docs)
    print(curve)
    encoded = encode(model, test)
    after = measure(encoded, stm.QNORM, exponent=curve.best)
    picture = arguments.output / "magnitude_retriever.png"
    plot_norms({"pretrained": before, f"QNorm, {arguments.steps} steps": after}, encoded.answers, picture)
    for name, measured in (("pretrained", before), ("trained", after)):
        kept = f"half of the index, by norm, keeps {measured.relevant_kept:.0%} of the answers"
        score = f"nDCG@10 {measured.chosen.mean():.3f}"
        print(f"{name}: {score}, Cohen's d {measured.cohens_d:+.2f}, AUC of the norm {measured.auc:.3f}, {kept}")

    stm.prepare(model, curve.best_similarity)
    stm.export(model, arguments.output / "model")
    reloaded = stm.load(arguments.output / "model")
    evaluator = stm.MagnitudeEvaluator(test.queries, test.corpus, test.relevant_docs, name="test")
    for name, value in evaluator(reloaded).items():
        print(f"{name:30} {value:.4f}")
    print(f"saved {arguments.output / 'model'} and {picture}")


if __name__ == "__main__":
    main()

"""Fine-tunes an encoder on a file of pairs, measures it before and after, saves it and loads it.

    python examples/train.py

It reads pairs.csv, which has the columns query and document, or text and category.
"""

from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments

import st_magnitude as stm
from st_magnitude.evaluation import MagnitudeEvaluator
from st_magnitude.judge import judge

splits = stm.load_splits("pairs.csv")  # train, dev and test, which share no query
rows = splits["train"].triplets(num_negatives=0)  # a Dataset: anchor, positive
dev = splits["dev"]

model = SentenceTransformer("sentence-transformers/all-MiniLM-L6-v2")
loss = stm.CosineRankingLoss(model, temperature=0.05)
evaluator = MagnitudeEvaluator(dev.queries, dev.corpus, dev.relevant, name="dev")
evaluator(model)
before = evaluator.per_query["matched"]  # nDCG@10 of each query

args = Arguments(
    "runs/train",
    num_train_epochs=1,
    per_device_train_batch_size=32,
    learning_rate=2e-5,
    warmup_steps=0.1,  # of all steps
    batch_sampler="no_duplicates",
    report_to=[],
)
trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=rows, loss=loss)
trainer.train()
stm.export(model, "my-minilm")  # with a model card

model = SentenceTransformer("my-minilm")
evaluator(model)
after = evaluator.per_query["matched"]
print(f"nDCG@10 on dev: {before.mean():.3f} before, {after.mean():.3f} after")
print(judge(after - before))

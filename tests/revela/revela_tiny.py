"""A retriever, a language model and a corpus: a few milliseconds a step."""

from pathlib import Path

from _tiny import ROWS, language_model, load_transformer, save_transformer
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments

from st_magnitude.revela import RevelaLoss, build_groups


def texts() -> list[str]:
    """24 short documents of three sentences each."""
    sentences = [f"{text}." for row in ROWS for text in row[:2]]
    of_three = [[sentences[(i + 7 * k) % len(sentences)] for k in range(3)] for i in range(24)]
    return [" ".join(chosen) for chosen in of_three]


def groups(size: int = 4) -> Dataset:
    return build_groups(texts(), group_size=size, max_words=12, min_words=1)


def retriever(folder: Path | str) -> SentenceTransformer:
    return load_transformer(save_transformer(folder))


def loss_for(model: SentenceTransformer, **options: object) -> RevelaLoss:
    lm, tokens = language_model()
    return RevelaLoss(model, lm, tokens, **options)


def arguments(folder: Path | str, **options: object) -> SentenceTransformerTrainingArguments:
    settings = {"per_device_train_batch_size": 2, "max_steps": 4}
    settings |= {"logging_steps": 1, "learning_rate": 1e-3}
    settings |= {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    return SentenceTransformerTrainingArguments(str(folder), **(settings | options))

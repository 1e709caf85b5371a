"""Questions with intents as retrieval: the name of the intent, or other questions of the intent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from datasets import Dataset

from st_magnitude.data.retrieval import RetrievalData

Questions = Sequence[tuple[str, str]]  # (question, intent)


def as_text(intent: str) -> str:
    """The name of an intent as a document.

    Example:
        >>> as_text("Refund_not_showing_up")
        'refund not showing up'
    """
    return intent.replace("_", " ").strip("?").lower()


def find_name(questions: Questions, intents: Sequence[str], name: str = "") -> RetrievalData:
    """Question -> name of its intent, among all names.

    Raises:
        DataError: If a question has an intent that is not among them.
    """
    queries = {f"q{i}": text for i, (text, _) in enumerate(questions)}
    corpus = {intent: as_text(intent) for intent in intents}
    relevant = {f"q{i}": {intent} for i, (_, intent) in enumerate(questions)}
    return RetrievalData(queries, corpus, relevant, name=name)


def find_questions(questions: Questions, among: Questions, name: str = "") -> RetrievalData:
    """Question -> all questions of its intent in another list."""
    members: dict[str, set[str]] = defaultdict(set)
    for i, (_, intent) in enumerate(among):
        members[intent].add(f"d{i}")
    queries = {f"q{i}": text for i, (text, _) in enumerate(questions)}
    corpus = {f"d{i}": text for i, (text, _) in enumerate(among)}
    relevant = {f"q{i}": members[intent] for i, (_, intent) in enumerate(questions)}
    return RetrievalData(queries, corpus, relevant, name=name)


def name_pairs(questions: Questions) -> Dataset:
    """Training pairs of a question and the name of its intent, with the intent as a class."""
    texts, intents = zip(*questions, strict=True)
    number = {intent: i for i, intent in enumerate(sorted(set(intents)))}
    columns = {
        "anchor": texts,
        "positive": [as_text(intent) for intent in intents],
        "label": [number[intent] for intent in intents],
    }
    return Dataset.from_dict(columns)


def question_pairs(questions: Questions, seed: int = 0) -> Dataset:
    """Training pairs of a question and another one of its intent, with the intent as a class.

    Every question is an anchor once and a positive once. An intent of one question has no pair.
    """
    rng = np.random.default_rng(seed)
    members: dict[str, list[str]] = defaultdict(list)
    for text, intent in questions:
        members[intent].append(text)
    rows = []
    for label, intent in enumerate(sorted(members)):
        texts = [members[intent][i] for i in rng.permutation(len(members[intent]))]
        if len(texts) > 1:
            following = texts[1:] + texts[:1]
            rows += [(a, b, label) for a, b in zip(texts, following, strict=True)]
    columns = zip(*rows, strict=True)
    return Dataset.from_dict(dict(zip(("anchor", "positive", "label"), columns, strict=True)))


def split_off(questions: Questions, number: int, seed: int = 0) -> tuple[Questions, Questions]:
    """All but ``number`` random questions, and these."""
    order = np.random.default_rng(seed).permutation(len(questions))
    return [questions[i] for i in order[number:]], [questions[i] for i in order[:number]]

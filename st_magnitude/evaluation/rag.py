"""Retrieval-augmented question answering: whether a better retriever gives a reader better answers."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from st_magnitude.result import Result, Table

__all__ = ["Reading", "exact_match", "normalize_answer", "rag_prompt", "read_answers", "token_f1"]

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """The text in lower case without punctuation, English articles and repeated blanks, as SQuAD normalises it.

    Example:
        >>> normalize_answer("The  U.S. Navy!")
        'us navy'
    """
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction equals one of the answers after `normalize_answer`, 0 otherwise.

    Example:
        >>> exact_match("the Eiffel Tower.", ["Eiffel tower", "Tour Eiffel"])
        1.0
    """
    return float(normalize_answer(prediction) in {normalize_answer(answer) for answer in answers})


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """The best F1 over the answers, computed on tokens after `normalize_answer`.

        F1 = 2 P R / (P + R),   P = common / tokens of the prediction,   R = common / tokens of the answer

    A token that occurs n times in both counts n times. Two texts without tokens have an F1 of 1.

    Example:
        >>> round(token_f1("in the city of Paris", ["Paris"]), 4)
        0.4
    """
    return max(_f1(normalize_answer(prediction).split(), normalize_answer(answer).split()) for answer in answers)


def _f1(predicted: list[str], wanted: list[str]) -> float:
    if not predicted or not wanted:
        return float(predicted == wanted)
    return 2 * (Counter(predicted) & Counter(wanted)).total() / (len(predicted) + len(wanted))


def rag_prompt(question: str, documents: Sequence[str]) -> str:
    """A prompt with the question before its context: a reader that truncates loses documents, not the question.

    Example:
        >>> print(rag_prompt("What barks?", ["Dogs bark.", "Cats purr."]))
        Question: What barks?
        Answer the question based on the following context:
        [1] Dogs bark. [2] Cats purr.
        Answer:

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, App. I.3.
    """
    context = " ".join(f"[{number}] {text}" for number, text in enumerate(documents, start=1))
    return f"Question: {question}\nAnswer the question based on the following context:\n{context}\nAnswer:"


@dataclass(frozen=True)
class Reading(Result):
    """The answers of a reader by question id, and `exact_match` and `token_f1` of every question, (n,).

    `st_magnitude.geometry.paired_bootstrap` compares the figures of two retrievers.
    """

    predictions: dict[str, str]
    exact: NDArray[np.float64]
    f1: NDArray[np.float64]

    def tables(self) -> list[Table | str]:
        """The means."""
        rows = [["exact match", float(self.exact.mean())], ["token F1", float(self.f1.mean())]]
        return [Table([f"{len(self.predictions):,} questions", "mean"], rows)]


def read_answers(
    reader: Callable[[list[str]], Sequence[str]],
    run: Mapping[str, Mapping[str, float]],
    questions: Mapping[str, str],
    corpus: Mapping[str, str],
    answers: Mapping[str, str | Sequence[str]],
    k: int = 5,
    prompt: Callable[[str, Sequence[str]], str] = rag_prompt,
) -> Reading:
    """Has a reader answer questions from the documents of a run, and compares its answers with the accepted ones.

    Args:
        reader: Function from all prompts to an answer for each, around a transformers pipeline, a local model or an
            API.
        run: Question id -> document id -> score, best first: of `dense_run`, `bm25_run` or their fusion.
        questions: Question id -> text.
        corpus: Document id -> text.
        answers: Question id -> the accepted answers, or the only one.
        k: Number of documents in a prompt; 5 in the paper.
        prompt: Function from a question and its documents, best first, to a prompt.

    Raises:
        ValueError: If a question has no answer, or the reader does not return one string for each prompt.

    Example:
        >>> questions, corpus = {"q": "What do bees make?"}, {"d1": "The bees make honey", "d2": "The cats make noise"}
        >>> last_word = lambda prompts: [prompt.split("\\n")[2].split()[-1] for prompt in prompts]
        >>> print(read_answers(last_word, {"q": {"d1": 0.9}}, questions, corpus, {"q": "honey"}))
        1 questions    mean
        exact match  1.0000
        token F1     1.0000

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, section 6.2 and App. I; the metrics are SQuAD's (Rajpurkar
    et al., 2016).
    """
    accepted = {q: [given] if isinstance(given, str) else list(given) for q, given in answers.items()}
    if missing := [q for q in questions if not accepted.get(q)]:
        raise ValueError(f"{len(missing)} questions have no answer, such as {missing[0]!r}: give one, or leave it out.")
    prompts = [
        prompt(text, [corpus[document] for document in list(run.get(q, {}))[:k]]) for q, text in questions.items()
    ]
    found = list(reader(prompts))
    if len(found) != len(prompts) or not all(isinstance(answer, str) for answer in found):
        raise ValueError(
            f"The reader got {len(prompts)} prompts and returned {found!r:.200}; it must return one string for each."
        )
    pairs = [(answer, accepted[q]) for q, answer in zip(questions, found, strict=True)]
    exact, f1 = (np.array([metric(*pair) for pair in pairs]) for metric in (exact_match, token_f1))
    return Reading(dict(zip(questions, found, strict=True)), exact, f1)

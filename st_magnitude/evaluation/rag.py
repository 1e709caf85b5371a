"""Retrieval-augmented question answering: whether a better retriever gives a reader better answers."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from st_magnitude._checks import whole_number
from st_magnitude.data.task import check_texts
from st_magnitude.evaluation.base import CsvEvaluator
from st_magnitude.evaluation.hybrid import Run, dense_run
from st_magnitude.similarity import Similarity

__all__ = ["RAGEvaluator", "exact_match", "normalize_answer", "rag_prompt", "token_f1"]

Reader = Callable[[list[str]], Sequence[str]]

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
    """A prompt with the question before its context, so that a reader that truncates loses documents, not the question.

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


class RAGEvaluator(CsvEvaluator):
    """Exact match and token F1 of a reader that answers from the documents that the model retrieves.

    Args:
        questions: Question id -> text.
        corpus: Document id -> text.
        answers: Question id -> the accepted answers, or the only one.
        reader: Function from a list of prompts to an answer for each, around a transformers pipeline, a local model or
            an API.
        k: Number of documents in a prompt; 5 in the paper.
        prompt: Function from a question and its documents, best first, to a prompt.
        batch_size: Number of texts that are encoded, and of prompts that are read, at a time.

    The other arguments are those of `SearchEvaluator`; the CSV file is ``RAG_evaluation_{name}_results.csv``.

    Attributes:
        predictions: After a call, question id -> the reader's answer.
        per_query: After a call, ``"em"`` and ``"f1"`` of every question, in the order of ``questions``, which
            `st_magnitude.geometry.paired_bootstrap` takes to compare two retrievers.
        primary_metric: ``{name}_rag_f1@{k}``.

    Raises:
        ValueError: If questions and answers do not match, questions or corpus are empty, or an argument is out of
            range; at the call, if an embedding is not finite, or the reader does not return a string for each prompt.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bees", "cats"])], similarity_fn_name="dot", device="cpu")
        >>> corpus = {"d1": "The bees make honey", "d2": "The cats make noise"}
        >>> last_word = lambda prompts: [prompt.split("\\n")[2].split()[-1] for prompt in prompts]
        >>> evaluator = RAGEvaluator({"q": "What do bees make?"}, corpus, {"q": "honey"}, last_word, k=1)
        >>> evaluator(model)
        {'rag_em@1': 1.0, 'rag_f1@1': 1.0}

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, section 6.2 and App. I; the metrics are SQuAD's (Rajpurkar
    et al., 2016).
    """

    kind = "RAG"

    def __init__(
        self,
        questions: Mapping[str, str],
        corpus: Mapping[str, str],
        answers: Mapping[str, str | Sequence[str]],
        reader: Reader,
        k: int = 5,
        prompt: Callable[[str, Sequence[str]], str] = rag_prompt,
        similarity: Similarity | str | None = None,
        name: str = "",
        batch_size: int = 32,
        show_progress_bar: bool = False,
        write_csv: bool = True,
    ) -> None:
        self.k = whole_number("k", k)
        batch_size = whole_number("batch_size", batch_size)
        self.primary = f"rag_f1@{self.k}"  # type: ignore[misc]
        self.batch_size, self.show_progress_bar = batch_size, show_progress_bar
        super().__init__(name, batch_size, show_progress_bar, write_csv)
        check_texts(questions, corpus, "questions")
        self.answers = {q: [given] if isinstance(given, str) else list(given) for q, given in answers.items()}
        if missing := [q for q in questions if not self.answers.get(q)]:
            raise ValueError(
                f"{len(missing)} questions have no answer, such as {missing[0]!r}: give one, or leave the question out."
            )
        if unknown := [q for q in self.answers if q not in questions]:
            raise ValueError(
                f"{len(unknown)} answers belong to unknown questions, such as {unknown[0]!r}: leave them out."
            )
        if not callable(reader):
            raise ValueError(
                f"reader must be a function from a list of prompts to their answers, got {type(reader).__name__}."
            )
        self.questions = dict(questions)
        self.corpus = dict(corpus)
        self.reader = reader
        self.prompt = prompt
        self.similarity = None if similarity is None else Similarity.named(similarity)
        self.predictions: dict[str, str] = {}
        self.per_query: dict[str, NDArray[np.float64]] = {}

    def measure(self, model: SentenceTransformer) -> dict[str, float]:
        """Retrieves, reads and measures."""
        run = dense_run(
            model, self.questions, self.corpus, self.k, self.similarity, self.batch_size, self.show_progress_bar
        )
        self.predictions = self.read(run)
        scores = {
            "em": [exact_match(self.predictions[q], self.answers[q]) for q in self.questions],
            "f1": [token_f1(self.predictions[q], self.answers[q]) for q in self.questions],
        }
        self.per_query = {key: np.array(values) for key, values in scores.items()}
        return {f"rag_{key}@{self.k}": float(values.mean()) for key, values in self.per_query.items()}

    def read(self, run: Run) -> dict[str, str]:
        """The reader's answers to all questions from a given run, such as a hybrid one."""
        prompts = {
            q: self.prompt(text, [self.corpus[document] for document in list(run.get(q, {}))[: self.k]])
            for q, text in self.questions.items()
        }
        ids = list(prompts)
        predictions: dict[str, str] = {}
        starts = range(0, len(ids), self.batch_size)
        for start in tqdm(starts, desc="Reading", disable=not self.show_progress_bar):
            some = ids[start : start + self.batch_size]
            answers = list(self.reader([prompts[q] for q in some]))
            if len(answers) != len(some):
                raise ValueError(
                    f"The reader got {len(some)} prompts and returned {len(answers)} answers, not one for each."
                )
            if wrong := [answer for answer in answers if not isinstance(answer, str)]:
                raise ValueError(
                    f"The reader returned {type(wrong[0]).__name__} {wrong[0]!r}; answers must be strings."
                )
            predictions.update(zip(some, answers, strict=True))
        return predictions

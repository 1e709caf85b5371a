"""Question answering over what a model retrieves, with a reader that anybody can follow."""

from __future__ import annotations

import csv
import re
from collections import Counter

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW

from st_magnitude.evaluation import RAGEvaluator, exact_match, normalize_answer, rag_prompt, token_f1

CORPUS = {
    "d1": "Bees make honey in hives",
    "d2": "Cats make noise at night",
    "d3": "Bees dance",
    "d4": "Rivers make valleys",
}
QUESTIONS = {"q1": "what do bees make", "q2": "what do cats make", "q3": "what do rivers make"}
ANSWERS = {"q1": ["honey", "wax"], "q2": "The noise!", "q3": ["deep valleys"]}


@pytest.fixture
def model() -> SentenceTransformer:
    return SentenceTransformer(
        modules=[BoW(["bees", "cats", "rivers", "make"])], similarity_fn_name="cosine", device="cpu"
    )


def word_after_make(prompts: list[str]) -> list[str]:
    """Extractive: the word after "make" in the first document that has one."""
    return [(re.findall(r"make (\w+)", prompt.split("\n")[2]) or ["nothing"])[0] for prompt in prompts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("The  U.S. Navy!", "us navy"), ("An answer", "answer"), ("theatre", "theatre"), ("a, an, the", ""), ("", "")],
)
def test_normalisation(text: str, expected: str) -> None:
    assert normalize_answer(text) == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "em", "f1"),
    [
        ("the Eiffel Tower", ["Eiffel tower"], 1.0, 1.0),
        ("Eiffel", ["Eiffel tower", "Tour Eiffel of Paris"], 0.0, 2 / 3),
        ("to be or not to be", ["to be to"], 0.0, 2 * 3 / (6 + 3)),
        ("no", ["yes"], 0.0, 0.0),
        ("the", ["a"], 1.0, 1.0),
        ("", ["yes"], 0.0, 0.0),
    ],
)
def test_metrics(prediction: str, answers: list[str], em: float, f1: float) -> None:
    assert exact_match(prediction, answers) == em
    assert token_f1(prediction, answers) == pytest.approx(f1)


def test_f1_against_precision_and_recall() -> None:
    rng = np.random.default_rng(0)
    words = list("bcdefg")
    for _ in range(200):
        a, b = (list(rng.choice(words, rng.integers(1, 7))) for _ in range(2))
        common = sum(min(Counter(a)[w], Counter(b)[w]) for w in words)
        precision, recall = common / len(a), common / len(b)
        expected = 2 * precision * recall / (precision + recall) if common else 0.0
        assert token_f1(" ".join(a), [" ".join(b)]) == pytest.approx(expected)


def test_the_question_comes_before_the_context() -> None:
    prompt = rag_prompt("who?", ["one", "two"])
    assert prompt.index("who?") < prompt.index("[1] one") < prompt.index("[2] two")
    assert prompt.endswith("Answer:")


def test_reads_what_the_model_retrieves(model: SentenceTransformer, tmp_path) -> None:
    prompts: list[str] = []

    def reader(batch: list[str]) -> list[str]:
        prompts.extend(batch)
        return word_after_make(batch)

    evaluator = RAGEvaluator(QUESTIONS, CORPUS, ANSWERS, reader, k=1, name="dev", batch_size=2)
    metrics = evaluator(model, str(tmp_path), epoch=1, steps=2)
    assert evaluator.predictions == {"q1": "honey", "q2": "noise", "q3": "valleys"}
    assert metrics == {"dev_rag_em@1": pytest.approx(2 / 3), "dev_rag_f1@1": pytest.approx((1 + 1 + 2 / 3) / 3)}
    assert evaluator.primary_metric in metrics
    assert evaluator.per_query["em"].tolist() == [1, 1, 0]
    assert len(prompts) == 3
    assert all("[2]" not in prompt for prompt in prompts)
    (row,) = csv.DictReader((tmp_path / "RAG_evaluation_dev_results.csv").open())
    assert float(row["rag_em@1"]) == pytest.approx(2 / 3)
    assert row["steps"] == "2"


def test_a_better_retriever_gives_better_answers(model: SentenceTransformer) -> None:
    """By the dot product a document without the subject wins, for it says "make" more often."""
    corpus = CORPUS | {"d5": "make make make nothing"}
    by = {
        name: RAGEvaluator(QUESTIONS, corpus, ANSWERS, word_after_make, k=1, similarity=name)(model)["rag_em@1"]
        for name in ("cosine", "dot")
    }
    assert by["cosine"] > by["dot"] == 0


def test_reads_any_run(model: SentenceTransformer) -> None:
    evaluator = RAGEvaluator(QUESTIONS, CORPUS, ANSWERS, word_after_make, k=1)
    run = {"q1": {"d4": 3.0, "d1": 2.0}, "q2": {"d2": 1.0}}
    assert evaluator.read(run) == {"q1": "valleys", "q2": "noise", "q3": "nothing"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"questions": {}}, "questions is empty"),
        ({"answers": {"q1": "x"}}, "2 questions have no answer, such as 'q2'"),
        ({"answers": ANSWERS | {"q3": []}}, "1 questions have no answer, such as 'q3'"),
        ({"answers": ANSWERS | {"q9": "x"}}, "unknown questions, such as 'q9'"),
        ({"k": 0}, "k must be a whole number of at least 1, got 0"),
        ({"reader": "flan-t5"}, "reader must be a function from a list of prompts"),
    ],
)
def test_bad_input(changes: dict, says: str) -> None:
    arguments = {"questions": QUESTIONS, "corpus": CORPUS, "answers": ANSWERS, "reader": word_after_make} | changes
    with pytest.raises(ValueError, match=says):
        RAGEvaluator(**arguments)


def test_bad_readers(model: SentenceTransformer) -> None:
    with pytest.raises(ValueError, match="3 prompts and returned 1 answers"):
        RAGEvaluator(QUESTIONS, CORPUS, ANSWERS, lambda prompts: ["one"])(model)
    with pytest.raises(ValueError, match="returned NoneType"):
        RAGEvaluator(QUESTIONS, CORPUS, ANSWERS, lambda prompts: [None for _ in prompts])(model)
    with pytest.raises(ValueError, match="returned dict"):
        RAGEvaluator(QUESTIONS, CORPUS, ANSWERS, lambda prompts: [{"text": "one"} for _ in prompts])(model)

"""Question answering over what a model retrieves, with a reader that anybody can follow."""

from __future__ import annotations

import re

import pytest

from st_magnitude.evaluation.rag import exact_match, normalize_answer, rag_prompt, read_answers, token_f1

CORPUS = {
    "d1": "Bees make honey in hives",
    "d2": "Cats make noise at night",
    "d3": "Bees dance",
    "d4": "Rivers make valleys",
}
QUESTIONS = {"q1": "what do bees make", "q2": "what do cats make", "q3": "what do rivers make"}
ANSWERS = {"q1": ["honey", "wax"], "q2": "The noise!", "q3": ["deep valleys"]}


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


def test_the_question_comes_before_the_context() -> None:
    prompt = rag_prompt("who?", ["one", "two"])
    assert prompt.index("who?") < prompt.index("[1] one") < prompt.index("[2] two")
    assert prompt.endswith("Answer:")


def test_reads_the_documents_of_a_run() -> None:
    prompts: list[str] = []

    def reader(batch: list[str]) -> list[str]:
        prompts.extend(batch)
        return word_after_make(batch)

    run = {"q1": {"d1": 0.9, "d3": 0.5}, "q2": {"d2": 1.0}, "q3": {"d4": 1.0}}
    found = read_answers(reader, run, QUESTIONS, CORPUS, ANSWERS, k=1)
    assert found.predictions == {"q1": "honey", "q2": "noise", "q3": "valleys"}
    assert found.exact.tolist() == [1, 1, 0]
    assert found.f1.tolist() == pytest.approx([1, 1, 2 / 3])
    assert len(prompts) == 3
    assert all("[2]" not in prompt for prompt in prompts)
    assert "0.6667" in str(found)
    nothing = read_answers(word_after_make, {}, QUESTIONS, CORPUS, ANSWERS)
    assert set(nothing.predictions.values()) == {"nothing"}


def test_bad_input_and_bad_readers() -> None:
    with pytest.raises(ValueError, match="2 questions have no answer, such as 'q2'"):
        read_answers(word_after_make, {}, QUESTIONS, CORPUS, {"q1": "x", "q3": []})
    for answer in (["one"], [None] * 3, [{"text": "one"}] * 3):
        with pytest.raises(ValueError, match=r"got 3 prompts and returned .* one string for each"):
            read_answers(lambda prompts, answer=answer: answer, {}, QUESTIONS, CORPUS, ANSWERS)

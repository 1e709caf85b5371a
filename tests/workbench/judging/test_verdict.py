"""The trained model next to the pretrained one: which exponent is chosen, and what is said."""

from dataclasses import replace

import numpy as np
import pytest
from _lookup import bag
from sentence_transformers import SentenceTransformer

from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.judge import Difference, judge
from st_magnitude.result import wrap
from st_magnitude.workbench.finetune.run import choose_scoring
from st_magnitude.workbench.finetune.settings import TrainConfig
from st_magnitude.workbench.judging.choice import Decision, System
from st_magnitude.workbench.judging.contestants import Encoded, search
from st_magnitude.workbench.judging.controls import CLASSIFIER
from st_magnitude.workbench.judging.exam import Exam
from st_magnitude.workbench.judging.folds import folds_of
from st_magnitude.workbench.judging.verdict import (
    AFTER,
    BEFORE,
    Copies,
    Row,
    Scored,
    Verdict,
    nothing_to_deploy,
    verdict_of,
)

NUMBER = 60  # fewer queries get a warning


def with_fillers(*numbers: tuple[int, int]):
    """Of (1, 0), (4, a) and (6, b), the second is relevant, for each (a, b) in turn."""
    words, queries, corpus, relevant = [], {}, {}, {}
    for i in range(NUMBER):
        words += [f"word{i}", f"filler{i}"]
        queries[f"q{i}"], relevant[f"q{i}"] = f"word{i}", {f"right{i}"}
        right, long = numbers[i % len(numbers)]
        for name, count, fillers in (("short", 1, 0), ("right", 4, right), ("long", 6, long)):
            corpus[f"{name}{i}"] = " ".join([f"word{i}"] * count + [f"filler{i}"] * fillers)
    return bag(words), RetrievalData(queries, corpus, relevant)


def judged(model: SentenceTransformer, task: RetrievalData, **config) -> Verdict:
    """The verdict on a model that did not change."""
    exam = Exam(task, task)
    before = search(BEFORE, model, exam)
    after, shown = choose_scoring(Encoded.of(AFTER, model, exam), TrainConfig(**config))
    return verdict_of(exam, [before, replace(after, base=BEFORE)], shown=shown)


def test_a_fractional_exponent_is_chosen_where_it_is_clearly_better():
    """q·d/|d|^gamma of (4, 3), the relevant document, beats that of (6, 30) by cosine and of (1, 0)
    by dot only."""
    model, task = with_fillers((3, 30))
    found = judged(model, task)
    assert found.pretrained == pytest.approx(1 / np.log2(3))  # second, by dot
    assert 0 < found.saved.exponent < 1
    assert found.saved.ndcg == 1.0
    assert found.is_better
    said = "The trained model is better than the pretrained model: +36.9 points"
    assert found.headline.startswith(said)
    assert "(saved)" in str(found)

    kept = judged(model, task, keep_scoring=True)
    assert (kept.saved.exponent, kept.saved.ndcg) == (0.0, pytest.approx(found.pretrained))
    assert "no clear difference" in kept.headline
    for one, other in ((found, kept), (kept, found)):
        assert [row.name for row in one.rows[:3]] == [
            BEFORE,
            f"the trained model, {one.saved.name} (saved)",
            f"the trained model, {other.saved.name} (not saved)",
        ]
        assert [row.ndcg for row in one.rows[1:3]] == [one.saved.ndcg, other.saved.ndcg]


def test_a_chosen_exponent_is_judged_by_queries_that_did_not_choose_it():
    """Half of the answers are first at .5 alone, and half at .9 alone. Four folds choose what suits
    them, and the fifth, of which the other half is larger, loses by it."""
    model, data = with_fillers((15, 80), (2, 6))
    expected = []
    for fold in folds_of(data, 5, 0):
        others = [int(query[1:]) % 2 for query in data.queries if query not in fold]
        suited = 0 if others.count(0) > others.count(1) else 1
        expected += [1.0 if int(q[1:]) % 2 == suited else 1 / np.log2(3) for q in fold]
    found = judged(model, data)
    assert found.saved.exponent == 0.9
    assert found.saved.ndcg == pytest.approx(np.mean(expected))


# Each query k asks for "wk". Its documents ak, bk and ck have the word three times, twice and once,
# so the pretrained model has a, b, c by dot; and so has BM25, but for a5, which is long: b, c, a.
#
#   judged      run    pretrained                          run      BM25
#   a1: 1       b, a   a first: 1                          .63093   1
#   b2: 2 c2: 1 b, c   (2 * .63093 + .5) / 2.63093 .66967  1        .66967
#   c3: 1       c      .5                                  1        .5
#   a4: 1       a      1                                   1        1
#   b5: 1       -      .63093                              0        1
#   mean               .76012                              .72619   .83393
#
# The queries six to ten are the same again, as fewer than ten decide nothing.
JUDGED = [{"a": 1}, {"b": 2, "c": 1}, {"c": 1}, {"a": 1}, {"b": 1}] * 2
RUN = ["ba", "bc", "c", "a", ""] * 2


@pytest.fixture(scope="module")
def by_hand() -> Verdict:
    words = [f"w{k}" for k in range(1, 11)]
    corpus = {
        f"{x}{w}": " ".join([w] * n) for w in words for x, n in zip("abc", (3, 2, 1), strict=True)
    }
    corpus["aw5"] += " and so on" * 8
    corpus["aw10"] += " and so on" * 8
    answers, run = {}, {}
    for w, grades, found in zip(words, JUDGED, RUN, strict=True):
        answers[w] = {f"{x}{w}": grade for x, grade in grades.items()}
        run[w] = {f"{x}{w}": -float(i) for i, x in enumerate(found)}
    data = RetrievalData({w: w for w in words}, corpus, answers)
    exam = Exam(data, data, folds_of(data, 5, 0))
    before = search(BEFORE, bag(words), exam)
    after = System(AFTER, Ranking.of_run(data, run), base=BEFORE, folds=2)  # as of an encoder
    return verdict_of(exam, [before, after])


def test_the_figures_of_a_verdict_are_those_of_the_table(by_hand):
    assert by_hand.where == "10 queries, held out in 2 folds"
    assert by_hand.pretrained == pytest.approx(0.76012, abs=1e-5)
    assert by_hand.saved.ndcg == pytest.approx(0.72619, abs=1e-5)
    assert by_hand.saved.gain.mean == pytest.approx(-0.03393, abs=1e-5)
    assert (by_hand.saved.gain.changed, by_hand.saved.exponent) == (8, 0.0)
    before, after, bm25, *fused = by_hand.rows
    assert [one.name for one in (before, after, bm25, *fused)] == [
        BEFORE,
        "the trained model, dot",
        "BM25 of words",
        "the pretrained model with BM25",
        "the trained model with BM25",
    ]
    assert by_hand.over_bm25.mean == pytest.approx(-0.10775, abs=1e-5)
    assert str(by_hand.decision) == "Deploy BM25 (words): nDCG@10 0.8339. Nothing else is better."
    assert (bm25.ndcg, bm25.gain) == (pytest.approx(0.83393, abs=1e-5), None)
    assert before.gain.mean == pytest.approx(0.83393 - 0.76012, abs=1e-5)
    assert after.gain.mean == pytest.approx(0.10775, abs=1e-5)
    for gain in (by_hand.saved.gain, *(row.gain for row in (before, after, *fused))):
        assert gain.low < gain.mean < gain.high


@pytest.mark.parametrize("copies", [0, 1, 5, 6, 100])
def test_near_copies_are_told_and_above_a_twentieth_the_others_are_judged(copies):
    """Of 100 queries, near copies gain everything, and so does every tenth of the others."""
    queries = {f"q{i}": f"question {i}" for i in range(100)}
    data = RetrievalData(queries, {"a": "answer", "b": "other"}, {q: {"a"} for q in queries})
    gains = [float(i < copies or i % 10 == 0) for i in range(100)]
    of_after = zip(queries, gains, strict=True)
    after = Ranking.of_run(data, {q: {"a" if gain else "b": 1.0} for q, gain in of_after}, k=1)
    before = Ranking.of_run(data, {q: {"b": 1.0} for q in queries}, k=1)
    near = {f"q{i}" for i in range(copies)}
    found = Copies.of(System(AFTER, after), System(BEFORE, before), near, seed=3)
    others = judge(gains[copies:], seed=3) if copies == 6 else None
    assert found == Copies(copies, others, BEFORE if others else "")
    differ = "differs" if copies == 1 else "differ"
    told = f"{copies} of these queries {differ} from a training query by at most one word."
    told += f" On the 94 others: {others} over {BEFORE}." if others else ""
    assert str(found) == (told if copies else "")
    assert str(found) in made(BETTER, copies=found).headline


BETTER = Difference(0.05, 0.01, 0.09, 200, 100)
OPEN = Difference(0.02, -0.01, 0.08, 200, 100)
WORSE = Difference(-0.04, -0.07, -0.01, 200, 100)
NO_DIFFERENCE = (
    "There is no clear difference between the trained model and the pretrained model: +2.0"
)
DEPLOYED = Decision("the trained model", 0.6, "", "", None)


def made(gain, changed=100, **options) -> Verdict:
    """A verdict on 200 queries, of a model with .5 before."""
    trained = Scored(0.0, 0.5 + gain.mean, replace(gain, changed=changed))
    rows = (Row(BEFORE, 0.5, trained.gain), Row("the trained model, dot", trained.ndcg, None))
    return Verdict(saved=trained, **{"rows": rows, "where": "200 dev queries"} | options)


@pytest.mark.parametrize(
    ("gain", "name"),
    [
        (BETTER, "The trained model is better than the pretrained model: +5.0 points [+1.0, +9"),
        (OPEN, NO_DIFFERENCE),
        # an end at 0 is not above or below it
        (replace(OPEN, low=0.0), NO_DIFFERENCE),
        (replace(OPEN, high=0.0), NO_DIFFERENCE),
        (WORSE, "The trained model is worse than the pretrained model: -4.0 points"),
    ],
)
def test_the_interval_of_the_saved_model_decides(gain, name):
    found = made(gain)
    assert found.headline.startswith(name)
    assert found.is_better == ("better" in name)
    assert found.is_worse == ("worse" in name)


@pytest.mark.parametrize(
    ("over_bm25", "decision", "headline"),
    [
        (BETTER, None, ""),
        (OPEN, None, "Whether the trained model is better than BM25 alone is open."),
        (OPEN, DEPLOYED, ""),  # the decision says it
        (WORSE, None, "BM25 alone is better than the trained model alone."),
        (WORSE, DEPLOYED, "BM25 alone is better than the trained model alone."),
        (None, None, ""),
    ],
)
def test_what_is_said_about_bm25(over_bm25, decision, headline):
    options = {"decision": decision, "no_control": "" if over_bm25 else "BM25 is none."}
    found = made(BETTER, over_bm25=over_bm25, **options)
    assert found.headline.endswith(f"on 200 dev queries. {headline}".strip())
    assert str(found).count("BM25 is none.") == (over_bm25 is None)
    if decision is None:
        assert str(found.table).splitlines()[:3] == [
            "nDCG@10 on 200 dev queries, and what the trained model has over each search",
            "search                  nDCG@10  over it",
            "the pretrained model     0.5000  +5.0 points [+1.0, +9.0]",
        ]


@pytest.mark.parametrize("decision", [None, DEPLOYED])
def test_a_terminal_ends_with_the_decision_and_a_file_begins_with_it(decision):
    """Next to it is what the budget did not hold."""
    found = made(BETTER, decision=decision, nothing="" if decision else "None.", left_out="Out.")
    parts = [wrap(found.deploy), wrap(found.headline), str(found.table)]
    assert str(found) == "\n\n".join(parts)
    assert found.most_important_last() == "\n\n".join(reversed(parts))
    assert found.to_markdown().startswith(found.deploy)
    assert found.deploy.splitlines() == [str(decision or "None."), "Out."]


@pytest.mark.parametrize(
    ("gain", "said"), [(BETTER, ""), (OPEN, "is not clearly worse: +2.0"), (WORSE, "is better: -4")]
)
def test_a_classifier_is_named_where_nothing_clearly_beats_it(gain, said):
    rows = (Row(CLASSIFIER, 0.6, gain),)
    found = made(BETTER, rows=rows, decision=DEPLOYED).deploy
    assert (CLASSIFIER.capitalize() in found) == bool(said)
    assert said in found


@pytest.mark.parametrize(
    ("over_chance", "queries", "said"),
    [
        (Difference(0.01, 0.005, 0.019, 2000, 99), 2000, "[+0.5, +1.9] against the results"),
        (Difference(0.01, 0.005, 0.02, 2000, 99), 2000, ""),
        (Difference(0.09, -0.01, 0.2, 60, 9), 60, "is 0.5200, which is +9.0"),  # open, and small
        (Difference(0.3, -0.1, 0.6, 10, 4), 10, ""),
        (Difference(0.3, -0.1, 0.6, 9, 4), 9, "At least ten queries are needed, and 9 different"),
        (Difference(0.05, 0.01, 0.09, 200, 99), 200, ""),
    ],
)
def test_nothing_is_recommended_where_chance_finds_as_much(over_chance, queries, said):
    nothing = nothing_to_deploy(0.52, over_chance, queries)
    assert said in nothing
    assert bool(nothing) == bool(said)
    found = made(OPEN, nothing=nothing)
    assert found.deploy == nothing


def test_nine_queries_and_a_copy_decide_nothing(by_hand):
    data = by_hand.systems[0].ranking.data
    queries = data.queries | {"w10": "W9 "}
    same = RetrievalData(queries, data.corpus, data.relevant)
    exam = Exam(same, same)
    model = bag([*queries])
    before = search(BEFORE, model, exam)
    found = verdict_of(exam, [before, replace(before, name=AFTER, base=BEFORE)])
    assert found.decision is None
    assert found.deploy.startswith("At least ten queries are needed, and 9 different queries judge")


def test_low_figures_of_every_model_are_said_to_be_of_the_data():
    low = made(Difference(0.05, 0.01, 0.09, 200, 100))
    low = replace(low, saved=replace(low.saved, ndcg=0.08))
    assert "nDCG@10 is low for every model" in low.headline
    assert "low" not in replace(low, nothing="nothing").headline
    assert "low" not in replace(low, saved=replace(low.saved, ndcg=0.11)).headline

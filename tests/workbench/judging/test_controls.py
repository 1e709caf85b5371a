"""BM25 as a control, the linear classifier of words next to a plain one, and where each is none."""

import random
import sys

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.svm import LinearSVC

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.lexical import TOKENS
from st_magnitude.workbench.finetune.train import TrainConfig, train
from st_magnitude.workbench.judging import controls
from st_magnitude.workbench.judging.controls import CLASSIFIER, bm25_control, classifier_control
from st_magnitude.workbench.judging.exam import DEPTH, Exam
from st_magnitude.workbench.judging.folds import folds_of

THINGS = "account balance card declined transfer pending money abroad change address"
WORDS = THINGS.split()


def questions(classes, each):
    """Questions of three words, of which one tells the class more often than not."""
    draw = random.Random(0)
    queries, relevant = {}, {}
    for i in range(classes * each):
        name = i % classes
        told = WORDS[name] if draw.random() < 0.8 else draw.choice(WORDS)
        queries[f"q{i}"] = f"{told} {draw.choice(WORDS)} {i}"
        relevant[f"q{i}"] = {f"d{name}"}
    corpus = {f"d{name}": f"about class {name}" for name in range(classes)}
    return RetrievalData(queries, corpus, relevant)


def tokens(text):
    return text.split() + [f" {text} "[i : i + 4] for i in range(len(text) - 1)]


@pytest.mark.parametrize("classes", [2, 5])
def test_it_reads_what_the_model_reads_of_each_fold(classes):
    data = questions(classes, 12)
    exam = Exam(data, data, folds_of(data, 3, 0))
    found = classifier_control(exam)
    assert list(found) == [1.0, 0.3, 3.0]
    for penalty, ranking in found.items():
        for fold in exam.folds:
            rows = [(data.queries[q], *data.relevant[q]) for q in data.queries if q not in fold]
            texts, names = map(list, zip(*rows, strict=True))
            reader = TfidfVectorizer(analyzer=tokens, sublinear_tf=True)
            machine = LinearSVC(C=penalty).fit(reader.fit_transform(texts), names)
            scores = machine.decision_function(reader.transform(data.queries[q] for q in fold))
            for query, row in zip(fold, scores, strict=True):
                values = row if np.ndim(row) else (-row, row)
                expected = dict(zip(machine.classes_, values, strict=True))
                assert ranking[query] == pytest.approx(expected, abs=1e-3)


def test_on_test_it_has_the_c_of_dev_and_reads_what_the_model_reads(static_path, tmp_path):
    data = questions(10, 30)
    ids = [*data.queries]
    parts = {"train": ids[:100], "dev": ids[100:200], "test": ids[200:]}
    splits = {name: data.only(part) for name, part in parts.items()}
    config = TrainConfig(max_steps=1, batch_size=4, learning_rate=0.0, folds=0, confirm="test")
    trained = train(str(static_path), splits, tmp_path / "out", config)
    on_dev, on_test = (
        classifier_control(Exam(splits["train"], splits[name])) for name in ("dev", "test")
    )
    best = max(on_dev, key=lambda penalty: on_dev[penalty].mean)
    assert len({ranking.mean for ranking in on_test.values()}) > 1
    first, *others = trained.confirmed.rows
    row = others[-1]
    assert row.name == CLASSIFIER
    assert row.ndcg == pytest.approx(on_test[best].mean, abs=1e-9)
    assert row.gain.mean == pytest.approx(first.ndcg - row.ndcg, abs=1e-9)
    assert f"{row.gain} over {CLASSIFIER}." in str(trained.confirmed)


def unasked(data):
    corpus = data.corpus | {"other": "of no question"}
    return RetrievalData(data.queries, corpus, data.relevant)


def two_answers(data):
    return RetrievalData(data.queries, data.corpus, data.relevant | {"q0": {"d0", "d1"}})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.only([*data.queries][:-1]), "1 of 3 documents have fewer than 5"),
        (unasked, "1 of 4 documents have fewer than 5 training queries, such as 'of no question'"),
        (two_answers, "some queries have several answers"),
        (lambda data: data.only([*data.queries][::2]), ""),
        (lambda data: questions(3, 6), "3 classes of 18 queries would take it long"),
    ],
)
def test_documents_that_are_no_classes(change, said, caplog, monkeypatch):
    data = questions(3, 5)
    monkeypatch.setattr(controls, "MOST_WORK", 45)
    assert len(classifier_control(Exam(data, data))) == 3
    assert caplog.text == ""
    assert classifier_control(Exam(change(data), data)) == {}
    assert ("is not measured, as" in caplog.text) == bool(said)
    assert said in caplog.text


def test_it_is_a_row_and_not_weighed(static_path, tmp_path):
    config = TrainConfig(max_steps=1, batch_size=4, learning_rate=0.0, folds=2)
    verdict = train(str(static_path), questions(5, 20), tmp_path / "out", config).verdict
    assert verdict.rows[-1].name == CLASSIFIER
    assert verdict.rows[-1].ndcg > verdict.decision.ndcg
    assert CLASSIFIER not in {system.name for system in verdict.systems}
    assert [system.name for system in verdict.controls.systems] == [CLASSIFIER]  # of the report
    assert f"{CLASSIFIER.capitalize()} is better: -" in verdict.deploy
    assert f"| {CLASSIFIER} |" in (tmp_path / "out" / "README.md").read_text()


def four(*answers):
    """Four queries of a word each, and their answers."""
    queries = {f"q{i}": f"word{i} please" for i in range(4)}
    corpus = {f"d{i}": text for i, text in enumerate(answers)}
    return RetrievalData(queries, corpus, {f"q{i}": {f"d{i}"} for i in range(4)})


@pytest.mark.parametrize(
    ("answers", "number"),
    [
        (["word0 it is", "word1", "two", "three"], None),  # a half is enough
        (["word0 it is", "one", "two", "three"], 1),
        (["word1", "word0", "word3", "please"], 1),  # all find documents, and one an answer
        (["A", "B", "?", "\ue000"], 0),
    ],
)
def test_a_search_that_shares_no_words_is_no_control(answers, number):
    run, said = bm25_control(four(*answers))
    if number is None:
        assert (list(run), list(run["words"]["q0"]), said) == ([*TOKENS], ["d0"], "")
        return
    assert run == {}
    assert said == (
        f"BM25 finds a word in common with an answer for {number} of 4 queries only, so it is no"
        " control."
    )


def test_a_word_of_many_documents_says_nothing_against_a_control():
    """Of 200 documents with a word of the query, a run has the first 100."""
    many = {f"a{i:03}": "please" for i in range(2 * DEPTH)}
    data = four("one please", "two", "three", "four")
    assert bm25_control(data)[0] == {}
    run, no_control = bm25_control(
        RetrievalData(data.queries, data.corpus | many, {q: {"d3"} for q in data.queries})
    )
    assert no_control == ""
    assert {len(found) for found in run["words"].values()} == {DEPTH}
    assert "d3" not in run["words"]["q3"]


def test_grams_of_a_corpus_that_is_too_large_are_left_out(monkeypatch, caplog):
    data = four("word0", "word1", "word2", "word3")
    characters = sum(map(len, data.corpus.values()))
    monkeypatch.setattr(controls, "MOST_CHARACTERS", characters)
    assert list(bm25_control(data)[0]) == [*TOKENS]
    assert "4-grams" not in caplog.text
    monkeypatch.setattr(controls, "MOST_CHARACTERS", characters - 1)
    run, no_control = bm25_control(data)
    assert (list(run), no_control) == (["words"], "")
    assert f"the 4-grams of a corpus of {characters} characters" in caplog.text


def test_without_bm25s_there_is_no_control_and_the_log_says_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    assert bm25_control(four("word0", "word1", "word2", "word3")) == ({}, "")
    assert "Not measured: BM25 needs bm25s" in caplog.text

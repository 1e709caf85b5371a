"""Who trains and who judges, by the splits, the kind of the model and what it has read."""

from contextlib import nullcontext

import pytest
from _lookup import tokenizer_of
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW, StaticEmbedding

import st_magnitude as stm
from st_magnitude.data.retrieval import DataError, RetrievalData
from st_magnitude.workbench.judging.exam import Exam
from st_magnitude.workbench.judging.folds import where
from st_magnitude.workbench.memory import write_memory

NUMBER = 20
CORPUS = {
    f"{part}-{i}": f"{part} answer {i}" for part in ("train", "dev", "test") for i in range(20)
}


def ids(*parts):
    return {key for key in CORPUS if key.partition("-")[0] in parts}


def splits_of(*parts, drawn=()):
    queries = {key: f"where is {key}?" for key in CORPUS}
    splits = stm.load_splits(
        {x: RetrievalData(queries, CORPUS, {k: {k} for k in queries}).only(ids(x)) for x in parts}
    )
    splits.drawn = {*drawn}
    return splits


def encoder():
    return SentenceTransformer(modules=[BoW(["where"])], device="cpu")


def table():
    module = StaticEmbedding(tokenizer_of(["where"]), embedding_dim=4)
    return SentenceTransformer(modules=[module], device="cpu")


ALL = ("train", "dev", "test")
COMPARE = {"choose": "dev", "judge": "test"}


@pytest.mark.parametrize(
    ("model", "parts", "drawn", "options", "trains", "judges", "folds"),
    [
        (encoder, ["train"], (), {}, ["train"], [], 0),
        (table, ["train"], (), {}, ["train"], ["train"], 5),
        (table, ["train"], (), {"folds": 0}, ["train"], [], 0),
        (encoder, ["train"], (), {"folds": 3}, ["train"], ["train"], 3),
        (table, ["train", "dev"], (), {}, ["train"], ["dev"], 0),
        (table, ["train", "dev"], ["dev"], {}, ["train", "dev"], ["train", "dev"], 5),
        (encoder, ["train", "dev"], ["dev"], {}, ["train"], ["dev"], 0),
        (table, ["train", "dev"], ["dev"], {"judge": "train"}, ["train"], ["train"], 5),
        (table, ALL, ["dev"], {"confirm": "test"}, ["train", "dev"], ["train", "dev"], 5),
        (table, ALL, (), COMPARE, ["train"], ["test"], 0),
        (table, ALL, ["test"], COMPARE, ["train", "test"], ["train", "test"], 5),
        (encoder, ALL, ["test"], COMPARE, ["train"], ["test"], 0),
    ],
)
def test_who_trains_and_who_judges(model, parts, drawn, options, trains, judges, folds):
    splits = splits_of(*parts, drawn=drawn)
    exam = Exam.of(splits, model(), **options)
    assert exam.train.queries.keys() == ids(*trains)
    assert (set() if exam.judged is None else exam.judged.queries.keys()) == ids(*judges)
    assert len(exam.folds) == folds
    assert exam.answers == ids(*parts)
    papers = [*exam.papers()]
    assert sum(len(asked.queries) for _, asked in papers) == NUMBER * len(judges)
    for train, asked in papers:
        read = {*train.triplets(0)["anchor"]}
        for others in filter(None, (asked, exam.choose, exam.confirm)):
            assert not read & {*others.queries.values()}


@pytest.mark.parametrize("kind", [table, encoder])
def test_near_copies_are_counted_wherever_a_query_judges(kind):
    """Every query is one word from 19 others of its split, and from all of the other splits."""
    queries = {key: f"how do i top up my {i}th card with cash" for i, key in enumerate(CORPUS)}
    alone = {"train-0": "unlike all others", "dev-1": "no other one", "test-2": "where are trains"}
    queries |= alone
    data = RetrievalData(queries, CORPUS, {key: {key} for key in queries})
    splits = stm.load_splits({part: data.only(ids(part)) for part in ALL})
    splits.drawn = {"dev"}
    exam = Exam.of(splits, kind(), confirm="test")
    judges = ids("train", "dev") if exam.folds else ids("dev")
    assert exam.near_copies == (judges | ids("test")) - alone.keys()
    said = "The 40 queries of train and dev judge the result, by cross-validation."
    assert exam.notes == ((said,) if exam.folds else ())


def test_queries_are_held_out_for_what_a_comparison_lacks(monkeypatch):
    for name in ("MOST_HELD_OUT", "FEWEST"):
        monkeypatch.setattr(f"st_magnitude.workbench.judging.exam.{name}", 3)
    exam = Exam.of(splits_of("train"), encoder(), **COMPARE)
    parts = [exam.train.queries, exam.choose.queries, exam.judged.queries]
    assert sum(map(len, parts)) == len(set().union(*parts)) == NUMBER
    assert 1 <= len(exam.choose.query_ids) <= 3
    assert where(exam.choose).endswith(" dev queries")
    assert [note[:21] for note in exam.notes] == ["There is no dev split", "There is no test spli"]
    monkeypatch.undo()
    exam = Exam.of(splits_of("train"), table(), **COMPARE)
    assert "16 queries outside of dev judge the result, by cross-validation." in exam.notes[1]


def test_what_a_model_has_read_judges_nothing(tmp_path):
    folder = str(tmp_path)
    rows = Dataset.from_dict({"anchor": [f"where is dev-{i}?" for i in range(NUMBER)]})
    write_memory(tmp_path, rows)
    splits = splits_of(*ALL, drawn=["dev", "test"])
    exam = Exam.of(splits, encoder(), "a hub id", folder, confirm="test", folds=5)
    assert exam.judged.queries.keys() == ids("test")  # and not in folds
    assert (exam.confirm, exam.folds) == (None, [])
    assert exam.notes == (
        "--confirm test is left out, as the test split judges the model already.",
    )
    with pytest.raises(ValueError, match="trained on all 20 queries"):
        Exam.of(splits_of("train", "dev"), encoder(), folder)


@pytest.mark.parametrize("name", ["choose", "judge", "confirm"])
def test_a_query_that_is_asked_later_is_no_text_to_train_on(name):
    """It is the answer to another query of train."""
    splits = splits_of(*ALL)
    asked = "where is test-0?"
    train = splits["train"]
    corpus = CORPUS | {"train-0": asked}
    changed = RetrievalData(train.queries, corpus, train.relevant)
    options = {"judge": "dev"} | {name: "test"}
    exam = Exam.of(stm.load_splits({**splits, "train": changed}), encoder(), **options)
    rows = exam.train.triplets(0)
    assert asked not in {*rows["positive"]}
    assert len(rows) == NUMBER - 1


def test_one_document_is_refused():
    data = RetrievalData({"q": "which?"}, {"d": "one"}, {"q": {"d"}})
    with pytest.raises(DataError, match="one document"):
        Exam.of(stm.load_splits({"train": data}), encoder())


@pytest.mark.parametrize(
    ("sizes", "drawn", "options", "is_refused"),
    [
        ({"train": 20, "dev": 9}, {"dev"}, {}, True),
        ({"train": 20, "dev": 10}, {"dev"}, {}, False),
        ({"train": 20, "dev": 9}, set(), {}, False),  # as the user wants it
        ({"train": 20, "dev": 9}, {"dev"}, {"folds": 0}, False),
        ({"train": 9}, set(), {"folds": 2}, True),
        ({"train": 10}, set(), {"folds": 2}, False),
    ],
)
def test_too_few_queries_to_judge_are_refused(sizes, drawn, options, is_refused):
    whole = splits_of(*sizes)
    parts = {x: whole[x].only({f"{x}-{i}" for i in range(n)}) for x, n in sizes.items()}
    splits = stm.load_splits(parts)
    splits.drawn = drawn
    said = "Only 9 queries can judge, and fewer than 10 decide nothing: add rows"
    with pytest.raises(DataError, match=said) if is_refused else nullcontext():
        Exam.of(splits, encoder(), **options)


@pytest.mark.parametrize("folds", [1, NUMBER + 1])
def test_folds_that_cannot_be_made(folds, monkeypatch):
    with pytest.raises(ValueError, match=f"folds is {folds}; give at least 2, .* which are 20"):
        Exam.of(splits_of("train"), encoder(), folds=folds)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="start one process"):
        Exam.of(splits_of("train"), encoder(), folds=folds)
    assert not Exam.of(splits_of("train"), table()).folds

"""Pairs from files, data sets and mappings, and splits that do not leak."""

import csv
import json
import math
import re
from contextlib import suppress

import pytest
from _texts import write
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st

from st_magnitude.data.beir import DataError, canonical
from st_magnitude.workbench.files.pairs import Splits, load_splits

PAIRS = [(f"Is {a} {b}?", f"{b} {a} it is") for a in ("tea", "rain", "wax") for b in "abcdefgh"]
ROWS = [{"query": query, "document": document} for query, document in PAIRS]


def pairs_of(splits: Splits) -> set[tuple[str, str]]:
    """All relevant pairs of texts."""
    parts = [splits[name] for name in splits]
    return {
        (part.queries[q], part.corpus[d])
        for part in parts
        for q, grades in part.relevant.items()
        for d in grades
    }


def test_what_is_drawn_depends_on_the_seed():
    splits = load_splits(ROWS)
    assert splits.notes[0] == "24 documents; queries: 20 in train, 2 in dev, 2 in test."
    assert splits["train"].corpus is splits["dev"].corpus is splits["test"].corpus
    assert load_splits(ROWS, seed=1)["dev"].queries != splits["dev"].queries


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("someone/questions", [15, 1, 8]), ("someone/questions:train", [14, 1, 1])],
)
def test_a_data_set_of_the_hub(monkeypatch, name, sizes):
    """By its name or NAME:SPLIT, as `datasets.load_dataset` gives it."""
    stored = DatasetDict(train=Dataset.from_list(ROWS[8:]), test=Dataset.from_list(ROWS[:8]))

    def load(path, split):
        assert path == "someone/questions"
        return stored if split is None else stored[split]

    monkeypatch.setattr("st_magnitude.workbench.files.rows.load_dataset", load)
    splits = load_splits(name)
    assert [len(splits[part].queries) for part in ("train", "dev", "test")] == sizes


@pytest.mark.parametrize("kind", ["folder", "txt", "csv", "rows"])
def test_texts_without_labels(tmp_path, kind):
    """A chunk asks for its neighbours, and a document is in one split, if there are three."""
    pytest.importorskip("sentencex")
    texts = [
        "\n\n".join(f"Text {i} has {j} as number, and " + "more words " * 12 for j in range(9))
        for i in range(5)
    ]
    data = Dataset.from_dict({"text": texts})
    source: object = tmp_path / f"a.{kind}"
    if kind == "rows":
        source = data.to_list()
    elif kind == "folder":
        source = write(tmp_path, **{f"{i}__md": text for i, text in enumerate(texts)})
    elif kind == "txt":
        write(tmp_path, a__txt=texts[0])
    else:
        data.to_csv(source)
    splits = load_splits(source)
    assert "no labels" in splits.caveat
    assert not splits.drawn
    for query, document in pairs_of(splits):
        (i, j), (k, m) = (re.findall(r"Text (\d) has (\d)", text)[0] for text in (query, document))
        assert i == k
        assert abs(int(j) - int(m)) == 1
    assert len(splits["train"].corpus) == (9 if kind == "txt" else 45)
    of_split = [{text[:6] for text in splits[name].queries.values()} for name in splits]
    if kind != "txt":
        assert sorted(map(len, of_split)) == [1, 1, 3]
        assert len(set.union(*of_split)) == 5


def test_hard_cells(tmp_path):
    """Quotes, line breaks, separators, "NA" and "null" in cells, and one of 200,000 characters."""
    texts = ['a "quoted" word', "two\r\nlines; and, more", "NA", "null", "x" * 200_000]
    rows = [(text, f"about {text}") for text in texts]
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("query", "document"), *rows])
    usual = csv.field_size_limit(999)  # of the host, no earlier test's
    try:
        assert pairs_of(load_splits(tmp_path / "a.csv")) == set(rows)
        assert csv.field_size_limit() == 999
    finally:
        csv.field_size_limit(usual)


def test_names_that_are_refused():
    for columns, message in (
        ("query=query,doc=a", r"columns has doc=a, but the roles are query, .*negative\.$"),
        ("query=query,document=a", r"has document=a, but the columns are query, document\.$"),
        ("query=Query,document=a", r"are query, document\. Did you mean 'query'\?$"),
        ("query,document", r"without roles: write query=NAME,document=NAME\.$"),
    ):
        with pytest.raises(DataError, match=message):
            load_splits(ROWS, columns=columns)
    for threshold, message in ((math.inf, "finite number"), (4, "but no column has scores")):
        with pytest.raises(ValueError, match=message):
            load_splits(ROWS, threshold=threshold)
    with pytest.raises(DataError, match=r"no split 'mined'; its splits are \['train', 'dev', 'te"):
        load_splits(ROWS)["mined"]


def test_columns_lists_and_negatives():
    rows = [{"Frage": "a", "pos": ["b", "c"], "neg": ["d"], "Negative 1": None}]
    rows += [{"Frage": "e", "pos": ["f"], "neg": [], "Negative 1": "g"}]
    train = load_splits(rows, columns={"query": "Frage"})["train"]
    assert train.relevant == {"q0": {"d0": 1, "d1": 1}, "q1": {"d3": 1}}
    texts = {query: {train.corpus[d] for d in ids} for query, ids in train.negatives.items()}
    assert texts == {"q0": {"d"}, "q1": {"g"}}
    rows = [{"query": ["a", "b"], "document": "c"}, {"query": "d", "document": "e"}]
    assert pairs_of(load_splits(rows)) == {("a", "c"), ("b", "c"), ("d", "e")}


@pytest.mark.parametrize(
    ("scores", "threshold", "relevant", "negative"),
    [
        ([1, 0, -1], None, {"d0": 1}, {"d1", "d2"}),
        (["3", "1.0", "0"], None, {"d0": 3, "d1": 1}, {"d2"}),
        ([5, 4.0, 3.99], None, {"d0": 1, "d1": 1}, set()),
        ([1, 0.79, 0], None, {"d0": 1}, {"d2"}),
        ([1, 0.79, 0], 0.5, {"d0": 1, "d1": 1}, {"d2"}),
        ([1.5, -2, -4, 0], -3, {"d0": 1, "d1": 1, "d3": 1}, {"d2"}),  # logits
        ([1, -2, -4, 0], -3, {"d0": 1, "d1": 1, "d3": 1}, {"d2"}),
    ],
)
def test_scores(scores, threshold, relevant, negative):
    rows = [{"sentence1": "a", "sentence2": f"b{i}", "score": x} for i, x in enumerate(scores)]
    splits = load_splits(rows, threshold=threshold)
    assert splits["train"].relevant == {"q0": relevant}
    assert splits["train"].negatives.get("q0", set()) == negative
    assert ("a document is relevant from" in splits.notes[0]) == (scores != [1, 0, -1])


def test_given_splits(tmp_path):
    """Files by name; a query belongs to the last that has it, and what is missing is held out."""
    for name, rows in (("train", ROWS), ("test", ROWS[:3]), ("notes", ROWS[:1])):
        Dataset.from_list(rows).to_csv(tmp_path / f"{name}.csv")
    write(tmp_path, b__txt="text")
    write(tmp_path / ".ipynb_checkpoints", test__csv="query,document\nhidden,here\n")
    splits = load_splits(tmp_path)
    assert "not pairs, and are left out: 1, such as b.txt" in splits.notes.pop(0)
    assert {*splits["test"].queries.values()} == {row["query"] for row in ROWS[:3]}
    assert [len(splits[name].queries) for name in splits] == [19, 2, 3]
    assert "notes.csv, which by its name is no split" in splits.notes[0]
    assert "Moved 3 pairs" in splits.notes[1]
    rows = [row | {"split": ("train", "validation", "test")[i % 3]} for i, row in enumerate(ROWS)]
    splits = load_splits(rows)
    assert [len(splits[name].queries) for name in splits] == [8, 8, 8]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_held_out(monkeypatch, seed):
    """Queries with an answer; of them first those that are no document, and not too many.

    Of 40 queries with an answer, 20 are documents of others, and 30 queries have negatives alone.
    """
    monkeypatch.setattr("st_magnitude.workbench.files.rows.MOST_HELD_OUT", 3)
    rows = [(f"start {i}", f"middle {i}", 1) for i in range(20)]
    rows += [(f"middle {i}", f"end {i}", 1) for i in range(20)]
    rows += [(f"unanswered {i}", f"end {i % 20}", 0) for i in range(30)]
    splits = load_splits(
        [dict(zip(("query", "document", "score"), row, strict=True)) for row in rows], seed=seed
    )
    assert [len(splits[name].queries) for name in ("dev", "test")] == [3, 3]
    for name in ("dev", "test"):
        assert {text.split()[0] for text in splits[name].queries.values()} == {"start"}


@pytest.mark.parametrize("scores", [(3, 1), (1, 3), (0, 3), (3, 0), (3, 3)])
def test_of_several_judgments_the_highest_counts(scores):
    rows = [{"query": "a", "document": "b", "score": score} for score in scores]
    rows.append({"query": "a", "document": "c", "score": 2})
    splits = load_splits(rows)
    assert splits["train"].relevant == {"q0": {"d0": 3, "d1": 2}}
    assert not any(splits["train"].negatives.values())
    said = any("Left out 1 negative with another row" in note for note in splits.notes)
    assert said == (0 in scores)


TEXTS = st.sampled_from(
    ["tea", "Tea!", "TEA ", "rain", "Rain?", "C", "C++", "wax", "Ｗax", "?", "!"]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS, st.sampled_from([0, 1, 1])), min_size=2), st.integers(0, 9))
def test_nothing_leaks(pairs, seed):
    rows = [dict(zip(("query", "document", "score"), pair, strict=True)) for pair in pairs]
    if len({d for _, d, _ in pairs}) == 1 or all(q == d for q, d, score in pairs if score):
        with pytest.raises(DataError):
            load_splits(rows)
        return
    splits = load_splits(rows, seed=seed)
    asked = [{canonical(text) for text in splits[name].queries.values()} for name in splits]
    assert len(set().union(*asked)) == sum(map(len, asked))
    if "train" in splits:
        with suppress(DataError):  # all its pairs are held out
            rows = splits["train"].triplets(0)
            trained = {canonical(text) for name in rows.column_names for text in rows[name]}
            assert not trained & set().union(*asked[1:])
    for name in splits:
        assert {*splits[name].corpus.values()} == {d for _, d, _ in pairs}
        assert all(splits[name].relevant.values())


def test_queries_that_are_their_answers_are_counted():
    rows = [{"query": f"what is {i}", "document": f"it is {i}"} for i in range(20)]
    assert len(load_splits([*rows, *rows[:2]]).notes) == 1
    own = [{"query": f"that is {i}", "document": f"that is {i}"} for i in range(3)]
    (said,) = load_splits([*rows, *own]).notes[1:]
    assert said.startswith("In 3 pairs the document is the query")


def test_saved_and_read_again(tmp_path):
    rows = [row | {"score": "1"} for row in ROWS]
    splits = load_splits([*rows, rows[0] | {"document": "no", "score": "0"}])
    splits.save(tmp_path / "data")
    again = load_splits(tmp_path / "data")
    assert list(again) == ["dev", "test", "train"]
    for name in splits:
        assert again[name] == splits[name]
    assert again.relevant_documents() == splits.relevant_documents()
    assert again["dev"].corpus is again["test"].corpus
    again.check_held_out("dev", "test")
    for option in ({"threshold": 2}, {"encoding": "cp1252"}, {"sheet": "a"}):
        with pytest.raises(DataError, match="columns, threshold, encoding and sheet are of pairs"):
            load_splits(tmp_path / "data", **option)
    with pytest.raises(FileExistsError):
        splits.save(tmp_path / "data")


def test_names_of_classes_are_read_with_spaces():
    rows = [{"text": f"question {n}", "category": f"lost_card_{n % 3}"} for n in range(12)]
    splits = load_splits(rows)
    assert {*splits["train"].corpus.values()} == {"lost card 0", "lost card 1", "lost card 2"}
    rows[0]["category"] = "a text with snake_case in it"
    assert "lost_card_1" in load_splits(rows)["train"].corpus.values()


@pytest.mark.parametrize("header", ["query,document", "text,category"])
@pytest.mark.parametrize("order", [1, -1])
def test_mined_rows_join_a_file_with_other_columns(tmp_path, header, order):
    """The splits and the corpus are those of the file, whose names of classes are respelled."""
    names = [f"lost_card_{'abc'[i % 3]}" for i in range(60)]
    lines = [f"question {i},{name}" for i, name in enumerate(names)]
    (tmp_path / "pairs.csv").write_text("\n".join([header, *lines]))
    alone = load_splits(tmp_path / "pairs.csv")
    train = alone["train"]
    rows = [
        {"anchor": row["anchor"], "positive": row["positive"], "negative_1": row["negative_1"]}
        for row in train.triplets(1)
    ]
    lines = [json.dumps(row | {"split": "train"}) + "\n" for row in rows]
    (tmp_path / "mined.jsonl").write_text("".join(lines))
    both = load_splits([tmp_path / "mined.jsonl", tmp_path / "pairs.csv"][::order])
    for name in ("train", "dev", "test"):
        assert {*both[name].queries.values()} == {*alone[name].queries.values()}
        assert {*both[name].corpus.values()} == {*alone[name].corpus.values()}
    assert sum(map(len, both["train"].negatives.values())) == len(rows)
    assert not any("without text" in note for note in both.notes)

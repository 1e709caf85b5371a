"""Whatever measures a model leaves out the queries that the model was trained on."""

import inspect
import json
import logging

import pytest
from _calls import COMMANDS, taking
from _cli import figures, invoke, refusal
from _lookup import bag

import st_magnitude as stm
from st_magnitude import evaluation
from st_magnitude.data import task
from st_magnitude.data.memory import AllReadError, digest, remember
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.base import SearchEvaluator

WORDS = [f"w{i}" for i in range(400)]
READ = 150  # of 200 queries


@pytest.fixture
def model():
    model = bag(WORDS)
    remember(model, [f"W{i}  w0!" for i in range(READ)])
    return model


@pytest.fixture
def data():
    queries = {f"q{i}": f"w{i} w0" for i in range(200)}
    corpus = {f"d{i}": f"w{i} w{200 + i} w{i}" for i in range(200)}
    return RetrievalData(queries, corpus, {f"q{i}": {f"d{i}"} for i in range(200)})


@pytest.fixture
def asked(monkeypatch):
    """The queries of each encoding."""
    found = []
    encode = task.encoded

    def spy(model, data, queries, *args, **options):
        found.append(set(queries))
        return encode(model, data, queries, *args, **options)

    monkeypatch.setattr(task, "encoded", spy)
    return found


def through(kind):
    return lambda model, data: kind(data.queries, data.corpus, data.relevant)(model)


MEASURE = {
    "RetrievalData.encode": lambda m, d, **options: d.encode(m, **options),
    "calibrate_exponent": stm.calibrate_exponent,
} | {
    kind.__name__: through(kind)
    for kind in (getattr(evaluation, name) for name in evaluation.__all__)
    if isinstance(kind, type) and issubclass(kind, SearchEvaluator)
}


def test_every_function_that_measures_is_tested_here():
    names = {*stm.__all__, *evaluation.__all__}
    functions = {name: getattr(stm, name, None) or getattr(evaluation, name) for name in names}
    found = {
        name
        for name, function in functions.items()
        if callable(function) and {"model", "data"} <= inspect.signature(function).parameters.keys()
    }
    # these train, which is not measured here
    assert found - {"compare", "train"} <= MEASURE.keys()


def test_a_digest_tells_texts_that_are_cut_apart_or_in_another_order():
    texts = (
        ["ab", "c"],
        ["a", "bc"],
        ["c", "ab"],
        ["abc"],
        ["abc", ""],
        ["1:a", "b"],
        ["1", "a1:b"],
    )
    assert len({*map(digest, texts)}) == len(texts)


@pytest.mark.parametrize("name", MEASURE)
def test_no_function_measures_queries_that_the_model_has_read(name, model, data, asked, caplog):
    with caplog.at_level(logging.WARNING):
        MEASURE[name](model, data)
    assert asked == [{f"q{i}" for i in range(READ, 200)}]
    assert "Left out 150 of 200 queries, on which the model was trained." in caplog.text
    read = data.only({f"q{i}" for i in range(READ)})
    with pytest.raises(AllReadError, match="trained on all 150 queries"):
        MEASURE[name](model, read)
    caplog.clear()
    asked.clear()
    del model._texts_read
    MEASURE[name](model, data)
    assert asked == [set(data.queries)]
    assert "Left out" not in caplog.text


@pytest.mark.parametrize("name", [name for name in MEASURE if "Evaluator" not in name])
def test_what_was_read_is_measured_on_request(name, model, data, asked):
    MEASURE[name](model, data, even_read=True)
    assert asked == [set(data.queries)]


def test_nor_does_mteb(model, data, monkeypatch, tmp_path):
    pytest.importorskip("mteb")
    from st_magnitude import mteb

    asked = []
    task = mteb.retrieval_task
    monkeypatch.setattr(mteb, "retrieval_task", lambda d: asked.append(set(d.queries)) or task(d))
    model.save_pretrained(str(tmp_path / "model"))
    for reader in (model, str(tmp_path / "model"), tmp_path / "model"):
        mteb.evaluate(reader, [data])
        assert asked.pop() == {f"q{i}" for i in range(READ, 200)}


@pytest.fixture
def place(model, tmp_path):
    """A model that has read its train and dev splits, and a file with both and a test split."""
    rows = [
        {"query": f"w{i} w0", "document": f"w{max(i, 1)} " * 2, "split": part}
        for i, part in enumerate(["train"] * 60 + ["dev"] * 60 + ["test"] * 70)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model.save_pretrained(str(tmp_path / "model"))
    return {"data": tmp_path / "pairs.jsonl"}, tmp_path


MEASURING = taking("verbose", but=["compare", "search"])


def test_every_command_that_measures_is_tested_here():
    assert COMMANDS.keys() == {*MEASURING, "search", "train", "compare", "mteb", "check-serving"}


@pytest.mark.parametrize("name", MEASURING)
def test_commands_measure_the_test_split_where_dev_was_read(name, place, caplog):
    options, folder = place
    assert figures(name, folder / "model", **options).get("split", "test") == "test"
    assert "on queries of the dev split, so the test split is measured." in caplog.text
    assert "test: 40 queries" in invoke(name, folder / "model", **options).output
    caplog.clear()
    few = options["data"].with_name("few.jsonl")  # a model may have read few of many
    rows = options["data"].read_text().splitlines()
    few.write_text("\n".join(row.replace("test", "dev") for row in rows))
    assert "dev: 40 queries" in invoke(name, folder / "model", data=few).output
    (one := options["data"].with_name("read.jsonl")).write_text("\n".join(rows[:120]))
    assert "trained on all" in refusal(name, folder / "model", data=one)


def test_calibrate_does_not_confirm_on_what_has_chosen(place):
    options, folder = place
    said = refusal("calibrate", folder / "model", confirm="test", **options)
    assert "The test split chooses the exponent, as the model was trained on the dev split" in said


def test_a_second_training_is_judged_by_what_the_first_has_not_read(place, static_path):
    options, folder = place
    model = stm.load(static_path)
    remember(model, [f"w{i} w0" for i in range(READ)])
    model.save_pretrained(str(folder / "table"))
    shared = {"model": folder / "table", "max_steps": 1, "keep_anyway": True, **options}
    found = figures("train", output=folder / "out", confirm="test", **shared)
    assert found["dev"]["split"] == "test"
    assert found["dev"]["queries"] == 40
    assert "test" not in found
    found = figures(
        "compare", output=folder / "compared", budget="1s", **options, model=static_path
    )
    assert found["test"]["queries"] == 70
    said = refusal("compare", output=folder / "again", **options, model=folder / "table")
    assert "trained on all" in said

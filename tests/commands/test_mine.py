"""``st-magnitude mine``: what it writes is what load_dataset and ``st-magnitude train`` read."""

import pytest
from conftest import CORPUS, QUERIES, RELEVANT_DOCS
from datasets import load_dataset
from test_cli import invoke, report_of

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData


@pytest.fixture
def data(tmp_path):
    RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS, {"q1": {"d13"}}).save(tmp_path / "data", "train")
    return tmp_path / "data"


@pytest.fixture
def model_path(static_model, tmp_path):
    static_model.save_pretrained(str(tmp_path / "static"))
    return str(tmp_path / "static")


def test_a_mined_split_trains(data, model_path, tmp_path):
    split = data / "qrels" / "mined.tsv"
    options = (
        "--never-relevant",
        "--num-negatives",
        2,
        "--min-queries",
        1,
        "--similarity",
        "qnorm",
    )
    result = invoke("mine", model_path, "--data", data, "--output", split, *options, "--json")
    assert report_of(result) == {"split": "train", "rows": 24, "output": str(split)}
    assert f"train --data {data} --split mined --negatives 2" in result.stderr
    assert "Metric" not in result.stderr  # the table of mine_hard_negatives

    mined, split = (RetrievalData.from_beir(data, name) for name in ("mined", "train"))
    options = {"similarity": "qnorm", "never_relevant": True, "num_negatives": 2, "min_queries": 1}
    expected = stm.mine_negatives(stm.load(model_path), split, **options)
    assert {query: set(grades) for query, grades in mined.relevant.items()} == RELEVANT_DOCS
    for query, documents in mined.negatives.items():
        texts = {row["negative"] for row in expected if row["anchor"] == QUERIES[query]}
        judged = {CORPUS["d13"]} if query == "q1" else set()  # stays a negative
        assert {CORPUS[document] for document in documents} == texts | judged

    place = (
        "--data",
        data,
        "--split",
        "mined",
        "--model",
        model_path,
        "--output",
        tmp_path / "trained",
    )
    trained = invoke("train", *place, "--negatives", 2, "--batch-size", 4, "--max-steps", 2)
    assert trained.exit_code == 0, trained.output


def test_answers_of_other_splits_are_not_never_relevant(data, model_path, tmp_path):
    RetrievalData(QUERIES, CORPUS, {"q1": CORPUS.keys()}).save_qrels(data / "qrels" / "test.tsv")
    options = ("--output", tmp_path / "rows.jsonl", "--never-relevant", "--min-queries", 1)
    assert invoke("mine", model_path, "--data", data, *options).exit_code == 2


@pytest.mark.parametrize(("ending", "kind"), [("parquet", "parquet"), ("jsonl", "json")])
def test_rows_for_load_dataset(data, model_path, tmp_path, ending, kind):
    output = tmp_path / "new" / f"rows.{ending}"
    options = ("--relative-margin", 0.05, "--num-negatives", 1)
    result = invoke("mine", model_path, "--data", data, "--output", output, *options)
    assert result.exit_code == 0, result.output
    loaded = load_dataset(
        kind, data_files=str(output), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded.column_names == ["anchor", "positive", "negative"]
    split = RetrievalData.from_beir(data, "train")
    assert list(loaded) == list(
        stm.mine_negatives(stm.load(model_path), split, num_negatives=1, relative_margin=0.05)
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--output", "rows.csv"), "must end in .parquet, .jsonl or .tsv; got rows.csv"),
        (("--output", "{data}/qrels/train.tsv"), "exists. Choose another --output"),
        (("--output", "rows.jsonl", "--split", "valid"), "no qrels/valid.tsv"),
    ],
)
def test_what_cannot_be_used_is_refused(data, model_path, arguments, says):
    result = invoke(
        "mine", model_path, "--data", data, *(argument.format(data=data) for argument in arguments)
    )
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())

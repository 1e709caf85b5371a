"""``train --prior`` and the candidate ``cosine-prior`` of compare, where one document answers most
queries."""

import json
import random
import zlib
from dataclasses import replace

import pytest
import torch
from _tiny import load_transformer, save_transformer
from conftest import CORPUS, QUERIES, RELEVANT_DOCS
from sentence_transformers import SentenceTransformer
from test_cli import invoke, report_of

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.finetune.run import TrainConfig, train

pytestmark = pytest.mark.usefixtures("one_thread")

NOUNS = (
    "bread bicycle cat tomato sofa wine carpet tea leaf autumn river bridge horse piano lamp forest"
    " engine"
)
PLACES = "kitchen garden cellar harbour market library station castle meadow office attic"


def task(split: str, number: int, seed: int) -> RetrievalData:
    """Two of three queries ask for the manual, whatever their words, and the others for the page
    about their noun."""
    draw, nouns, places = random.Random(seed), NOUNS.split(), PLACES.split()
    corpus = {"manual": "See the manual first.", **{noun: f"All about a {noun}." for noun in nouns}}
    queries, relevant = {}, {}
    for i in range(number):
        text = ""
        while zlib.crc32(text.encode()) % 3 != seed or not text:  # no text is in two splits
            noun = draw.choice(nouns)
            text = f"the {noun} in the {draw.choice(places)} {draw.choice(places)}"
        queries[f"{split}{i}"] = text
        relevant[f"{split}{i}"] = {"manual" if draw.random() < 2 / 3 else noun}
    return RetrievalData(queries, corpus, relevant, name=f"manuals, {split} split")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    numbers = {"train": 240, "dev": 60, "test": 100}
    parts = {split: task(split, number, i) for i, (split, number) in enumerate(numbers.items())}
    everything = {query: text for part in parts.values() for query, text in part.queries.items()}
    replace(parts["train"], queries=everything).save(place, "train")
    for split in ("dev", "test"):
        parts[split].save_qrels(place / "qrels" / f"{split}.tsv")
    return place


@pytest.fixture
def model_path(static_model, tmp_path):
    static_model.save_pretrained(str(tmp_path / "static"))
    return tmp_path / "static"


def test_a_model_that_was_trained_with_the_prior_ranks_by_it_without_any_help(
    folder, model_path, tmp_path
):
    fit = (
        "train",
        "--data",
        folder,
        "--model",
        model_path,
        "--epochs",
        8,
        "--learning-rate",
        0.03,
        "--json",
    )
    plain = report_of(invoke(*fit, "--output", tmp_path / "plain"))
    done = invoke(*fit, "--output", tmp_path / "prior", "--prior")
    figures = report_of(done)
    assert plain["prior"] is None
    assert figures["dev"]["saved"]["ndcg"] > plain["dev"]["saved"]["ndcg"] + 0.05
    counts = task("train", 240, 0).relevant.values()
    most = sum("manual" in relevant for relevant in counts)
    assert (
        f"18 documents in 240 pairs, of which the most frequent one has {most} (logQ correction)"
        in figures["prior"]
    )
    assert figures["prior"] in " ".join(done.stderr.split())
    record = json.loads((tmp_path / "prior" / "training.json").read_text())
    assert record["prior"] == {"texts": 18, "negatives": None, "smoothing": 1.0}
    assert (
        f"### Document prior\n\n{figures['prior']}"
        in (tmp_path / "prior" / "README.md").read_text()
    )
    model = SentenceTransformer(str(tmp_path / "prior"))  # with stock modules only
    assert model.encode(["tea"]).shape == (1, 256)


def test_equal_counts_change_nothing_and_are_left_out(model_path, tmp_path):
    data = RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS)
    states = []
    for prior in (False, True):
        done = train(
            str(model_path),
            data,
            tmp_path / str(prior),
            TrainConfig(max_steps=2, batch_size=4, prior=prior),
        )
        states.append(done.trainer.model.state_dict())
    assert done.trainer.loss.prior is None
    assert (
        done.prior
        == "All 12 documents are equally often positives. A prior changes nothing and was left out."
    )
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_texts_are_known_by_the_tokens_that_training_reads(tmp_path, caplog):
    """And negatives are counted by themselves."""
    model = load_transformer(save_transformer(tmp_path / "tiny"))
    data = task("train", 40, 0)
    data = replace(
        data, negatives={q: {"tea"} - set(data.relevant[q]) for q in list(data.queries)[:20]}
    )
    done = train(
        model,
        data,
        tmp_path / "out",
        TrainConfig(max_steps=1, batch_size=8, prior=True, max_length=4),
    )
    assert done.trainer.loss.prior.get_config_dict()["negatives"] >= 1
    assert not [record for record in caplog.records if "contains none" in record.message]


def test_compare_tries_it_where_documents_differ_in_frequency(folder, model_path, tmp_path):
    options = (
        "--losses",
        "cosine-prior",
        "--temperatures",
        0.05,
        "--learning-rates",
        0.03,
        "--sigreg",
        0,
    )
    place = ("--data", folder, "--model", model_path, "--output", tmp_path / "out")
    figures = report_of(invoke("compare", *place, *options, "--epochs", 8, "--json"))
    names = [f"{loss} tau=0.05 lr=0.03" for loss in ("cosine-prior", "cosine")]
    assert [entry["name"] for entry in figures["candidates"]] == names
    assert figures["winner"] == names[0]
    assert "It is scored by cosine" in figures["recommendation"]
    assert "prior: true" in (tmp_path / "out" / "train.yaml").read_text()

"""The prior in train and compare, where one document answers most queries."""

import json
import random
import zlib
from dataclasses import replace

import pytest
import torch
from _cli import figures
from _tiny import load_transformer, save_transformer
from conftest import CORPUS, QUERIES, RELEVANT_DOCS
from sentence_transformers import SentenceTransformer

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.workbench.comparison.compare import CompareConfig, compare
from st_magnitude.workbench.finetune.train import TrainConfig, train

NOUNS = (
    "bread bicycle cat tomato sofa wine carpet tea leaf autumn river bridge horse piano lamp forest"
    " engine"
)
PLACES = "kitchen garden cellar harbour market library station castle meadow office attic"


def task(split: str, number: int, seed: int) -> RetrievalData:
    """Two of three queries ask for the manual, and the others for the page about their noun."""
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


@pytest.mark.parametrize(
    ("kind", "states"), [("train", "euclidean"), ("train", "dot"), ("compare", "euclidean")]
)
def test_a_model_of_distances_is_trained_by_cosine(kind, states, tmp_path, static_path):
    """Both say so, once; `compare` leaves the model as it was given."""
    model = SentenceTransformer(str(static_path), similarity_fn_name=states, device="cpu")
    parts = {name: task(name, 60, i) for i, name in enumerate(("train", "dev", "test"))}
    said: list[str] = []
    if kind == "train":
        config = TrainConfig(max_steps=1, folds=0)
        train(model, parts, tmp_path / "new", config, say=said.append)
    else:
        losses = {"losses": ["cosine"], "learning_rates": [0.01], "temperatures": [0.05]}
        config = CompareConfig(max_steps=1, **losses)
        compare(model, parts, tmp_path / "new", config, say=said.append)
        assert model.similarity_fn_name == states
    told = [line for line in said if "euclidean -> cosine, because" in line]
    assert len(told) == (states == "euclidean")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    numbers = {"train": 240, "dev": 60, "test": 200}
    parts = {split: task(split, number, i) for i, (split, number) in enumerate(numbers.items())}
    everything = {query: text for part in parts.values() for query, text in part.queries.items()}
    replace(parts["train"], queries=everything).save(place, "train")
    for split in ("dev", "test"):
        parts[split].save_qrels(place / "qrels" / f"{split}.tsv")
    return place


def test_train_records_the_prior_and_saves_stock_modules(folder, static_path, tmp_path):
    options = {"data": folder, "model": static_path, "max_steps": 2, "keep_anyway": True}
    figures("train", **options, output=tmp_path / "prior", prior=True)
    record = json.loads((tmp_path / "prior" / "training.json").read_text())
    assert record["prior"] == {"texts": 18, "negatives": None, "smoothing": 1.0}
    model = SentenceTransformer(str(tmp_path / "prior"))  # with stock modules only
    assert model.encode(["tea"]).shape == (1, 64)


def test_equal_counts_change_nothing_and_are_left_out(static_path, tmp_path, caplog):
    data, weights = RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS), []
    for prior in (False, True):
        config = TrainConfig(max_steps=2, batch_size=4, prior=prior)
        done = train(str(static_path), data, tmp_path / str(prior), config)
        weights.append(done.trainer.model[0].embedding.weight)
    assert done.trainer.loss.prior is None
    assert caplog.text.count("All 12 documents are equally often positives") == 1
    assert torch.equal(*weights)


def test_texts_are_known_by_the_tokens_that_training_reads(tmp_path, caplog):
    """And negatives are counted by themselves."""
    model = load_transformer(save_transformer(tmp_path / "tiny"))
    data = task("train", 40, 0)
    judged = {q: {"tea"} - set(data.relevant[q]) for q in list(data.queries)[:20]}
    config = TrainConfig(max_steps=1, batch_size=8, prior=True, max_length=4, folds=0)
    done = train(model, replace(data, negatives=judged), tmp_path / "out", config)
    assert done.trainer.loss.get_config_dict()["prior"]["negatives"] >= 1
    assert "does not contain" not in caplog.text


@pytest.mark.slow
def test_compare_tries_it_where_documents_differ_in_frequency(folder, static_path, tmp_path):
    """A model that was trained with it ranks by it without any help, clearly better."""
    options = {"losses": "cosine-prior", "temperatures": 0.05, "learning_rates": 0.03}
    place = {"data": folder, "model": static_path, "output": tmp_path / "out"}
    # a large batch would learn the prior from its copies
    found = figures("compare", **place, **options, batch_size=4, epochs=5)
    names = [f"{loss} tau=0.05 lr=0.03" for loss in ("cosine-prior", "cosine")]
    assert [entry["name"] for entry in found["candidates"]] == names
    prior, plain = (entry["curve"][-1][1] for entry in found["candidates"])
    assert prior > plain + 0.05
    assert found["winner"] == names[0]
    assert "--prior\n" in (tmp_path / "out" / "compare.md").read_text()

"""No text of a training row is a query that judges the model: every source, every way to judge."""

import copy
import itertools
import random
import re
import weakref

import numpy as np
import pytest
from _lookup import tokenizer_of
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

import st_magnitude as stm
from st_magnitude.data.beir import DataError
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.workbench.comparison.config import CompareConfig
from st_magnitude.workbench.finetune.train import TrainConfig, train
from st_magnitude.workbench.judging import contestants, verdict

WORDS = [f"w{i}" for i in range(60)]


def spelled(text):
    """Another way to one spelling, for words of ASCII."""
    return " ".join(re.findall("[a-z0-9]+", text.lower()))


def texts(number, rng):
    return [" ".join(rng.sample(WORDS, 3)) for _ in range(number)]


def one_way(rng):
    return list(zip(texts(60, rng), texts(60, rng), strict=True))


def both_ways(rng):
    pairs = list(zip(texts(30, rng), texts(30, rng), strict=True))
    return pairs + [pair[::-1] for pair in pairs]


def chain(rng):
    links = texts(60, rng)
    return list(itertools.pairwise(links))


def spelled_otherwise(rng):
    pairs = both_ways(rng)
    return [(a.upper() + "?", f"{b}  {'!' * 40}") for a, b in pairs]


def one_hub(rng):
    """Every other query is a document of the query before it, and of one that many have."""
    links = chain(rng)
    return links + [(query, links[0][0]) for query, _ in links[::2]]


SHAPES = [one_way, both_ways, chain, spelled_otherwise, one_hub]
FORMS = ["pairs", "BEIR"]
BY_DEFAULT = [(spelled_otherwise, "pairs"), (one_hub, "BEIR")]
CASES = [
    pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.slow)
    for case in itertools.product(SHAPES, FORMS)
]


@pytest.fixture
def table():
    weights = np.random.default_rng(0).normal(size=(len(WORDS) + 1, 8)).astype(np.float32)
    module = StaticEmbedding(tokenizer_of(WORDS), embedding_weights=weights)
    return SentenceTransformer(modules=[module])


@pytest.fixture
def judged(monkeypatch):
    """The texts on which each model was trained, next to the queries that it was asked later."""
    rows_of = weakref.WeakKeyDictionary()
    found = []
    run = SentenceTransformerTrainer.train
    encode, decide = contestants.encode, verdict.decide

    def spied_train(trainer, *args, **options):
        rows = trainer.train_dataset
        rows_of[trainer.model] = {spelled(x) for name in rows.column_names for x in rows[name]}
        return run(trainer, *args, **options)

    def spied_encode(model, data, *args, **options):
        if model in rows_of and "only" not in options:  # the norms of a sample judge nothing
            found.append((rows_of[model], {spelled(text) for text in data.asked.values()}))
        return encode(model, data, *args, **options)

    monkeypatch.setattr(SentenceTransformerTrainer, "train", spied_train)
    monkeypatch.setattr(contestants, "encode", spied_encode)
    monkeypatch.setattr(  # the trained model is saved, which folds alone would not train
        verdict, "decide", lambda systems, *_: decide([one for one in systems if one.base])
    )
    return found


def splits_of(shape, form, seed, folder):
    rng = random.Random(seed)
    pairs = shape(rng)
    rows = [{"query": q, "document": d, "score": 1} for q, d in pairs]
    judged = set(pairs)
    for query, _ in pairs[::3]:  # explicit negatives, of which some are queries of other splits
        other = rng.choice(pairs)[rng.randrange(2)]
        if other != query and (query, other) not in judged:
            rows.append({"query": query, "document": other, "score": 0})
    splits = stm.load_splits(rows, seed=seed)
    if form == "BEIR":
        splits.save(folder)
        splits = stm.load_splits(folder)
    return splits


@pytest.mark.parametrize(("shape", "form"), CASES)
def test_no_query_that_judges_a_model_is_a_text_of_its_training(
    table, judged, shape, form, tmp_path
):
    splits = splits_of(shape, form, 0, tmp_path / "data")
    splits.drawn = {"dev", "test"}
    for number, options in enumerate(
        ({"folds": 3}, {"folds": 0}, {"folds": 2, "negatives": 2}, {"folds": 0, "negatives": 1})
    ):
        options |= {"max_steps": 1, "batch_size": 2, "keep_anyway": True, "confirm": "test"}
        output = tmp_path / str(number)
        found = train(copy.deepcopy(table), splits, output, TrainConfig(**options))
        assert found.confirmed.queries > 0
        _, asked = judged[-1]  # the saved model on test
        assert asked == {spelled(text) for text in splits["test"].asked.values()}
    assert len(judged) >= 3 + 1 + 2 + 2 + 1 + 2
    assert all(rows for rows, _ in judged)
    assert not [asked & rows for rows, asked in judged if asked & rows]


@pytest.mark.parametrize(
    ("shape", "form"),
    [
        (one_hub, "held out by compare"),
        pytest.param(one_hub, "pairs", marks=pytest.mark.slow),
        pytest.param(both_ways, "BEIR", marks=pytest.mark.slow),
    ],
)
def test_nor_of_a_candidate_of_compare(table, judged, shape, form, tmp_path):
    splits = splits_of(shape, form, 1, tmp_path / "data")
    data = splits["train"] if form == "held out by compare" else splits
    config = CompareConfig(
        losses=("cosine", "qnorm"), temperatures=(0.1,), learning_rates=(0.01,), max_steps=2,
        batch_size=2, negatives=1,
    )  # fmt: skip
    stm.compare(table, data, tmp_path / "out", config, say=lambda text: None)
    assert len(judged) >= 3
    assert not [asked & rows for rows, asked in judged if asked & rows]


def test_every_drawn_negative_of_every_split_keeps_apart(tmp_path):
    for seed in range(30):
        shape = SHAPES[seed % len(SHAPES)]
        splits = splits_of(shape, ("pairs", "BEIR")[seed % 2], seed, tmp_path / str(seed))
        later = [splits[name].queries.values() for name in ("dev", "test")]
        for name, others in (("train", later), ("dev", later[1:])):
            rows = splits[name].triplets(3, seed)
            found = {spelled(text) for column in rows.column_names for text in rows[column]}
            assert not found & {spelled(text) for queries in others for text in queries}


def test_what_is_held_out_from_two_parts_stays_held_out_from_both():
    pairs = [("a", "b"), ("b", "c"), ("c", "d"), ("e", "f")]
    queries = {query: query for query, _ in pairs}
    corpus = {text: text for pair in pairs for text in pair}
    data = RetrievalData(queries, corpus, {query: {document} for query, document in pairs})
    first = data.only({"a"}).apart_from(data.only({"b", "c"}))
    second = data.only({"b", "e"}).apart_from(data.only({"c"}))
    rows = first.joined(second).triplets(0)
    assert {(row["anchor"], row["positive"]) for row in rows} == {("a", "b"), ("e", "f")}
    with pytest.raises(DataError, match="held out for a measurement"):
        first.triplets(0)

"""No text of a training row is a query that judges the model: every source, every way to judge."""

import copy
import random
import re
import weakref
from itertools import pairwise

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import st_magnitude as stm
from st_magnitude.comparison.config import CompareConfig
from st_magnitude.data.beir import DataError
from st_magnitude.data.memory import keys_of, read_by
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.finetune.train import TrainConfig, train

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
    return list(pairwise(links))


def spelled_otherwise(rng):
    pairs = both_ways(rng)
    return [(a.upper() + "?", f"{b}  {'!' * 40}") for a, b in pairs]


def one_hub(rng):
    """Every other query is a document of the query before it, and of one that many have."""
    links = chain(rng)
    return links + [(query, links[0][0]) for query, _ in links[::2]]


SHAPES = [one_way, both_ways, chain, spelled_otherwise, one_hub]
SLOW = [pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[:3]]


@pytest.fixture
def table():
    vocabulary = {word: i for i, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    weights = np.random.default_rng(0).normal(size=(len(vocabulary), 8)).astype(np.float32)
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights)])


@pytest.fixture
def judged(monkeypatch):
    """The texts on which each model was trained, next to the queries that it was asked later."""
    rows_of = weakref.WeakKeyDictionary()
    found = []
    run = SentenceTransformerTrainer.train
    encode = RetrievalData.encode

    def spied_train(trainer, *args, **options):
        rows = trainer.train_dataset
        rows_of[trainer.model] = {spelled(x) for name in rows.column_names for x in rows[name]}
        return run(trainer, *args, **options)

    def spied_encode(data, model, *args, **options):
        if model in rows_of and "only" not in options:  # the norms of a sample judge nothing
            found.append((rows_of[model], {spelled(text) for text in data.asked.values()}))
        return encode(data, model, *args, **options)

    monkeypatch.setattr(SentenceTransformerTrainer, "train", spied_train)
    monkeypatch.setattr(RetrievalData, "encode", spied_encode)
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


@pytest.mark.parametrize("form", ["pairs", "BEIR"])
@pytest.mark.parametrize("shape", [*SLOW, *SHAPES[3:]], ids=lambda shape: shape.__name__)
def test_no_query_that_judges_a_model_is_a_text_of_its_training(
    table, judged, shape, form, tmp_path
):
    splits = splits_of(shape, form, 0, tmp_path / "data")
    shared = {"also_relevant": splits.relevant_documents(), "test": splits["test"]}
    for number, options in enumerate(
        ({"folds": 5}, {"folds": 0}, {"folds": 2, "negatives": 2}, {"folds": 0, "negatives": 1})
    ):
        config = TrainConfig(max_steps=1, batch_size=2, keep_anyway=True, **options)
        output = tmp_path / str(number)
        data = {"dev": splits["dev"], "dev_is_drawn": True, **shared}
        found = train(copy.deepcopy(table), splits["train"], output, config, **data)
        assert found.confirmed.queries > 0
        _, asked = judged[-1]  # the saved model on test
        assert asked == {spelled(text) for text in splits["test"].asked.values()}
    assert len(judged) >= 5 + 1 + 2 + 2 + 1 + 2
    assert all(rows for rows, _ in judged)
    assert not [asked & rows for rows, asked in judged if asked & rows]


@pytest.mark.parametrize("form", ["pairs", "BEIR", "held out by compare"])
@pytest.mark.parametrize("shape", [SLOW[1], one_hub], ids=lambda shape: shape.__name__)
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
    for seed in range(60):
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


def test_a_model_remembers_what_it_has_read(table, tmp_path):
    splits = splits_of(both_ways, "pairs", 2, tmp_path)
    config = TrainConfig(max_steps=1, batch_size=2, folds=0, keep_anyway=True)
    trained = train(table, splits["train"], tmp_path / "out", config)
    rows = trained.trainer.train_dataset
    expected = np.unique(keys_of(text for name in rows.column_names for text in rows[name]))
    for model in (table, stm.load(tmp_path / "out"), str(tmp_path / "out")):
        assert np.array_equal(read_by(model), expected)
    stm.export(stm.load(tmp_path / "out"), tmp_path / "again")
    assert np.array_equal(read_by(str(tmp_path / "again")), expected)
    (tmp_path / "again" / "texts_read.u64").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"texts_read\.u64, the hashes .* is damaged"):
        stm.load(tmp_path / "again")

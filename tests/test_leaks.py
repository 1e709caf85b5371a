"""No text of a training row is a query that judges the model: every source, every way to judge."""

import copy
import itertools
import random
import re
import weakref
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from huggingface_hub import HfApi, RepoUrl
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import st_magnitude as stm
from st_magnitude.data.beir import DataError
from st_magnitude.data.memory import MEMORY, AllReadError, keys_of, read_by
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.training.run_folder import WORK
from st_magnitude.workbench.comparison.config import CompareConfig
from st_magnitude.workbench.finetune.train import TrainConfig, train

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


@pytest.fixture
def uploaded(monkeypatch):
    """The files that pushes to the hub would send."""
    found = []
    additions = HfApi._prepare_upload_folder_additions

    def spy(*args, **options):
        found.extend(operation.path_in_repo for operation in additions(*args, **options))
        return []

    monkeypatch.setattr(HfApi, "_prepare_upload_folder_additions", spy)
    monkeypatch.setattr(HfApi, "_validate_yaml", lambda *_, **__: None)  # of the card, by the hub
    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **__: RepoUrl("some/model"))
    for place in ("_upload_pipeline.pipelined_upload", "hf_api.HfApi.create_commit"):
        monkeypatch.setattr(f"huggingface_hub.{place}", lambda *_, **__: Mock(), raising=False)
    return found


def test_a_model_remembers_what_it_has_read_and_tells_nobody(table, tmp_path, caplog, uploaded):
    rng = random.Random(2)
    pairs = zip(texts(90, rng), texts(90, rng), strict=True)  # of which nothing can be learned
    splits = stm.load_splits([{"query": a, "document": b} for a, b in pairs])
    config = TrainConfig(
        max_steps=2, save_steps=1, folds=0, keep_anyway=True, keep_checkpoints=True
    )
    trained = train(table, splits["train"], tmp_path / "out", config)
    rows = trained.trainer.train_dataset
    expected = np.unique(keys_of(text for name in rows.column_names for text in rows[name]))
    known = stm.load(tmp_path / "out")
    known.save_pretrained(str(tmp_path / "copy"))
    checkpoint = next((tmp_path / "out" / WORK).glob("checkpoint-*"))
    loaded = [stm.load(path) for path in (tmp_path / "copy", checkpoint)]
    for model in (table, known, *loaded, copy.deepcopy(known), str(tmp_path / "out")):
        assert np.array_equal(read_by(model), expected)
    with pytest.raises(AllReadError):
        splits["train"].encode(known)
    assert len(splits["train"].encode(known, even_read=True).query_ids) == len(
        splits["train"].asked
    )
    train(known, splits["dev"], tmp_path / "again", config)
    assert np.isin(expected, read_by(str(tmp_path / "again"))).all()  # not the second one alone
    assert len(read_by(known)) > len(expected)

    stm.export(known, tmp_path / "export")
    assert not [path for path in (tmp_path / "export").rglob("*") if path.name == Path(MEMORY).name]
    known.push_to_hub("some/model")
    HfApi().upload_folder(repo_id="some/model", folder_path=tmp_path / "out")
    assert uploaded.count("modules.json") == 2
    assert not [name for name in uploaded if Path(MEMORY).name in name]
    for path in ("out", "export"):  # a table that does not know from where it was loaded
        caplog.clear()
        stock = SentenceTransformer(str(tmp_path / path))
        splits["dev"].encode(stock)
        splits["dev"].encode(stock)
        assert caplog.text.count("texts, and nothing here says on which") == 1
    assert "Their hashes stay in the folder" in (tmp_path / "export" / "README.md").read_text()
    (tmp_path / "copy" / MEMORY).write_bytes(b"torn")
    with pytest.raises(DataError, match=r"texts_read\.u64, the hashes .* is damaged"):
        stm.load(tmp_path / "copy")

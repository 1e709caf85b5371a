"""Short runs: the figures for the card, the warm-up, how often a text is read, and the prior, where
one document answers most queries."""

import random
import zlib
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from _lookup import bag
from _tiny import load_transformer, save_transformer
from conftest import CORPUS, QUERIES, RELEVANT_DOCS
from sentence_transformers import SentenceTransformer

import st_magnitude as stm
from st_magnitude import geometry
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.surgery import raw
from st_magnitude.workbench.comparison.compare import CompareConfig, compare
from st_magnitude.workbench.finetune.save import NUM_DOCUMENTS, card_figures
from st_magnitude.workbench.finetune.train import TrainConfig, train
from st_magnitude.workbench.judging.exam import Exam

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
def test_compare_tries_it_where_documents_differ_in_frequency(static_path, tmp_path):
    """A model that was trained with it ranks by it without any help, clearly better."""
    numbers = {"train": 240, "dev": 60, "test": 200}
    parts = {split: task(split, number, i) for i, (split, number) in enumerate(numbers.items())}
    config = CompareConfig(losses=["cosine-prior"], temperatures=[0.05], learning_rates=[0.03])
    # a large batch would learn the prior from its copies
    config = replace(config, batch_size=4, epochs=5)
    found = compare(str(static_path), parts, tmp_path / "out", config)
    prior, plain = found.candidates
    assert (prior.candidate.loss, plain.candidate.loss) == ("cosine-prior", "cosine")
    assert prior.score > plain.score + 0.05
    assert found.winner is prior
    assert "--prior\n" in (tmp_path / "out" / "compare.md").read_text()


def test_figures_of_a_sample_for_a_card():
    words = [f"word{i}" for i in range(60)]
    model = bag(words)
    corpus = {f"{word}-{n}": " ".join([word] * n) for word in words for n in (1, 4, 6)}
    relevant = {word: {f"{word}-4"} for word in words}
    task = RetrievalData(dict(zip(words, words, strict=True)), corpus, relevant)
    answers = {"word0-4", "word1-4"}
    exam = Exam(task, answers=answers)
    found = card_figures(model, exam, seed=0)
    among = stm.encode(model, task, before_normalize=True)
    assert card_figures(model, exam, 0, among) == found
    assert found["document_norm_mean"] == geometry.norms(among.documents).mean()
    assert found["document_norm_mean"] == pytest.approx((1 + 4 + 6) / 3)
    assert "cohens_d" in found
    assert "cohens_d" not in card_figures(model, Exam(task), 0, among)
    corpus = {f"{i}": "word0 " * (1 + i % 50) for i in range(2 * NUM_DOCUMENTS)}
    data = RetrievalData({"q": "word0"}, corpus, {"q": {"0"}})
    figures = [card_figures(model, Exam(data), seed)["document_norm_mean"] for seed in (0, 1)]
    assert figures[0] != figures[1]


@pytest.mark.parametrize("steps", [1, 2, 11])
def test_a_warm_up_leaves_a_step_that_trains(static_path, tmp_path, steps):
    """The first step of a warm-up of one step has the rate 0."""
    before = stm.load(static_path)[0].embedding.weight.clone()
    config = TrainConfig(max_steps=steps, batch_size=4, learning_rate=0.1, folds=0)
    data = RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS)
    trainer = train(str(static_path), data, tmp_path / "out", config).trainer
    assert not torch.equal(trainer.model[0].embedding.weight.cpu(), before)
    assert trainer.args.get_warmup_steps(steps) == min(-(-steps // 10), steps - 1)


@pytest.fixture
def splits():
    names = ["".join(letters) for letters in permutations("abcde", 3)]
    rows = [{"query": f"{name}?", "document": f"{name}, {name}"} for name in names]
    return stm.load_splits(rows)


@pytest.mark.parametrize("folds", [0, 3])
def test_folds_training_and_measuring_tokenize_a_text_once(static_path, tmp_path, splits, folds):
    model = stm.load(str(static_path))
    read = []

    class Counts:
        def __init__(self, tokenizer):
            self.tokenizer = tokenizer

        def __getattr__(self, name):
            return getattr(self.tokenizer, name)

        def __deepcopy__(self, memo):
            return self

        def encode_batch(self, texts, **options):
            read.extend(texts)
            return self.tokenizer.encode_batch(texts, **options)

    model[0].tokenizer = Counts(model[0].tokenizer)
    config = TrainConfig(max_steps=2, batch_size=4, folds=folds, confirm="test", keep_anyway=True)
    train(model, splits, tmp_path / "out", config)
    texts = {text for data in splits.values() for text in data.queries.values()}
    texts |= {*splits["train"].corpus.values()}
    assert sorted(text for text in read if text in texts) == sorted(texts)
    assert isinstance(model[0].tokenizer, Counts)


def test_a_corpus_is_encoded_once_for_dev_and_test(model, tmp_path, splits, monkeypatch):
    """By the model and another one, before the training, and by the model after it."""
    sides = []

    def encode_raw(model, texts, role, *args, **options):
        sides.append((role, len(texts)))
        return raw.encode_raw(model, texts, role, *args, **options)

    monkeypatch.setattr("st_magnitude.data.task.encode_raw", encode_raw)
    other = tmp_path / "other"
    model.save_pretrained(str(other))
    config = TrainConfig(
        max_steps=1, batch_size=4, confirm="test", folds=0, keep_anyway=True, keep_scoring=True
    )
    trained = train(model, splits, tmp_path / "out", config, also=[str(other)])
    assert sides.count(("document", 60)) == 3
    assert sides.count(("query", 6)) == 6
    after = stm.encode(trained.trainer.model, splits["test"]).search()
    first = trained.confirmed.rows[0]
    if first.name == "the trained model":
        assert first.ndcg == pytest.approx(after.mean, abs=1e-9)

"""Short runs: the figures for the card, the warm-up, and how often a text is read."""

from itertools import permutations

import pytest
import torch
from _lookup import bag
from conftest import CORPUS, QUERIES, RELEVANT_DOCS

import st_magnitude as stm
from st_magnitude import geometry
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.surgery import raw
from st_magnitude.workbench.finetune.save import NUM_DOCUMENTS, card_figures
from st_magnitude.workbench.finetune.train import TrainConfig, train
from st_magnitude.workbench.judging.exam import Exam


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

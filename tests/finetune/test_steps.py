"""A run of one step trains, and a document is an answer of another split if it is the same text."""

import pytest
import torch
from conftest import CORPUS, QUERIES, RELEVANT_DOCS

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.finetune.train import TrainConfig, train


@pytest.mark.parametrize("steps", [1, 2, 11])
def test_a_warm_up_leaves_a_step_that_trains(static_path, tmp_path, steps):
    """The first step of a warm-up of one step has the rate 0."""
    before = stm.load(static_path)[0].embedding.weight.clone()
    config = TrainConfig(max_steps=steps, batch_size=4, learning_rate=0.1, folds=0)
    data = RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS)
    trainer = train(str(static_path), data, tmp_path / "out", config).trainer
    assert not torch.equal(trainer.model[0].embedding.weight.cpu(), before)
    assert trainer.args.get_warmup_steps(steps) == min(-(-steps // 10), steps - 1)


@pytest.mark.parametrize("is_same", [True, False])
def test_ids_of_other_texts_answer_nothing(static_path, tmp_path, is_same):
    """All documents of no training query answer a test query, or texts of the same ids do."""
    others = CORPUS.keys() - set().union(*RELEVANT_DOCS.values())
    texts = {i: text if is_same else f"not {text}" for i, text in CORPUS.items()}
    data = RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS)
    test = RetrievalData(
        {f"t-{i}": f"which is {i}?" for i in others}, texts, {f"t-{i}": {i} for i in others}
    )
    config = TrainConfig(max_steps=1, batch_size=4, folds=0)
    found = train(str(static_path), data, tmp_path / "out", config, test=test)
    assert ("cohens_d" in found.geometry["after"]) != is_same

"""The trained model next to the pretrained one: which exponent is chosen, and what is said."""

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import BoW

from st_magnitude.data.retrieval import DataError, RetrievalData
from st_magnitude.finetune.baseline import Baseline
from st_magnitude.finetune.measure import NUM_DOCUMENTS, Found, Sample
from st_magnitude.finetune.settings import TrainConfig
from st_magnitude.finetune.verdict import Verdict, changes_of

NUMBER = 60  # fewer queries get a warning


@pytest.fixture(scope="module")
def planted():
    """q·d/|d|^gamma of (4, 3), the relevant document, beats that of (6, 30) by cosine and of (1, 0)
    by dot only."""
    words, queries, corpus, relevant = [], {}, {}, {}
    for i in range(NUMBER):
        words += [f"word{i}", f"filler{i}"]
        queries[f"q{i}"], relevant[f"q{i}"] = f"word{i}", {f"right{i}"}
        for name, count, fillers in (("short", 1, 0), ("right", 4, 3), ("long", 6, 30)):
            corpus[f"{name}{i}"] = " ".join([f"word{i}"] * count + [f"filler{i}"] * fillers)
    model = SentenceTransformer(modules=[BoW(words)], similarity_fn_name="dot", device="cpu")
    return model, RetrievalData(queries, corpus, relevant)


def judged(model: SentenceTransformer, task: RetrievalData, **config) -> Verdict:
    """The verdict on a model that did not change."""
    baseline = Baseline(model, task, task, (), TrainConfig(**config))
    verdict, _ = baseline.compare()
    return verdict


def test_a_fractional_exponent_is_chosen_where_it_is_clearly_better(planted):
    model, task = planted
    found = judged(model, task)
    assert found.pretrained == pytest.approx(1 / np.log2(3))  # second, by dot
    assert found.as_trained.exponent == 0.0
    assert found.as_trained.ndcg == pytest.approx(1 / np.log2(3))
    assert 0 < found.saved.exponent < 1
    assert found.saved.ndcg == 1.0
    assert found.is_better
    assert (found.gained, found.lost) == (NUMBER, 0)
    assert "exponent" in found.caveat
    assert "Better: +36.9 points" in found.headline("dev")
    assert "(saved)" in str(found)

    kept = judged(model, task, keep_scoring=True)
    assert kept.saved == kept.as_trained
    assert kept.best == found.best
    assert not kept.is_better
    assert "--keep-scoring" not in kept.advice()  # the same as the pretrained one
    assert "No clear difference" in kept.headline("dev")

    modules = [*model, Normalize()]
    normalised = SentenceTransformer(modules=modules, similarity_fn_name="cosine", device="cpu")
    found = judged(normalised, task)
    assert found.saved == found.as_trained  # it has one scoring
    assert found.saved.exponent == 1.0
    assert found.to_dict()["best"] is None


def test_a_tie_keeps_the_scoring_of_the_loss(planted):
    model, task = planted
    few = task.only({f"q{i}" for i in range(3)})
    found = judged(model, few)  # too few queries for a difference
    assert found.saved == found.as_trained
    assert found.curve["0.5"] > found.saved.ndcg


def test_bm25_and_its_fusion_stand_in_the_verdict(planted):
    model, task = planted
    found = judged(model, task, keep_scoring=True)
    bm25, fused = found.controls
    assert bm25.name == "BM25"
    assert fused.name == "trained + BM25"
    assert bm25.gain[0] == pytest.approx(found.saved.ndcg - bm25.ndcg)
    assert ("BM25, which needs no training, is better" in found.headline("dev")) == (
        bm25.gain[2] < 0
    )


def test_the_largest_gain_the_median_change_and_the_largest_loss_are_shown():
    values = {"a": 0.0, "b": 0.5, "c": 0.5, "d": 1.0, "e": 0.3}
    task = RetrievalData(dict(zip(values, values, strict=True)), {"x": "X"}, {})
    before = Found(values, dict.fromkeys(values, "x"))
    after = Found({"a": 1.0, "b": 0.6, "c": 0.5, "d": 0.2, "e": 0.3}, dict.fromkeys(values, ""))
    changes = changes_of(before, after, task)
    assert [change.query for change in changes] == ["a", "b", "d"]
    assert (changes[0].before, changes[0].after) == ("X", "nothing")
    assert changes_of(before, before, task) == ()


def test_sample_for_a_card(planted):
    corpus = {f"d{i}": f"text {i}" for i in range(2 * NUM_DOCUMENTS)}
    answers = {f"d{i}" for i in range(0, 2 * NUM_DOCUMENTS, 3)}
    data = RetrievalData({"q": "which?"}, corpus, {"q": {"d0"}})
    sample = Sample(data, answers, seed=0)
    assert sample.documents != Sample(data, answers, seed=1).documents
    assert len(sample.documents) == NUM_DOCUMENTS
    assert [document in answers for document in sample.documents] == list(sample.is_relevant)
    model, task = planted
    sample = Sample(task, (), seed=0)
    alone = sample.embeddings(sample.encode(model))
    among = sample.embeddings(task.encode(model, before_normalize=True))
    assert all((alone[role] == among[role]).all() for role in alone)
    with pytest.raises(DataError, match="one document"):
        Sample(RetrievalData({"q": "which?"}, {"d": "one"}, {"q": {"d"}}), (), seed=0)


def test_other_grades_are_other_data():
    """A comparison that continues would mix figures of two gains otherwise."""
    one, other, same = (
        RetrievalData({"q": "who?"}, {"d": "he", "e": "she"}, {"q": relevant})
        for relevant in ({"d": 1, "e": 2}, {"d": 1, "e": 1}, {"e": 1, "d": 1})
    )
    assert one.digest != other.digest == same.digest

"""The trained model next to the pretrained one: which exponent is chosen, and what is said."""

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import BoW

from st_magnitude import geometry
from st_magnitude.data.retrieval import DataError, RetrievalData
from st_magnitude.finetune.baseline import Baseline
from st_magnitude.finetune.measure import NUM_DOCUMENTS, Found, card_figures
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


def test_figures_of_a_sample_for_a_card(planted):
    model, task = planted
    found = card_figures(model, task, {"right0", "right1"}, seed=0)
    among = task.encode(model, before_normalize=True)
    assert card_figures(model, task, {"right0", "right1"}, 0, among) == found
    assert found["document_norm_mean"] == geometry.norms(among.documents).mean()
    assert "cohens_d" in found
    assert "cohens_d" not in card_figures(model, task, {}, 0, among)
    corpus = {f"{i}": "word0 " * (1 + i % 50) for i in range(2 * NUM_DOCUMENTS)}
    data = RetrievalData({"q": "word0"}, corpus, {"q": {"0"}})
    assert len({card_figures(model, data, {}, seed)["document_norm_mean"] for seed in (0, 1)}) == 2
    with pytest.raises(DataError, match="one document"):
        judged(model, RetrievalData({"q": "which?"}, {"d": "one"}, {"q": {"d"}}))


def test_other_grades_are_other_data():
    """A comparison that continues would mix figures of two gains otherwise."""
    one, other, same = (
        RetrievalData({"q": "who?"}, {"d": "he", "e": "she"}, {"q": relevant})
        for relevant in ({"d": 1, "e": 2}, {"d": 1, "e": 1}, {"e": 1, "d": 1})
    )
    assert one.digest != other.digest == same.digest

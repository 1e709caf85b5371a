"""The trained model next to the pretrained one: which exponent is chosen, and what is said."""

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import BoW

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.finetune.verdict import judge_model, own_ndcg

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


def test_a_fractional_exponent_is_chosen_where_it_is_clearly_better(planted):
    model, task = planted
    pretrained = own_ndcg(model, task)
    np.testing.assert_allclose(pretrained, 1 / np.log2(3))  # second, by dot
    found = judge_model(model, task, pretrained, keep_scoring=False, seed=0)
    assert found.as_trained.exponent == 0.0
    assert found.as_trained.ndcg == pytest.approx(1 / np.log2(3))
    assert 0 < found.saved.exponent < 1
    assert found.saved.ndcg == 1.0
    assert found.is_better
    assert "exponent" in found.caveat
    assert found.caveat in str(found)

    kept = judge_model(model, task, pretrained, keep_scoring=True, seed=0)
    assert kept.saved == kept.as_trained
    assert kept.best == found.best
    assert not kept.is_better
    assert "--keep-scoring" not in kept.summary("dev")  # the same as the pretrained one

    modules = [*model, Normalize()]
    normalised = SentenceTransformer(modules=modules, similarity_fn_name="cosine", device="cpu")
    found = judge_model(normalised, task, np.zeros(NUMBER), keep_scoring=False, seed=0)
    assert found.saved == found.as_trained  # it has one scoring
    assert found.saved.exponent == 1.0
    assert found.to_dict()["best"] is None


def test_other_grades_are_other_data():
    """A comparison that continues would mix figures of two gains otherwise."""
    one, other, same = (
        RetrievalData({"q": "who?"}, {"d": "he", "e": "she"}, {"q": relevant})
        for relevant in ({"d": 1, "e": 2}, {"d": 1, "e": 1}, {"e": 1, "d": 1})
    )
    assert one.digest != other.digest == same.digest

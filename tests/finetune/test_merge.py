"""Weights between the base and the trained model: the path, what may differ, and how the weight is
chosen."""

from __future__ import annotations

import json
from copy import deepcopy

import numpy as np
import pytest
import torch
from _cli import figures
from _tiny import load_transformer, save_transformer
from conftest import CORPUS, QUERIES, RELEVANT_DOCS, save_splits
from peft import LoraConfig
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router
from sentence_transformers.sentence_transformer.modules import BoW

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.metrics import scoring_of
from st_magnitude.finetune.run import TrainConfig, train
from st_magnitude.modules import ExponentNorm

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*queries are few"),
]

DATA = RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS, name="task")
TEXTS = list(QUERIES.values())


def trained(model):
    """A copy whose parameters all differ, as after a training."""
    other = deepcopy(model)
    for parameter in other.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return other


def at(model, base, weight, **options):
    return stm.merge_with_base(model, base, DATA, weights=[weight], **options).model


def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_ends_are_the_base_and_the_model_bit_for_bit(model, dtype):
    model = model.to(dtype)
    other = trained(model)
    before, after = deepcopy(model), deepcopy(other)
    assert same(at(other, model, 0.0), model)
    assert same(at(other, model, 1.0), other)
    assert same(model, before)
    assert same(other, after)


@pytest.mark.parametrize("weight", [0.25, 0.5, 0.7])
def test_the_way_between_them_is_a_line(model, weight):
    other = trained(model)
    assert_between(at(other, model, weight), model, other, weight)


def assert_between(merged, base, model, weight):
    for name, parameter in merged.named_parameters():
        start, end = base.get_parameter(name).double(), model.get_parameter(name).double()
        torch.testing.assert_close(
            parameter.double(), (1 - weight) * start + weight * end, rtol=1e-5, atol=1e-7
        )


def test_lora_is_scaled_and_stays_an_adapter(model, tmp_path):
    other, by_hand = deepcopy(model), deepcopy(model)
    other.add_adapter(LoraConfig(r=2, lora_alpha=6, target_modules=["q_lin", "v_lin"]))
    for name, parameter in other.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    merged = at(other, model, 0.3)
    with torch.no_grad():
        for layer, changed in zip(
            by_hand[0].model.transformer.layer, other[0].model.transformer.layer, strict=True
        ):
            for name in ("q_lin", "v_lin"):
                adapted = getattr(changed.attention, name)
                delta = adapted.lora_B["default"].weight @ adapted.lora_A["default"].weight * 6 / 2
                getattr(layer.attention, name).weight += 0.3 * delta
    np.testing.assert_allclose(merged.encode(TEXTS), by_hand.encode(TEXTS), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(at(other, model, 0.0).encode(TEXTS), model.encode(TEXTS))
    np.testing.assert_array_equal(at(other, model, 1.0).encode(TEXTS), other.encode(TEXTS))
    assert np.abs(merged.encode(TEXTS) - other.encode(TEXTS)).max() > 0.01


def test_what_divides_by_a_norm_is_that_of_the_trained_model(model):
    base = stm.prepare(model, "cosine")
    other = stm.prepare(trained(base), stm.Similarity(1.0, 0.4))
    merged = at(other, base, 0.5)
    assert isinstance(merged[-1], ExponentNorm)
    assert merged[-1].gamma_document == pytest.approx(0.4)
    raw = stm.strip_normalize(deepcopy(base))
    at_base = stm.strip_normalize(at(other, base, 0.0))
    np.testing.assert_array_equal(at_base.encode(TEXTS), raw.encode(TEXTS))
    back = at(base, other, 0.0)  # the other way round
    assert isinstance(back[-1], Normalize)
    assert same(stm.strip_normalize(back), stm.strip_normalize(deepcopy(other)))


def test_routes_are_merged_with_routes():
    def routed(*end):
        torch.manual_seed(0)
        names = ("query", "document")
        routes = {name: [Dense(3, 3, activation_function=None), *end] for name in names}
        modules = [BoW(["tea", "cat", "bread"]), Router(routes, "document")]
        return SentenceTransformer(modules=modules, device="cpu")

    base, other = routed(Normalize()), trained(routed())
    assert_between(at(other, base, 0.5), base, other, 0.5)


def test_what_does_not_match_is_named(model, folder, tmp_path):
    dora = deepcopy(model)
    dora.add_adapter(LoraConfig(r=2, target_modules=["q_lin"], use_dora=True))
    longer = SentenceTransformer(modules=[*model, Dense(32, 8)], device="cpu")
    other = load_transformer(save_transformer(tmp_path, dim=16))
    for one, base, named in (
        (model, load_transformer(folder, "cls"), r"^1 modules or parameters .* such as 1\."),
        (model, other, r"embeddings\.word_embeddings\.weight"),
        (model, longer, r"such as 2, 2\.linear\.weight"),
        (dora, model, "lora_magnitude_vector"),
    ):
        with pytest.raises(ValueError, match=named):
            stm.merge_with_base(one, base, DATA)
    with pytest.raises(ValueError, match=r"lie in \[0, 1\]"):
        stm.merge_with_base(model, model, DATA, weights=[0.5, 1.5])


# --- the choice -----------------------------------------------------------------------------------


WORDS = ("a", "b", "far", "right", "wrong")


def ranker(**margins):
    """By dot, a query scores the right document higher than the wrong one by its margin."""
    head = Dense(5, 5, bias=False, activation_function=None)
    head.linear.weight.data = torch.eye(5)
    for word, margin in margins.items():
        head.linear.weight.data[3, WORDS.index(word)] = margin
    modules = [BoW(list(WORDS)), head]
    return SentenceTransformer(modules=modules, similarity_fn_name="dot", device="cpu")


def asks(*queries):
    texts, corpus = {query: query for query in queries}, {"right": "right", "other": "wrong"}
    return RetrievalData(texts, corpus, {query: {"right"} for query in queries})


def test_the_weight_is_the_best_on_the_data_that_keeps_the_others(caplog):
    base, model = ranker(a=-1, far=-9, b=3), ranker(a=3, far=1, b=-2)
    data, keep = asks("a", "far"), asks("b")
    assert stm.merge_with_base(model, base, data).weight == 1.0
    # of equal ones, the nearest to the base
    assert stm.merge_with_base(model, base, asks("a")).weight == 0.5
    found = stm.merge_with_base(model, base, data, [keep])
    assert found.weight == 0.5
    second = 1 / np.log2(3)
    half = (1 + second) / 2
    np.testing.assert_allclose(found.ndcg[0].mean(axis=1), [second, second, half, half, 1.0])
    np.testing.assert_allclose(found.ndcg[1][:, 0], [1.0, 1.0, 1.0, second, second])
    np.testing.assert_allclose([x.mean() for x in found.base], [second, 1.0])
    torch.testing.assert_close(found.model[1].linear.weight[3, :2], torch.tensor([1.0, 0.5]))
    assert stm.merge_with_base(model, base, data, [keep], max_loss=0.5).weight == 1.0
    assert "0.01 nDCG@10" not in caplog.text
    assert stm.merge_with_base(model, base, data, [keep], weights=[0.75, 1]).weight == 1.0
    assert "0.01 nDCG@10" in caplog.text


def test_with_calibrate_every_weight_has_its_own_exponent(model):
    base, other = stm.prepare(model, "cosine"), stm.prepare(trained(model), "dot")
    found = stm.merge_with_base(other, base, DATA, weights=[0.5, 1.0], calibrate=True)
    for row, weight in enumerate((0.5, 1.0)):
        curve = stm.calibrate_exponent(at(other, base, weight), DATA)
        assert found.exponents[row] == curve.best
        np.testing.assert_array_equal(
            found.ndcg[0][row], curve.per_query[curve.exponents == curve.best][0]
        )
    encoded = DATA.encode(found.model)
    chosen = list(found.weights).index(found.weight)
    similarity = stm.Similarity(1.0, found.exponents[chosen])
    np.testing.assert_array_equal(encoded.ndcg(encoded.top(similarity)), found.ndcg[0][chosen])
    assert scoring_of(found.model).exponents[1] == pytest.approx(similarity.exponents[1])
    with pytest.raises(ValueError, match="normalises its embeddings"):
        stm.merge_with_base(base, base, DATA, calibrate=True)


# --- in training ----------------------------------------------------------------------------------


def test_train_saves_the_merged_model(data_folder, static_path, tmp_path):
    keep = save_splits(tmp_path / "other", "dev")
    place = {"data": data_folder, "model": static_path, "loss": "qnorm", "learning_rate": 0.1}
    place |= {"max_steps": 4, "batch_size": 4, "keep_scoring": True}
    plain = figures("train", **place, output=tmp_path / "plain", keep_anyway=True)
    assert "merge" not in plain
    (tmp_path / "train.yaml").write_text(f"merge: true\nkeep_data: [{keep}, {data_folder}]\n")
    found = figures("train", **place, output=tmp_path / "out", config=tmp_path / "train.yaml")
    merge = found["merge"]
    names = ["data, dev split", "other, dev split", "data, dev split"]
    assert [one["name"] for one in merge["data"]] == names
    assert merge["weights"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    row = merge["weights"].index(merge["weight"])
    assert found["dev"]["saved"]["ndcg"] == pytest.approx(merge["data"][0]["ndcg@10"][row])
    assert found["dev"]["weight"] == merge["weight"]
    assert json.loads((tmp_path / "out" / "training.json").read_text())["merge"] == merge
    card = (tmp_path / "out" / "README.md").read_text()
    assert "### Merged with the base" in card
    assert f"| merged at {merge['weight']:g}, dot (as trained, saved) |" in card
    places = (static_path, tmp_path / "plain", tmp_path / "out")
    before, after, merged = (stm.load(path)[0].embedding.weight for path in places)
    torch.testing.assert_close(merged, torch.lerp(before, after, merge["weight"]))
    again = figures("train", **place, output=tmp_path / "again", merge=True, keep_data=keep)
    assert len(again["merge"]["data"]) == 2


def test_merging_needs_data_to_choose_by(model, tmp_path):
    with pytest.raises(ValueError, match="--merge"):
        train(model, DATA, tmp_path / "out", TrainConfig(merge=True))
    with pytest.raises(ValueError, match=r"\(--keep-data\) are for merge=True"):
        train(model, DATA, tmp_path / "out", keep=[DATA])


def test_a_trained_model_is_copied_and_saved(model, tmp_path):
    base = deepcopy(model)
    train(model, DATA, tmp_path / "out", TrainConfig(max_steps=1, batch_size=4))
    merged = stm.merge_with_base(model, base, DATA, weights=[0.5]).model
    assert merged.model_card_data is not model.model_card_data
    stm.export(merged, tmp_path / "merged")
    loaded = stm.load(tmp_path / "merged")
    np.testing.assert_allclose(loaded.encode(TEXTS), merged.encode(TEXTS), atol=1e-6)

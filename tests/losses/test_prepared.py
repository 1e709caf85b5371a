"""What a loss changes in the model that it is built for: its end, and how it is scored."""

from functools import partial

import pytest
import torch
from _losses import features
from _surgery import encode, head, routes, types
from _tiny import ROWS, load_transformer
from _trainer import make_trainer
from sentence_transformers import InputExample, SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import Dropout
from torch.utils.data import DataLoader

import st_magnitude as stm
from st_magnitude.modules import ExponentNorm

HALF = stm.Similarity(1.0, 0.5)
RAW_GAUSSIAN = [(stm.SIGReg(8, scale=None), 0.1)]  # whose target has norms near sqrt(D)
WITH_NORMS = {
    "dot": stm.DotRankingLoss,
    "qnorm": stm.QNormRankingLoss,
    "dnorm": stm.DNormRankingLoss,
    "learnable": stm.LearnableNormLoss,
    "half": partial(stm.MagnitudeRankingLoss, similarity=HALF),
    "TempAgg": partial(stm.TempAggLoss, similarity="qnorm"),
    "SIGReg": partial(stm.CosineRankingLoss, regularizers=RAW_GAUSSIAN),
    "MSE dot": partial(stm.SimilarityMSELoss, similarity="dot"),
}
every_loss = pytest.mark.parametrize("build", WITH_NORMS.values(), ids=WITH_NORMS)


def value(loss, model):
    labels = torch.ones(3) if isinstance(loss, stm.SimilarityMSELoss) else None
    torch.manual_seed(0)
    found = loss(features(model, 3), labels)
    return sum(found.values()) if isinstance(found, dict) else found


@every_loss
def test_a_loss_removes_normalize_and_says_so_once(folder, caplog, build):
    raw, model = load_transformer(folder), load_transformer(folder).append(Normalize())
    expected = value(build(raw), raw)
    assert not caplog.records
    loss = build(model)
    [said] = caplog.records
    assert "has removed Normalize from the end of the model" in said.message
    assert f"is scored by {model.similarity_fn_name} from now on" in said.message
    build(model)
    loss.model = load_transformer(folder).append(Normalize())  # as with model_init
    for prepared in (model, loss.model):
        assert (types(prepared), prepared.similarity_fn_name) == (
            types(raw),
            raw.similarity_fn_name,
        )
    assert [x.message for x in caplog.records] == [said.message]
    torch.testing.assert_close(value(loss, loss.model), expected)


@pytest.mark.parametrize("build", [stm.CosineRankingLoss, stm.TempAggLoss, stm.SimilarityMSELoss])
def test_a_loss_of_directions_changes_no_module(model, caplog, build):
    model.append(Normalize())
    before = encode(model)
    value(build(model), model)
    assert types(model)[-1] == "Normalize"
    assert torch.equal(encode(model), before)
    assert not caplog.records


@every_loss
def test_a_loss_that_is_thrown_away_can_be_undone(model, build):
    model.append(Normalize())
    before, function = encode(model), model.similarity_fn_name
    build(model)
    stm.prepare(model, "cosine")
    assert torch.equal(encode(model), before)
    assert model.similarity_fn_name == function


def cut(model):
    model.append(Normalize()).truncate_dim = 8


def one_sided(model):
    model.append(routes(head(Normalize()), head()))


def one_side_frozen(model):
    model.append(routes(head(Normalize()), head(Normalize())))
    model[-1].sub_modules["document"].requires_grad_(False)


REFUSED = {
    cut: "cut to truncate_dim=8 after it",
    one_sided: "on some of its routes",
    one_side_frozen: "the route 'document' is frozen",
}


@every_loss
@pytest.mark.parametrize("change", REFUSED)
def test_where_only_the_user_can_decide(model, change, build):
    """The error names a call that helps, and the model is as it was."""
    change(model)
    before = types(model), str(model), model.similarity_fn_name
    with pytest.raises(ValueError, match=REFUSED[change]) as refused:
        build(model)
    assert (types(model), str(model), model.similarity_fn_name) == before
    call = str(refused.value).split("Call ")[1].split(" before")[0]
    build(eval(call, {"stm": stm, "model": model}))


@pytest.mark.parametrize(
    ("change", "message", "options"),
    [
        (lambda model: model.append(Dropout(0.1)), "followed by Dropout", {}),
        (lambda model: model.requires_grad_(False), "no weights that training could change", {}),
        (lambda model: model, r"\[33\] exceed", {"terms": [stm.Term(33)]}),
    ],
)
def test_what_cannot_be_prepared_is_not_changed(model, change, message, options):
    change(model.append(Normalize()))
    before = types(model), model.similarity_fn_name
    with pytest.raises(ValueError, match=message):
        stm.QNormRankingLoss(model, **options)
    assert (types(model), model.similarity_fn_name) == before


def test_both_sides_of_a_router(model):
    model.append(routes(head(Normalize()), head(Normalize())))
    stm.QNormRankingLoss(model)
    assert [len(route) for route in model[-1].sub_modules.values()] == [1, 1]


def test_exponents_behind_normalize_go_on(model):
    model.extend([Normalize(), ExponentNorm(0.2, 0.7)])
    assert stm.LearnableNormLoss(model).similarity.exponents == pytest.approx((0.2, 0.7))
    assert types(model) == ["Transformer", "Pooling", "ExponentNorm"]


def test_a_frozen_model_can_learn_the_exponents_alone(model):
    model.append(Normalize()).requires_grad_(False)
    loss = stm.LearnableNormLoss(model)
    value(loss, model).backward()
    assert all(parameter.grad for parameter in model[-1].parameters())


@pytest.mark.parametrize("order", [1, -1])
def test_losses_of_one_trainer_that_disagree_about_normalize(model, caplog, order):
    model.append(Normalize())
    classes = [stm.QNormRankingLoss, stm.CosineRankingLoss][::order]
    for loss in [loss_class(model) for loss_class in classes]:
        value(loss, model)
    assert types(model) == ["Transformer", "Pooling"]
    assert "Give all losses of a Trainer the same similarity" in caplog.text


@pytest.mark.parametrize("way", ["fit", "Trainer", "model_init"])
def test_one_line_trains_a_model_that_ended_in_normalize(folder, tmp_path, monkeypatch, way):
    """What is saved keeps the norms, and is scored by them."""
    monkeypatch.chdir(tmp_path)  # fit() puts checkpoints there
    model = load_transformer(folder).append(Normalize())
    loss = stm.QNormRankingLoss(model)
    if way == "fit":
        rows = [InputExample(texts=list(row[:2])) for row in ROWS]
        loader = DataLoader(rows, batch_size=8)
        model.fit([(loader, loss)], epochs=1, warmup_steps=0, show_progress_bar=False)
    elif way == "Trainer":
        make_trainer(model, loss, tmp_path, max_steps=2).train()
    else:
        make = lambda: load_transformer(folder).append(Normalize())  # noqa: E731
        trainer = make_trainer(None, loss, tmp_path, max_steps=2, model_init=make)
        trainer.train()
        model = trainer.model
    model.save_pretrained("model")
    saved = SentenceTransformer("model", device="cpu")
    assert (types(saved), saved.similarity_fn_name) == (["Transformer", "Pooling"], "dot")
    assert encode(saved).norm(dim=1).std() > 0.1
    torch.testing.assert_close(encode(saved), encode(model.cpu()))

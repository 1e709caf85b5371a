"""Models that do not normalise: what they give, and what open_clip loads of them."""

import copy
import logging

import pytest
import torch
from _open_clip_tiny import MODELS, WORDS, batch, clip, custom_text, resnet
from torch import nn
from transformers import MT5Config, RobertaConfig

import st_magnitude as stm

KINDS = pytest.mark.parametrize("kind", MODELS)


@KINDS
@pytest.mark.parametrize("output_dict", [True, False], ids=["dict", "tuple"])
def test_forward_differs_by_the_lengths_alone(kind, output_dict):
    model = MODELS[kind](output_dict).eval()
    inputs = batch(model)
    stock = model(*inputs)
    assert stm.clip.unnormalize(model) is model
    raw = model(*inputs)
    assert type(raw) is type(stock)
    if output_dict:
        assert list(raw) == list(stock)
        raw, stock = raw.values(), stock.values()
    (images, texts, *others), (unit_images, unit_texts, *expected) = raw, stock
    torch.testing.assert_close(others, expected)
    torch.testing.assert_close(
        (images, texts), (model.encode_image(inputs[0]), model.encode_text(inputs[1]))
    )
    for features, unit in ((images, unit_images), (texts, unit_texts)):
        lengths = features.norm(dim=1, keepdim=True)
        assert (lengths - 1).abs().min() > 0.01
        torch.testing.assert_close(features / lengths, unit)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_one_side_alone_and_logits(kind):
    model = stm.clip.unnormalize(MODELS[kind]().eval())
    images, texts = batch(model)
    out, image_only, text_only = model(images, texts), model(images), model(None, texts)
    assert image_only["text_features"] is text_only["image_features"] is None
    torch.testing.assert_close(image_only["image_features"], out["image_features"])
    torch.testing.assert_close(text_only["text_features"], out["text_features"])
    expected = out["logit_scale"] * out["image_features"] @ out["text_features"].T
    expected = expected + out.get("logit_bias", 0.0)
    image_logits, text_logits = model.get_logits(images, texts)
    torch.testing.assert_close((image_logits, text_logits), (expected, expected.T))


def test_a_model_is_copied_and_pickled(tmp_path):
    model = stm.clip.unnormalize(stm.clip.unnormalize(clip().eval()))
    torch.save(model, tmp_path / "model")
    inputs = batch(model)
    for copied in (copy.deepcopy(model), torch.load(tmp_path / "model", weights_only=False)):
        torch.testing.assert_close(copied(*inputs), model(*inputs))


@KINDS
def test_rescale_output_divides_by_the_mean_norm(kind):
    model = stm.clip.unnormalize(MODELS[kind]().double().eval())
    images, texts = batch(model, 9)
    images = images.double()
    before, state = model(images, texts), copy.deepcopy(model.state_dict())
    assert stm.clip.rescale_output(model, images, texts) is model
    after = model(images, texts)
    for name in ("image_features", "text_features"):
        mean = before[name].norm(dim=1).mean()
        assert abs(mean - 1) > 0.01
        torch.testing.assert_close(after[name], before[name] / mean)
    changed = [name for name, x in model.state_dict().items() if not torch.equal(x, state[name])]
    assert all("proj" in name for name in changed)
    assert len(changed) == (3 if kind == "resnet" else 2)  # SigLIP's text bias begins at 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rescale_output_without_a_probe_takes_nothing_from_the_generator(dtype):
    model = stm.clip.unnormalize(clip().eval()).to(dtype)
    state = torch.get_rng_state()
    stm.clip.rescale_output(model)
    assert torch.equal(torch.get_rng_state(), state)
    images, texts = batch(model, 64)
    for embeddings in (model.encode_image(images.to(dtype)), model.encode_text(texts)):
        assert 0.8 < embeddings.float().norm(dim=1).mean() < 1.25


def test_rescale_output_measures_in_training_mode_and_leaves_statistics_alone():
    model = stm.clip.unnormalize(resnet())
    images, texts = batch(model, 16)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    assert any("running_mean" in name for name in buffers)
    in_eval = model.eval().encode_image(images).norm(dim=1).mean()
    in_training = copy.deepcopy(model).train().encode_image(images).norm(dim=1).mean()
    assert (in_eval / in_training - 1).abs() > 0.01
    stm.clip.rescale_output(model.train(), images, texts)
    assert model.training
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    torch.testing.assert_close(
        model.encode_image(images).norm(dim=1).mean().item(), 1.0, rtol=1e-4, atol=0
    )


def test_rescale_output_says_so_when_a_tower_has_no_projection(caplog):
    model = custom_text().eval()
    model.visual.proj = None
    images, texts = batch(model)
    before = model.encode_image(images)
    with caplog.at_level(logging.WARNING):
        stm.clip.rescale_output(model, images, texts)
    assert f"stays {before.norm(dim=1).mean().item():.4g}" in caplog.text
    torch.testing.assert_close(model.encode_image(images), before)
    torch.testing.assert_close(model.encode_text(texts).norm(dim=1).mean().item(), 1.0)


def test_what_is_not_known_or_cannot_be_scaled_is_refused():
    with pytest.raises(TypeError, match="is not one of the open_clip models"):
        stm.clip.unnormalize(nn.Linear(2, 2))
    model = custom_text().eval()
    model.visual.proj = model.text.text_projection = None
    with pytest.raises(ValueError, match="no tower"):
        stm.clip.rescale_output(model)

    model = clip().eval()
    nn.init.zeros_(model.visual.proj)
    before = model.text_projection.clone()
    with pytest.raises(ValueError, match="mean norms"):
        stm.clip.rescale_output(model)
    assert torch.equal(model.text_projection, before)


SMALL = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWERS = [  # 20 positions that begin at 2; any number of tokens
    RobertaConfig(**SMALL, intermediate_size=16, max_position_embeddings=20),
    MT5Config(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2),
]


@pytest.mark.parametrize("proj", ["mlp", "linear"])
@pytest.mark.parametrize("tower", TOWERS, ids=["roberta", "mt5"])
def test_rescale_output_probes_text_towers_of_transformers(tower, proj, tmp_path):
    tower.save_pretrained(tmp_path)
    text = {"hf_model_name": str(tmp_path), "hf_model_pretrained": False, "hf_proj_type": proj}
    model = custom_text(text=text | {"hf_pooler_type": "mean_pooler"}).eval()
    before = copy.deepcopy(model.text.proj.state_dict())
    stm.clip.rescale_output(stm.clip.unnormalize(model))
    *_, (name, last) = model.text.proj.state_dict().items()
    assert not torch.equal(last, before[name])
    assert torch.isfinite(last).all()

"""Adapters of peft: merged into the weights, and saved in them by export."""

import shutil
from copy import deepcopy

import numpy as np
import pytest
import torch
from _surgery import DOCUMENTS
from _tiny import load_transformer, save_transformer
from peft import LoraConfig
from torch import nn

import st_magnitude as stm
from st_magnitude.surgery.adapters import merge_lora


def config(**options):
    return LoraConfig(r=2, target_modules=["q_lin", "v_lin"], lora_dropout=0.0, **options)


def trained(folder, **options):
    """A model whose adapter has learned something."""
    model = load_transformer(folder)
    model.add_adapter(config(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True},
        {"modules_to_save": ["output_layer_norm"]},
        {"modules_to_save": ["embeddings"]},  # of which two children have the same name in part
        {"trainable_token_indices": [5, 6, 7, 30]},
    ],
    ids=str,
)
def test_merged_and_exported_models_are_plain(tmp_path, options):
    base = save_transformer(tmp_path / "base")
    model = trained(base, **options)
    expected, layers = model.encode(DOCUMENTS), [*model.modules()]
    exported = stm.export(model, tmp_path / "exported")
    assert [*model.modules()] == layers
    merge_lora(model).save_pretrained(str(tmp_path / "merged"))
    shutil.rmtree(base)
    for saved in (model, stm.load(exported), stm.load(tmp_path / "merged")):
        np.testing.assert_allclose(saved.encode(DOCUMENTS), expected, rtol=0, atol=1e-5)
        assert not any("peft" in type(module).__module__ for module in saved.modules())


def test_an_adapter_whose_base_has_moved_is_not_called_absent(tmp_path):
    base = save_transformer(tmp_path / "base")
    trained(base).save_pretrained(str(tmp_path / "adapter"))
    shutil.rmtree(base)
    with pytest.raises(
        OSError, match=r"adapter' is incomplete, or is an adapter whose base has moved.*base"
    ):
        stm.load(tmp_path / "adapter")


def test_quantized_models_are_refused_before_they_change(folder):
    model = trained(folder)
    layer = model[0].model.transformer.layer[-1].ffn.lin2  # behind layers that could be changed
    layer.weight = nn.Parameter((layer.weight * 100).to(torch.int8), requires_grad=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"lin2.*without quantization"):
        merge_lora(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_under_an_adapter_rounds_nothing_away(folder, tmp_path, caplog, dtype):
    """A short training moves weights by less than a step of the stored ones."""
    model = load_transformer(folder).to(dtype)
    before = model.float().encode(DOCUMENTS)
    model.to(dtype).add_adapter(config(init_lora_weights=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(1e-3)
    exact = deepcopy(model).float()
    moved = exact.encode(DOCUMENTS) - before
    merged = merge_lora(deepcopy(model))
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.float32}
    exported = stm.load(stm.export(model, tmp_path / "exported"))
    assert f"{str(dtype)[6:]} would round away" in caplog.text
    for found in (merged, exported):
        np.testing.assert_allclose(found.encode(DOCUMENTS) - before, moved, atol=1e-5)
    lost = np.abs(merged.to(dtype).float().encode(DOCUMENTS) - before - moved).max()
    assert lost > 0.05 * np.abs(moved).max()


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("transformers.__version__", "5.5.4"),  # which loses adapters
        ("transformers.integrations.peft.MIN_PEFT_VERSION", "9"),
    ],
)
def test_versions_that_do_not_fit_are_refused(monkeypatch, name, version):
    monkeypatch.setattr(name, version)
    with pytest.raises(ValueError, match=r"do not train LoRA together.*pip install \"\.\[revela\]"):
        stm.revela.lora_config()

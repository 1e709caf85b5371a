"""Every save loads what it wrote, and keeps nothing that embeds texts in another way."""

import itertools

import pytest
import torch
from _lookup import bag
from _surgery import DOCUMENTS, routes
from _tiny import load_transformer, save_transformer
from _trainer import train
from peft import LoraConfig
from sentence_transformers.base.modules import Dense, Module, Normalize
from test_export import contents
from test_ways import by_run_folder, with_adapter

import st_magnitude as stm
from st_magnitude._upstream import forget_adapter
from st_magnitude.saving import export as saving


class Forgetful(Module):
    """Multiplies embeddings by a number that it does not save."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, features, **_):
        return features | {"sentence_embedding": self.factor * features["sentence_embedding"]}

    def save(self, output_path, *_, **options):
        pass

    @classmethod
    def load(cls, *_, **options):
        if cls.is_broken:
            raise RuntimeError("no module")
        return cls()

    is_broken = False


def words(*more):
    return bag(["x", "see", "prime"], *more, similarity="cosine")


def replace(model, folder):
    stm.export(model, folder, overwrite=True)


@pytest.mark.parametrize("save", [stm.export, by_run_folder, replace])
@pytest.mark.parametrize(
    ("factor", "is_broken", "said"),
    [
        (1.001, False, r"is not the model in memory.* differ by up to 0.001 of their norm"),
        (1.0, True, "cannot be loaded again .*no module"),
        (torch.nan, False, "embeddings are not finite"),
    ],
)
def test_what_differs_is_not_kept(tmp_path, monkeypatch, save, factor, is_broken, said):
    folder = tmp_path / "model"
    if save is replace:
        stm.export(words(), folder)
    before = contents(tmp_path)
    monkeypatch.setattr(Forgetful, "is_broken", is_broken)
    with pytest.raises(ValueError, match=said):
        save(words(Forgetful(factor)), folder)
    assert contents(tmp_path) == before
    monkeypatch.setattr(Forgetful, "is_broken", False)
    save(words(Forgetful()), folder)  # a class of one's own is no reason


@pytest.mark.parametrize("side", [0, 1])
def test_both_sides_are_compared(tmp_path, side):
    """By the given texts, or else by fixed ones."""
    parts = [Forgetful(), Forgetful()]
    parts[side].factor = 2.0
    model = words(routes([Dense(3, 2), parts[0]], [Dense(3, 2), parts[1]]))
    with pytest.raises(ValueError, match="is not the model in memory"):
        stm.export(model, tmp_path / "model")
    alike = words(Forgetful(2.0))
    model_in_folder = tmp_path / "alike"
    alike.save_pretrained(str(model_in_folder))
    saving.check_saved(alike, model_in_folder, ["unknown words"] * 9)
    with pytest.raises(ValueError, match="of 2 texts"):
        saving.check_saved(alike, model_in_folder, ["unknown words", "prime"])


def half_trained(folder, tmp_path):
    """After which accelerate's forward still computes in bfloat16."""
    model = load_transformer(folder)
    train(model, stm.CosineRankingLoss(model), tmp_path / "run", max_steps=1, bf16=True)
    assert "forward" in vars(model)
    return model


def in_half_with_adapter(folder, tmp_path):
    model = load_transformer(folder).bfloat16()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_lin"], init_lora_weights=False))
    return model


def cut(folder, tmp_path):
    model = load_transformer(folder)
    model.append(Normalize())
    model.truncate_dim = 8
    return model


KINDS = [
    half_trained,
    in_half_with_adapter,
    cut,
    lambda folder, _: load_transformer(folder).bfloat16(),
    lambda folder, _: load_transformer(folder).half(),
    lambda folder, _: load_transformer(folder).double(),
    lambda folder, _: with_adapter(folder),
    lambda folder, _: stm.prepare(load_transformer(folder), stm.Similarity(0.5, 0.5)),
    lambda folder, _: words(routes([Dense(3, 2)], [Dense(3, 2), Normalize()])),
    lambda folder, _: stm.load("wordllama", device="cpu"),
]


@pytest.mark.parametrize(
    ("make", "save"), list(zip(KINDS, itertools.cycle([stm.export, by_run_folder]), strict=False))
)
def test_models_that_are_saved_as_they_are(folder, tmp_path, make, save):
    """The check changes neither them nor random numbers."""
    model = make(folder, tmp_path).train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    random = torch.get_rng_state()
    save(model, tmp_path / "saved")
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in model.modules())
    saved = stm.load(tmp_path / "saved", device="cpu", truncate_dim=model.truncate_dim)
    assert saved.encode(DOCUMENTS).shape == model.encode(DOCUMENTS).shape


def test_an_adapter_that_is_lost_is_noticed(tmp_path, monkeypatch):
    """By the names of transformers, which reads such a folder as random weights."""
    base = save_transformer(tmp_path / "base")
    with_adapter(base).save_pretrained(str(tmp_path / "adapter"))

    def forget(model):
        kept = model._weight_conversions
        forget_adapter(model)
        model._weight_conversions = kept

    monkeypatch.setattr("st_magnitude.surgery.adapters.forget_adapter", forget)
    with pytest.raises(ValueError, match="is not the model in memory"):
        stm.export(stm.load(tmp_path / "adapter"), tmp_path / "exported")
    assert not (tmp_path / "exported").exists()

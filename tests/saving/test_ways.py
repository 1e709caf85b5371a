"""Every way to obtain a model, saved in every way, is the same model without this package."""

import inspect
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from _processes import forked
from _surgery import DOCUMENTS
from _tiny import columns, load_transformer, save_transformer
from _trainer import train
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from sentence_transformers import SentenceTransformer

import st_magnitude as stm
from st_magnitude.surgery.adapters import has_adapter, merge_lora
from st_magnitude.training import run_folder


def read(folders, texts):
    found = []
    for folder in folders:
        model = SentenceTransformer(folder, device="cpu")
        sides = [encode(texts).tolist() for encode in (model.encode_query, model.encode_document)]
        found.append((model.similarity_fn_name, sides))
    return found


IN_NEW_PROCESS = f"""
import json, sys
sys.modules["st_magnitude"] = None  # an import of it fails from here on
from sentence_transformers import SentenceTransformer
{inspect.getsource(read)}
json.dump(read(*json.loads(sys.argv[2])), open(sys.argv[1], "w"))
"""
FUNCTIONS = {"raw": "dot", "cosine": "cosine", "dot": "dot", "qnorm": "dot", "dnorm": "cosine"}


def config():
    return LoraConfig(r=2, target_modules=["q_lin", "v_lin"], lora_dropout=0.0)


def fit(model, output, **options):
    """A few steps at a rate that moves adapters, too."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.05}
    return train(model, stm.DotRankingLoss(model), output, **settings | options).model


def with_adapter(base):
    model = load_transformer(base)
    model.add_adapter(config())
    return model


def in_peft(base, adapter=None):
    model = load_transformer(base)
    inner = model[0].model
    if adapter is None:
        model[0].model = get_peft_model(inner, config())
        return model
    model[0].model = PeftModel.from_pretrained(inner, adapter)
    return model


def obtained(base: str, place: Path) -> dict[str, SentenceTransformer]:
    """The models by the way in which they came to be."""
    trained = fit(with_adapter(base), place / "run")
    trained.save_pretrained(str(place / "adapter"))
    load_transformer(base).save_pretrained(str(place / "stock"))
    fit(load_transformer(base), place / "plain")
    loaded = load_transformer(base)
    loaded.load_adapter(str(place / "adapter"))
    of_peft = fit(in_peft(base), place / "peft")
    of_peft[0].model.save_pretrained(str(place / "peft-adapter"))
    rows = Dataset.from_dict(columns(4))
    best = {"eval_data": rows, "eval_strategy": "steps", "eval_steps": 2}
    again = str(place / "run" / "checkpoint-2")
    raw = stm.prepare(load_transformer(base), stm.Similarity(0.5, 0.5))
    del raw[-1]  # for those who apply the exponent when they index
    named = ("cosine", "dot", "qnorm", "dnorm")
    return {
        "raw": raw,
        **{name: stm.prepare(load_transformer(base), name) for name in named},
        "fresh": load_transformer(base),
        "stock folder": stm.load(place / "stock"),
        "checkpoint": stm.load(place / "plain" / "checkpoint-2"),
        "adapter": trained,
        "adapter folder": stm.load(place / "adapter"),
        "adapter checkpoint": SentenceTransformer(again, device="cpu"),
        "load_adapter": loaded,
        "get_peft_model": of_peft,
        "PeftModel": in_peft(base, str(place / "peft-adapter")),
        "resumed": fit(with_adapter(base), place / "run", resume=again),
        "best at end": fit(with_adapter(base), place / "best", load_best_model_at_end=True, **best),
    }


def both_sides(model):
    return np.array([model.encode_query(DOCUMENTS), model.encode_document(DOCUMENTS)])


def by_run_folder(model, folder):
    with run_folder.saved(model, folder, "training.json", {}):
        pass


SAVES = {
    "save_pretrained": lambda model, folder: model.save_pretrained(str(folder)),
    "export": stm.export,
    "train": by_run_folder,
    # the last one, as it changes the model
    "merge_lora": lambda model, folder: merge_lora(model).save_pretrained(str(folder)),
}


@pytest.mark.parametrize("saves_all", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_saved_is_what_was_in_memory(tmp_path, monkeypatch, saves_all):
    """Of each model by one way in turn, or by all and in a new process."""
    torch.manual_seed(1)
    models = obtained(save_transformer(tmp_path / "base"), tmp_path)
    plain = {"fresh", "stock folder", "checkpoint", *FUNCTIONS}
    assert {name for name, model in models.items() if not has_adapter(model)} == plain
    adapted = [model.encode(DOCUMENTS) for name, model in models.items() if name not in plain]
    assert min(np.abs(x - models["fresh"].encode(DOCUMENTS)).max() for x in adapted) > 0.1
    saved = {}
    pairs = itertools.product(models.items(), SAVES.items())
    if not saves_all:
        pairs = zip(models.items(), itertools.cycle(SAVES.items()), strict=False)
    for (name, model), (way, save) in pairs:
        folder = tmp_path / "saved" / f"{name}-{way}".replace(" ", "-")
        saved[folder] = FUNCTIONS.get(name, model.similarity_fn_name), both_sides(model)
        save(model, folder)
        modules = json.loads((folder / "modules.json").read_text())
        assert all(module["type"].startswith("sentence_transformers.") for module in modules)
    given = [*map(str, saved)], DOCUMENTS
    if saves_all:
        forked("-c", IN_NEW_PROCESS, tmp_path / "found.json", json.dumps(given))
        found = json.loads((tmp_path / "found.json").read_text())
    else:
        for name in [name for name in sys.modules if name.startswith("st_magnitude")]:
            monkeypatch.setitem(sys.modules, name, None)
        found = read(*given)
    for (folder, (function, expected)), (name, sides) in zip(saved.items(), found, strict=True):
        error = np.linalg.norm(sides - expected, axis=2) / np.linalg.norm(expected, axis=2)
        assert error.max() <= 1e-6, folder
        assert name == function, folder


def test_a_model_that_needs_this_package_says_so_in_the_log_and_on_the_card(
    model, tmp_path, caplog
):
    stm.LearnableNormLoss(model)
    for _ in range(2):
        model.save_pretrained(str(tmp_path / "model"))
    [said] = caplog.records
    assert "load it with st_magnitude.load" in said.message
    card = (tmp_path / "model" / "README.md").read_text()
    assert "load the model with st_magnitude.load" in card

"""Every way to obtain a model, saved in every way, is the same model in a new process."""

import itertools
import json
from pathlib import Path

import numpy as np
import torch
from _processes import python
from _surgery import DOCUMENTS
from _tiny import columns, load_transformer, save_transformer
from _trainer import train
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from sentence_transformers import SentenceTransformer

import st_magnitude as stm
from st_magnitude.surgery.adapters import has_adapter, merge_lora
from st_magnitude.training import run_folder

IN_NEW_PROCESS = """
import json, sys
from sentence_transformers import SentenceTransformer
folders, texts = json.load(sys.stdin)
found = [SentenceTransformer(x, device="cpu").encode(texts).tolist() for x in folders]
json.dump(found, open(sys.argv[1], "w"))
"""


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
    return {
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


def test_what_is_saved_is_what_was_in_memory(tmp_path):
    torch.manual_seed(1)
    models = obtained(save_transformer(tmp_path / "base"), tmp_path)
    plain = {"fresh", "stock folder", "checkpoint"}
    assert {name for name, model in models.items() if not has_adapter(model)} == plain
    adapted = [model.encode(DOCUMENTS) for name, model in models.items() if name not in plain]
    assert min(np.abs(x - models["fresh"].encode(DOCUMENTS)).max() for x in adapted) > 0.1
    folders = {}
    for (name, model), (way, save) in itertools.product(models.items(), SAVES.items()):
        folders[name, way] = tmp_path / "saved" / f"{name}-{way}".replace(" ", "-")
        expected = model.encode(DOCUMENTS)
        save(model, folders[name, way])
        folders[name, way] = folders[name, way], expected
    given = json.dumps([[str(folder) for folder, _ in folders.values()], DOCUMENTS])
    python("-c", IN_NEW_PROCESS, tmp_path / "found.json", input=given)
    found = np.array(json.loads((tmp_path / "found.json").read_text()))
    for key, of_folder, (_, expected) in zip(folders, found, folders.values(), strict=True):
        error = np.linalg.norm(of_folder - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert error.max() <= 1e-6, key

"""The static table of wordllama, which stm.load knows by name."""

import importlib.util

import pytest
import torch
from sentence_transformers import SentenceTransformer

import st_magnitude as stm
from st_magnitude.saving import table


def test_the_table_has_wordllamas_vectors_and_is_a_stock_model(static_model, tmp_path):
    stm.export(static_model, tmp_path / "table")
    loaded = SentenceTransformer(str(tmp_path / "table"), device="cpu")
    [module] = static_model
    for text in ("How old are you?", "short"):
        ids = module.tokenizer.encode(text, add_special_tokens=False).ids
        expected = module.embedding.weight.detach()[ids].mean(dim=0)
        torch.testing.assert_close(loaded.encode(text, convert_to_tensor=True), expected)
    assert module.embedding.weight.shape == (32_000, 256)


def test_a_folder_of_the_name_comes_first(tiny_path, monkeypatch):
    tiny_path.rename(tiny_path.with_name("wordllama"))
    monkeypatch.chdir(tiny_path.parent)
    assert len(stm.load("wordllama")) == 2


def test_without_the_package_both_ways_on_are_named(monkeypatch):
    monkeypatch.setattr(table, "find_spec", lambda name: importlib.util.find_spec("no_such_name"))
    with pytest.raises(ImportError, match=r"\[table\].*static-retrieval-mrl-en-v1"):
        stm.load("wordllama")

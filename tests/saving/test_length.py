"""A limit of tokens: after it a long text encodes differently, or it was refused."""

import pytest
import torch
from _calls import call, taking
from _cli import refusal
from _surgery import routes
from _tiny import ROWS, load_transformer, save_transformer, tokenizer
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import InputModule
from sentence_transformers.sentence_transformer import modules
from sentence_transformers.sentence_transformer.modules import (
    BoW,
    Pooling,
    StaticEmbedding,
    WordEmbeddings,
)
from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer

from st_magnitude._upstream import SINCE_6_2
from st_magnitude.data.task import EncodedTask
from st_magnitude.saving.export import limit_length
from st_magnitude.surgery.raw import num_positions, readers_of
from st_magnitude.workbench.finetune.trainer import reading

LONG = " ".join(" ".join(row) for row in ROWS)
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 32, "max_position_embeddings": 40}
POSITIONS = {
    "bert": {},
    "distilbert": {"max_position_embeddings": 40},
    "roberta": SIZES,
    "mpnet": SIZES,
    "nystromformer": SIZES,  # its table has two rows more than positions
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 40},
    "llama": SIZES | {"head_dim": 16},
}


def static():
    return StaticEmbedding(tokenizer(), embedding_dim=4)


def transformer(place, model_type="distilbert"):
    return list(load_transformer(save_transformer(place, model_type, **POSITIONS[model_type])))


def looked_up(*_):
    words = sorted(set(LONG.split()))
    reader = WordEmbeddings(WhitespaceTokenizer(words), torch.randn(len(words), 4))
    return [reader, Pooling(4, "mean")]


KINDS = {
    "Transformer": transformer,
    "WordEmbeddings": looked_up,
    "BoW": lambda _: [BoW(LONG.split())],
    "StaticEmbedding": lambda _: [static()],
    "Router": lambda place: [routes(transformer(place / "q"), transformer(place / "d"))],
    "Router of tables": lambda _: [routes([static()], [static()])],
    "Router of words": lambda _: [routes([BoW(LONG.split())], [BoW(LONG.split())])],
    "Router of both": lambda place: [routes([BoW(LONG.split()[:32])], transformer(place))],
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_limit_cuts_by_every_route_or_is_refused(tmp_path, kind):
    if kind == "WordEmbeddings" and not SINCE_6_2:
        pytest.skip("WordEmbeddings of this release reads texts whole")
    model = SentenceTransformer(modules=KINDS[kind](tmp_path), device="cpu")
    both = (model.encode_query, model.encode_document)
    if kind == "Router":
        readers_of(model)[0].max_seq_length = 9
    limits = [getattr(reader, "max_seq_length", None) for reader in readers_of(model)]
    before = [encode(LONG) for encode in both]
    if kind not in ("Transformer", "WordEmbeddings", "Router"):
        with pytest.raises(ValueError, match="texts of any number of tokens"), reading(model, 3):
            pass
    else:
        with reading(model, 3):
            assert {reader.max_seq_length for reader in readers_of(model)} == {3}
            during = [encode(LONG) for encode in both]
        for x, y in zip(before, during, strict=True):
            assert abs(x - y).max() > 1e-3
    assert [getattr(reader, "max_seq_length", None) for reader in readers_of(model)] == limits
    for x, encode in zip(before, both, strict=True):
        assert abs(x - encode(LONG)).max() < 1e-6


def test_all_modules_that_read_texts_are_walked():
    known = (getattr(modules, name) for name in modules.__all__)
    readers = {x.__name__ for x in known if isinstance(x, type) and issubclass(x, InputModule)}
    assert readers - {"InputModule", "Asym", "CLIPModel"} == {kind.split()[0] for kind in KINDS}


@pytest.mark.parametrize("model_type", POSITIONS)
def test_no_more_tokens_than_positions(tmp_path, model_type):
    modules = transformer(tmp_path, model_type)
    model = SentenceTransformer(modules=modules, device="cpu")
    most = num_positions(modules[0])
    if model_type == "llama":
        limit_length(model, 100)  # positions are computed
        assert model.encode(LONG).shape == (32,)
        return
    limit_length(model, most)
    model.encode(LONG + " x" * 600)
    with pytest.raises(ValueError, match=f"is more than the {most} positions .* most {most}"):
        limit_length(model, most + 1)
    assert model.max_seq_length == most
    modules[0].max_seq_length = most + 1  # it would fail, else
    with pytest.raises((RuntimeError, IndexError)):
        model.encode(LONG + " x" * 600)


def test_commands_refuse_before_they_measure(tiny_path, data_folder, monkeypatch):
    monkeypatch.setattr(EncodedTask, "search", lambda *_, **o: pytest.fail("it measures"))
    for command in taking("max_length"):
        words = call(command, model=tiny_path, data=data_folder, out=tiny_path / "new")
        said = refusal(*words, max_length=1024)
        assert "max_length is 1,024, which is more than the 512 positions" in said

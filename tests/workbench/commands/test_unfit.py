"""Models that cannot answer are refused by every command, and trainings that diverged not saved."""

import itertools
import math
from types import SimpleNamespace

import pytest
from _calls import call, taking
from _cli import invoke, refusal
from conftest import save_splits
from sentence_transformers import SentenceTransformer

import st_magnitude as stm
from st_magnitude.data.task import NotFiniteError
from st_magnitude.training.stopping import DivergedError, refuse_diverged

COMMANDS = taking("data")


def without_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def filled(number):
    def change(folder):
        model = SentenceTransformer(str(folder), device="cpu")
        for parameter in model.parameters():
            parameter.data.fill_(number)
        model.save_pretrained(str(folder))

    return change


def with_more_tokens(folder):
    model = SentenceTransformer(str(folder), device="cpu")
    model.tokenizer.add_tokens(["bread", "tea", "cat"])
    model.save_pretrained(str(folder))


UNFIT = {
    "its tokenizer": (without_tokenizer, "knows no word: files of it are missing"),
    "zero": (filled(0.0), "texts are all zero"),
    "not a number": (filled(float("nan")), "not finite"),
    "more tokens": (with_more_tokens, "tokenizer knows more tokens than its weights"),
}


# each command and each kind in turn
@pytest.mark.parametrize(
    ("command", "kind"), [*zip(COMMANDS, itertools.cycle(UNFIT), strict=False)]
)
def test_a_model_that_cannot_answer_is_refused(tiny_path, tmp_path, kind, command):
    change, said = UNFIT[kind]
    change(tiny_path)
    data = save_splits(tmp_path / "data", "train", "dev", "test")
    words = call(command, model=tiny_path, data=data, out=tmp_path / "out")
    assert said in refusal(*words)
    assert not (tmp_path / "out" / "modules.json").exists()


def test_the_same_embedding_for_all_texts(model):
    texts = {"a": "one", "b": "two"}
    data = stm.RetrievalData(texts, texts, {"a": {"b"}, "b": {"a"}})
    stm.encode(model, data)
    for parameter in model[0].model.embeddings.parameters():
        parameter.data.zero_()
    model[0].model.embeddings.LayerNorm.bias.data.normal_()
    with pytest.raises(NotFiniteError, match="2 different document texts are all the same"):
        stm.encode(model, data)
    alike = stm.RetrievalData(texts, dict.fromkeys(texts, "one"), {"a": {"b"}, "b": {"a"}})
    stm.encode(model, alike)  # of equal texts they are the same


@pytest.mark.parametrize(
    ("options", "folds"), [({"temperature": 1e-30}, None), ({"learning_rate": 1e9}, 2)]
)
def test_a_training_that_diverged_is_not_saved(tiny_path, tmp_path, monkeypatch, options, folds):
    """Gradients that are too large leave the weights as they were, or make them nan."""
    monkeypatch.setattr("st_magnitude.workbench.judging.exam.FEWEST", 8)
    splits = ("train",) if folds else ("train", "dev")
    given = {"data": save_splits(tmp_path / "data", *splits), "model": tiny_path}
    given |= {"max_steps": 3, "batch_size": 4, "folds": folds}
    done = invoke("train", output=tmp_path / "out", **given, **options)
    assert done.exit_code == 3, done.output
    assert "Error: The training has diverged" in done.stderr
    assert not (tmp_path / "out" / "modules.json").exists()
    done = invoke("train", output=tmp_path / "again", **given, keep_anyway=True)
    assert done.exit_code == 0, done.output


def test_what_counts_as_diverged(model):
    """Not the bias of an exponent that is fixed at 1, which is infinite."""
    fixed = stm.prepare(model, stm.Similarity(1.0, 0.5))
    assert any(parameter.isinf().all() for parameter in fixed.parameters())

    def refused(*norms):
        rows = [{"loss": 1.0}, *({"grad_norm": norm} for norm in norms)]
        refuse_diverged(SimpleNamespace(model=fixed, state=SimpleNamespace(log_history=rows)))

    refused()
    refused(math.inf, 1.0)
    for norms in ((math.inf,), (math.nan, math.inf)):
        with pytest.raises(DivergedError):
            refused(*norms)
    next(fixed.parameters()).data.fill_(math.nan)
    with pytest.raises(DivergedError):
        refused(1.0)

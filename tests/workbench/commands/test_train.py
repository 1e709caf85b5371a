"""``st-magnitude train`` on a small folder: what it saves, compares, refuses and resumes."""

import errno
import itertools
import json
import os
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from _cli import figures, invoke, refusal
from _tiny import load_transformer, save_transformer
from conftest import CORPUS, QUERIES, RELEVANT_DOCS
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

import st_magnitude as stm
from st_magnitude._files import locked_folder
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.judge import Difference
from st_magnitude.losses.named import LOSSES
from st_magnitude.training.run_folder import WORK
from st_magnitude.workbench.finetune.train import TrainConfig, train
from st_magnitude.workbench.judging.verdict import BEFORE


@pytest.fixture
def place(data_folder, static_path, tmp_path):
    """The options of every run here."""
    return {
        "data": data_folder,
        "model": static_path,
        "output": tmp_path / "out",
        "batch_size": 4,
    }


def fit(place, **options):
    return figures("train", **place | options)


def save_dev(place, times):
    """Each query so many times, as a dev split."""
    queries = {f"{i}-{name}": text for i in range(times) for name, text in QUERIES.items()}
    relevant = {f"{i}-{name}": RELEVANT_DOCS[name] for i in range(times) for name in QUERIES}
    everything = stm.load_splits(place["data"])["train"].queries | queries
    RetrievalData(everything, CORPUS, relevant).save(place["data"], "dev")


def record_of(output):
    return json.loads((output / "training.json").read_text())


def ndcg(model, similarity):
    """By sentence-transformers."""
    evaluator = InformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT_DOCS)
    return evaluator(model)[f"{similarity}_ndcg@10"]


@pytest.mark.parametrize("loss", list(LOSSES))
def test_train_saves_a_model_that_ranks_as_trained(place, loss):
    options = {"learning_rate": 0.05, "epochs": 3, "seed": 3, "keep_checkpoints": True}
    fit(place, loss=loss, keep_scoring=True, **options)
    assert len(list((place["output"] / WORK).glob("checkpoint-*"))) == 1
    record = record_of(place["output"])
    assert record["loss"] == LOSSES[loss].load().__name__
    assert np.isfinite(record["log"][-1]["train_loss"])
    model = stm.load(place["output"])
    expected = "dot" if LOSSES[loss].keeps_norms else "cosine"
    assert model.similarity_fn_name == expected
    before = SentenceTransformer(str(place["model"]), similarity_fn_name=expected)
    assert ndcg(model, expected) > ndcg(before, expected)  # it has seen these pairs


@pytest.mark.parametrize("keep_scoring", [None, True])
def test_train_compares_with_the_pretrained_model_and_saves_what_scores_best(place, keep_scoring):
    """With the rate 0 the trained model is the pretrained one, so every figure can be checked.

    Cosine is clearly better with each query twenty times, and tied with dot on eight.
    """
    options = place | {"loss": "qnorm", "learning_rate": 0, "max_steps": 1}
    assert fit(options, output=place["output"] / ".." / "tied")["dev"]["saved"]["exponent"] == 0.0
    save_dev(place, 20)
    found = fit(options, keep_scoring=keep_scoring)
    dev, names = found["dev"], ("cosine", "dot")
    given = [SentenceTransformer(str(place["model"]), similarity_fn_name=name) for name in names]
    cosine, dot = map(ndcg, given, names)
    assert dev["pretrained"] == pytest.approx(cosine, abs=1e-6)
    chosen = (0.0, dot) if keep_scoring else (1.0, cosine)
    assert (dev["saved"]["exponent"], dev["saved"]["ndcg"]) == pytest.approx(chosen, abs=1e-6)
    assert dev["saved"]["gain"]["mean"] == pytest.approx(chosen[1] - cosine, abs=1e-6)
    assert not dev["is_better"]
    saved = SentenceTransformer(str(place["output"]))  # without the package
    assert saved.similarity_fn_name == ("dot" if keep_scoring else "cosine")
    assert found["load"] == f'SentenceTransformer("{place["output"]}")'
    assert ndcg(saved, saved.similarity_fn_name) == pytest.approx(dev["saved"]["ndcg"], abs=1e-6)
    card = (place["output"] / "README.md").read_text()
    assert "### Retrieval (data, dev split)" in card
    assert f"(saved) | {dev['saved']['ndcg']:.4f} |" in card
    gain = dev["rows"][0]["gain"]
    said = "deployed" if gain is None else str(Difference(**gain)).replace(" points", "")
    assert f"| {BEFORE} | {dev['pretrained']:.4f} | {said} |" in card
    assert "trained on the data dataset" in card
    assert "Unnamed Dataset" not in card
    assert '"scale": "auto"' in card


def test_max_length_limits_training_alone(place, tiny_path, monkeypatch):
    """With the rate 0 the pretrained and the trained model are one, of the length it was given."""
    widths, step = set(), SentenceTransformerTrainer.training_step

    def watched(self, model, inputs, *rest):
        widths.update(x.shape[1] for name, x in inputs.items() if name.endswith("input_ids"))
        return step(self, model, inputs, *rest)

    monkeypatch.setattr(SentenceTransformerTrainer, "training_step", watched)
    dev = fit(place, model=tiny_path, learning_rate=0, max_steps=1, max_length=4)["dev"]
    assert widths == {4}
    model = stm.load(tiny_path)
    assert dev["pretrained"] == pytest.approx(ndcg(model, "cosine"), abs=1e-6)
    assert dev["saved"]["ndcg"] == pytest.approx(dev["pretrained"], abs=1e-6)
    assert stm.load(place["output"]).max_seq_length == model.max_seq_length == 64


@pytest.mark.parametrize(("dtype", "has_lora"), [(torch.bfloat16, False), (torch.float16, True)])
def test_weights_in_half_precision(data_folder, tiny_path, tmp_path, caplog, dtype, has_lora):
    """They would lose small steps; those under LoRA are frozen, and it wants a higher rate."""
    model, data = stm.load(tiny_path).to(dtype), stm.load_splits(data_folder)["train"]
    if has_lora:
        peft = pytest.importorskip("peft")
        model.add_adapter(peft.LoraConfig(r=2, target_modules="all-linear"))
    config = TrainConfig(max_steps=1, batch_size=4, bf16=False)
    trained = train(model, data, tmp_path / "out", config)
    assert trained.trainer.args.learning_rate == (2e-4 if has_lora else 5e-5)
    said = f"stored in {str(dtype).removeprefix('torch.')}"
    assert said in caplog.text
    assert "trains weights in" not in caplog.text  # as the loss says
    for parameter in trained.trainer.model.parameters():
        is_frozen = has_lora and not parameter.requires_grad
        assert parameter.dtype == (dtype if is_frozen else torch.float32)
    # the merged weights, too: in half precision they would lose a part of what was learned
    assert next(stm.load(tmp_path / "out").parameters()).dtype == torch.float32


@pytest.mark.parametrize(("batch_size", "sampler"), [(4, "no_duplicates"), (5, "batch_sampler")])
def test_batches_repeat_no_text_where_that_is_possible(
    static_path, tmp_path, caplog, batch_size, sampler
):
    """Four answers of 40 queries: a batch of four can have each once, and one of five cannot."""
    queries = {f"q{i}": f"query {i}" for i in range(40)}
    data = RetrievalData(queries, CORPUS, {f"q{i}": {f"d0{1 + i % 4}"} for i in range(40)})
    config = TrainConfig(max_steps=1, batch_size=batch_size, folds=0)
    trained = train(str(static_path), data, tmp_path / "out", config)
    assert trained.trainer.args.batch_sampler.value == sampler
    assert caplog.text.count("Batches of 5 repeat texts, as 40 rows fill") == (batch_size == 5)


BAD = {"learning_rate": 100, "max_steps": 6, "loss": "dot"}


def test_a_model_that_is_clearly_worse_is_not_saved(place, tmp_path):
    """One query does not make that clear."""
    qrels = place["data"] / "qrels" / "dev.tsv"
    qrels.write_text("".join(qrels.read_text().splitlines(keepends=True)[:2]))
    assert fit(place, **BAD, output=tmp_path / "by one")["dev"]["saved"]["gain"]["mean"] < 0
    assert (tmp_path / "by one" / "modules.json").exists()
    save_dev(place, 10)
    worse = invoke("train", **place, **BAD, keep_scoring=True, json=True)
    assert worse.exit_code == 3
    assert json.loads(worse.stdout)["dev"]["saved"]["gain"]["high"] < 0
    assert not (place["output"] / "modules.json").exists()
    fit(place, **BAD, keep_scoring=True, resume=True, keep_anyway=True)
    assert (place["output"] / "modules.json").exists()


def test_documents_that_the_model_reads_as_one_text_are_refused(place, tiny_path):
    """Below the letterhead they differ, so with more tokens they train."""
    corpus = {name: f"see also the notes: {text}" for name, text in CORPUS.items()}
    place["data"] = place["data"] / "headed"
    RetrievalData(QUERIES, corpus, RELEVANT_DOCS).save(place["data"], "train")
    place |= {"model": tiny_path, "dev_split": "none", "max_steps": 1}
    assert "100% of the rows have no negative" in refusal("train", **place, max_length=4)
    fit(place, max_length=30)


def remove_model(output):
    for path in output.iterdir():
        if path.name != WORK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """A folder with data, a model, and a run with a checkpoint whose model was never saved."""
    place = tmp_path_factory.mktemp("unfinished")
    load_transformer(save_transformer(place / "plain")).save_pretrained(str(place / "model"))
    negatives = {q: {"d19"} for q in QUERIES}
    for split, more in (("train", {}), ("same", {}), ("other", {"q1": {"d20"}})):
        RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS, negatives | more).save(place / "data", split)
    options = {name: place / name for name in ("data", "model")} | {"batch_size": 4}
    fit(options, output=place / "out", max_steps=1, keep_checkpoints=True)
    remove_model(place / "out")
    return options


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"loss": "dot"}, "loss ('cosine' there, 'dot' now)"),
        ({"batch_size": 8, "seed": 1}, "batch_size (4 there, 8 now), seed (0 there, 1 now)"),
        ({"split": "same"}, None),
        ({"split": "other"}, "data ("),
        ({"model": "another"}, "model ("),
    ],
)
def test_resume_refuses_other_settings(unfinished, tmp_path, changed, difference):
    shutil.copytree(unfinished["data"].parent / "out", tmp_path / "out")
    options = unfinished | changed | {"output": tmp_path / "out", "max_steps": 2, "resume": True}
    if difference is None:
        fit(options)
    else:
        assert difference in refusal("train", **options)
    assert (tmp_path / "out" / "modules.json").exists() == (difference is None)


def test_nothing_is_overwritten(place):
    with locked_folder(place["output"]):
        assert "Another process" in refusal("train", **place)
    fit(place, max_steps=2, save_steps=1)
    assert not (place["output"] / WORK).exists()  # of a run that has finished
    before = {path: path.read_bytes() for path in place["output"].rglob("*") if path.is_file()}
    assert "is not empty" in refusal("train", **place)
    assert {path: path.read_bytes() for path in before} == before


def test_links_and_files_of_others_are_refused_and_stay(place, tmp_path):
    theirs, output = tmp_path / "theirs", place["output"]
    for name, link in (("README.md", False), ("notes", True), (WORK, True)):
        theirs.mkdir()
        (theirs / "run.json").write_text("{}")
        output.mkdir()
        (output / name).symlink_to(theirs) if link else (output / name).write_text("{}")
        for resume in (None, True):
            said = refusal("train", **place, max_steps=1, resume=resume)
            assert "is not empty" in said or f"{WORK} is a link" in said
        assert (theirs / "run.json").read_text() == "{}"
        assert (output / name).exists()
        shutil.rmtree(output)
        shutil.rmtree(theirs)


def test_a_file_that_somebody_writes_during_a_run_stays(place, monkeypatch):
    """It is in the way of the model, which --resume saves later."""
    output, step = place["output"], SentenceTransformerTrainer.training_step

    def write(*arguments):
        (output / "README.md").write_text("mine")
        return step(*arguments)

    monkeypatch.setattr(SentenceTransformerTrainer, "training_step", write)
    assert "holds README.md" in refusal("train", **place, max_steps=1)
    assert (output / "README.md").read_text() == "mine"
    (output / "README.md").unlink()
    monkeypatch.undo()
    fit(place, max_steps=1, resume=True)
    assert (output / "modules.json").exists()


# before and after modules.json
@pytest.mark.parametrize(
    "fails", ["training.run_folder.write_model", "workbench.finetune.save.add_section"]
)
def test_a_run_that_has_ended_can_be_taken_further(place, monkeypatch, fails):
    def full(*_):
        raise OSError(errno.ENOSPC, "disk full")

    with monkeypatch.context() as broken:
        broken.setattr(f"st_magnitude.{fails}", full)
        said = refusal("train", **place, max_steps=2, save_steps=1)
    assert "No space left on device" in said
    assert "--resume" in said
    fit(place, max_steps=4, resume=True)
    assert record_of(place["output"])["log"][-1]["step"] == 4


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        (signal.SIGHUP, 129),
    ],
)
def test_a_signal_saves_the_step_and_resume_ends_as_undisturbed(
    place, tmp_path, monkeypatch, number, code
):
    place |= {"max_steps": 5, "save_steps": 100, "learning_rate": 0.05}
    fit(place, output=tmp_path / "straight")
    # a program in the background may ignore signals, and then it does not stop
    is_interrupt = number == signal.SIGINT
    signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    handlers = [signal.getsignal(s) for s in STOPS]
    step, calls = SentenceTransformerTrainer.training_step, itertools.count(1)

    def disturbed(*args, **kwargs):
        if next(calls) == 2:
            os.kill(os.getpid(), number)
        return step(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(SentenceTransformerTrainer, "training_step", disturbed)
        assert invoke("train", **place).exit_code == code
    assert [signal.getsignal(s) for s in STOPS] == handlers
    checkpoints = (place["output"] / WORK).glob("checkpoint-*")
    assert [path.name for path in checkpoints] == ["checkpoint-2"]
    fit(place, resume=True)
    straight, resumed = (stm.load(path) for path in (tmp_path / "straight", place["output"]))
    torch.testing.assert_close(resumed.state_dict(), straight.state_dict(), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [{"max_steps": 5}, {"epochs": 5 / 3}])  # 1 + 2 / 3 is less
def test_a_run_that_was_killed_behind_its_last_step_is_only_saved(place, steps):
    """A checkpoint that was not written to its end is left aside; the one before has all steps."""
    output = place["output"]
    place |= steps | {"learning_rate": 0.05, "keep_checkpoints": True}
    fit(place)
    weights = stm.load(output).state_dict()
    torn = output / WORK / "checkpoint-9"
    torn.mkdir()
    (torn / "trainer_state.json").write_text('{"global_')
    (output / ".st-magnitude.moving").mkdir()
    (output / "modules.json").rename(output / ".st-magnitude.moving" / "modules.json")
    assert fit(place, resume=True)["steps"] == 5
    torch.testing.assert_close(stm.load(output).state_dict(), weights, rtol=0, atol=0)


def test_train_says_that_norms_mark_the_wrong_documents(static_path, tmp_path):
    """The mean of token vectors is smaller for longer texts, and the rate 0 leaves it so."""
    answers = sorted(CORPUS, key=lambda key: len(CORPUS[key]))[-10:]
    relevant = {query: answers[i::8] for i, query in enumerate(QUERIES)}
    data = RetrievalData(QUERIES, CORPUS, relevant, {query: {"d19"} for query in QUERIES})
    config = TrainConfig(loss="qnorm", batch_size=4, max_steps=1, learning_rate=0.0)
    trained = train(str(static_path), data, tmp_path / "out", config)
    assert trained.geometry["after"]["cohens_d"] < 0
    assert "### Norms" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("others", ["", "dev", "other", "texts of the same ids"])
def test_answers_of_other_splits_are_not_called_never_relevant(
    static_path, tmp_path, caplog, others
):
    """Each document answers a query of train or of another split."""
    asked = {key: f"where is {key}?" for key in CORPUS}
    train_data, other = (
        RetrievalData(asked, CORPUS, {i: {i} for i in ids}, {i: {"d20"} for i in ids[:9]})
        for ids in ([*CORPUS][::2], [*CORPUS][1::2])
    )
    if others == "texts of the same ids":
        other = replace(other, corpus={i: f"not {text}" for i, text in CORPUS.items()})
    data = {"train": train_data} | ({others: other} if others else {})
    config = TrainConfig(loss="qnorm", max_steps=1, batch_size=4, folds=0)
    found = train(str(static_path), data, tmp_path / "out", config)
    are_answers = others in ("dev", "other")
    assert ("cohens_d" in found.geometry["after"]) != are_answers
    assert ("no training row has a negative" in caplog.text) == are_answers


def test_a_lora_is_trained_restored_from_its_checkpoint_and_merged(place, tiny_path):
    pytest.importorskip("peft")
    options = place | {"model": tiny_path, "lora": 2, "learning_rate": 0.01, "max_steps": 2}
    assert "needs a transformer" in refusal("train", **options | {"model": place["model"]})
    geometry = fit(options, keep_checkpoints=True)["geometry"]
    assert geometry["before"] != geometry["after"]
    model = SentenceTransformer(str(place["output"]))
    assert not any("lora" in name for name, _ in model.named_parameters())
    remove_model(place["output"])
    fit(options, resume=True)
    restored = SentenceTransformer(str(place["output"]))
    texts = list(CORPUS.values())
    np.testing.assert_allclose(restored.encode(texts), model.encode(texts), atol=1e-6)

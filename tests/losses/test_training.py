"""Every loss in fit and in the Trainer: what is learned, logged, saved, resumed, and shared between processes."""

import copy
import gc
import itertools
import json
import logging
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from _tiny import ROWS, columns, formula, load_transformer, raw_embeddings
from _two_ranks import CASES, NUM_ROWS
from datasets import Dataset, DatasetDict
from peft import LoraConfig
from sentence_transformers import (
    InputExample,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator
from torch import nn
from torch.utils.data import DataLoader

import st_magnitude as stm
from st_magnitude.modules import ExponentNorm

pytestmark = pytest.mark.usefixtures("one_thread")

DISCRETE = {
    stm.CosineRankingLoss: "cosine",
    stm.DotRankingLoss: "dot",
    stm.QNormRankingLoss: "qnorm",
    stm.DNormRankingLoss: "dnorm",
}
EXPONENTS = {
    stm.CosineRankingLoss: (1.0, 1.0),
    stm.DotRankingLoss: (0.0, 0.0),
    stm.QNormRankingLoss: (1.0, 0.0),
    stm.DNormRankingLoss: (0.0, 1.0),
    stm.LearnableNormLoss: (0.5, 0.5),
}
LOSSES = list(EXPONENTS)
MAIN = [stm.QNormRankingLoss, stm.LearnableNormLoss]
BATCHING = pytest.mark.parametrize("mini_batch_size", [None, 3], ids=["plain", "cached"])
QUERIES, DOCUMENTS = [row[0] for row in ROWS], [row[1] for row in ROWS]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """fit() puts its checkpoints below the working directory."""
    monkeypatch.chdir(tmp_path)


def train(
    model, loss, output, num_negatives=0, data=None, resume=None, callbacks=None, evaluator=None, attach=True, **options
):
    """Through the Trainer; returns it."""
    defaults = {
        "max_steps": 8,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "seed": 3,
    }
    args = SentenceTransformerTrainingArguments(
        str(output), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, **defaults | options
    )
    trainer = SentenceTransformerTrainer(
        model,
        args,
        train_dataset=data or Dataset.from_dict(columns(num_negatives=num_negatives)),
        loss=loss,
        evaluator=evaluator,
        callbacks=callbacks,
    )
    if attach:
        stm.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def fit(model, loss, output, num_negatives=0, epochs=4, learning_rate=1e-3):
    rows = [InputExample(texts=list(row[: 2 + num_negatives])) for row in ROWS]
    model.fit(
        train_objectives=[(DataLoader(rows, batch_size=8, shuffle=True), loss)],
        epochs=epochs,
        warmup_steps=0,
        optimizer_params={"lr": learning_rate},
        show_progress_bar=False,
    )


def measure(model, num_negatives, exponents, scale, dim=None):
    """The loss by its definition, over all rows at once."""
    texts = [list(column) for column in zip(*(row[: 2 + num_negatives] for row in ROWS), strict=True)]
    with torch.no_grad():
        embeddings = raw_embeddings(model.eval(), [model.preprocess(column) for column in texts])
        return formula(embeddings, exponents, scale, dim=dim).item()


def scores(model):
    return model.similarity(model.encode_query(QUERIES), model.encode_document(DOCUMENTS))


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_learned(model, loss, before, num_negatives):
    """Lower by its definition at the scale that was found, and no weight broken."""
    after = measure(model, num_negatives, loss.similarity.exponents, loss.scale)
    earlier = measure(before, num_negatives, EXPONENTS[type(loss)], loss.scale)
    assert after < 0.9 * earlier
    assert all(p.isfinite().all() for p in model.parameters())
    if isinstance(loss, stm.LearnableNormLoss):
        assert all(0 < abs(gamma - 0.5) < 0.4 for gamma in loss.similarity.exponents)


# --- it learns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_class", LOSSES)
@BATCHING
@pytest.mark.parametrize("num_negatives", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("way", [fit, train])
def test_loss_falls(model, tmp_path, loss_class, mini_batch_size, num_negatives, way):
    before = copy.deepcopy(model)
    loss = loss_class(model, mini_batch_size=mini_batch_size)
    way(model, loss, tmp_path, num_negatives)
    assert_learned(model, loss, before, num_negatives)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_class", "way", "mini_batch_size"),
    [
        (stm.QNormRankingLoss, fit, None),
        pytest.param(stm.LearnableNormLoss, train, 4, marks=pytest.mark.slow),
        *(
            pytest.param(loss_class, way, size, marks=pytest.mark.slow)
            for loss_class in LOSSES
            for way, size in ((fit, 4), (train, None))
        ),
    ],
)
def test_loss_falls_with_minilm(minilm_path, tmp_path, loss_class, way, mini_batch_size):
    model = stm.strip_normalize(SentenceTransformer(minilm_path, device="cpu"))
    before = copy.deepcopy(model)
    loss = loss_class(model, mini_batch_size=mini_batch_size)
    way(model, loss, tmp_path, num_negatives=1, learning_rate=5e-5)
    assert_learned(model, loss, before, 1)


@pytest.mark.parametrize("loss_class", LOSSES)
@BATCHING
def test_bf16(model, tmp_path, loss_class, mini_batch_size):
    before = copy.deepcopy(model)
    loss, dtypes = loss_class(model, mini_batch_size=mini_batch_size), set()
    linear = model[0].auto_model.transformer.layer[0].ffn.lin1
    linear.register_forward_hook(lambda _, __, out: dtypes.add(out.dtype))
    train(model, loss, tmp_path, num_negatives=1, bf16=True)
    assert dtypes == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_learned(model, loss, before, 1)


@pytest.mark.parametrize("loss_class", MAIN)
def test_bf16_plain_and_cached_agree(folder, tmp_path, loss_class):
    models = [load_transformer(folder) for _ in range(2)]
    for model, mini_batch_size in zip(models, [None, 3], strict=True):
        loss = loss_class(model, scale=4.0, mini_batch_size=mini_batch_size)
        train(model, loss, tmp_path, num_negatives=1, bf16=True, optim="sgd", learning_rate=0.01, max_steps=2)
    start = load_transformer(folder).state_dict()
    for (name, plain), cached in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        if name in start and (moved := (plain - start[name]).norm()) > 1e-3:
            assert (plain - cached).norm() < 0.05 * moved


@BATCHING
@pytest.mark.parametrize("loss_class", LOSSES)
def test_gradient_accumulation(model, tmp_path, loss_class, mini_batch_size):
    """One step of SGD over four micro-batches goes down the mean of their gradients, by the definition."""
    reference, batches = copy.deepcopy(model), []
    loss = loss_class(model, scale=3.0, mini_batch_size=mini_batch_size)
    loss.register_forward_pre_hook(lambda _, args: batches.append([dict(column) for column in args[0]]))
    train(
        model,
        loss,
        tmp_path,
        num_negatives=1,
        max_steps=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        optim="sgd",
        learning_rate=0.02,
        max_grad_norm=0.0,
    )
    assert len(batches) == 4
    biases = [torch.zeros((), requires_grad=True) for _ in range(2)]
    learned = loss_class is stm.LearnableNormLoss
    exponents = [bias.sigmoid() for bias in biases] if learned else EXPONENTS[loss_class]
    sum(formula(raw_embeddings(reference, batch), exponents, 3.0) for batch in batches).div(4).backward()
    expected = {name: p - 0.02 * p.grad for name, p in reference.named_parameters()}
    if learned:
        expected |= {
            f"2.{side}_bias": -0.02 * bias.grad for side, bias in zip(("query", "document"), biases, strict=True)
        }
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in reference.named_parameters():
        moved = (found[name] - parameter).abs().max()
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-4 * moved.item() + 1e-7)
    if learned:
        for name in ("2.query_bias", "2.document_bias"):
            assert found[name].item() == pytest.approx(expected[name].item(), rel=1e-3)
            assert found[name].abs() > 1e-4


def test_own_learning_rate(model, tmp_path):
    """Adam's first step is the learning rate, whatever the gradient."""
    loss, before = stm.LearnableNormLoss(model), state(model)
    mapping = stm.LearnableNormLoss.learning_rate_mapping(0.02)
    train(model, loss, tmp_path, max_steps=1, learning_rate=1e-5, weight_decay=0.5, learning_rate_mapping=mapping)
    for name in ("2.query_bias", "2.document_bias"):
        assert model.state_dict()[name].abs().item() == pytest.approx(0.02, rel=1e-2)
    moved = [(value - before[name]).abs().max().item() for name, value in model.state_dict().items() if name[0] == "0"]
    assert 0.5e-5 < max(moved) < 3e-5


def test_default_learning_rate_of_gamma():
    assert list(stm.LearnableNormLoss.learning_rate_mapping().values()) == [1e-2]


@pytest.mark.parametrize("loss_class", [stm.TempAggLoss, stm.TempAggMRLLoss, stm.TempSpecMRLLoss])
@pytest.mark.parametrize("way", [fit, pytest.param(train, marks=pytest.mark.slow)])
@BATCHING
def test_temperature_losses_fall_at_every_prefix(model, tmp_path, loss_class, way, mini_batch_size):
    """Under QNorm, with hard negatives; a model trained for prefixes is better at them."""
    before = copy.deepcopy(model)
    loss = loss_class(model, similarity="qnorm", mini_batch_size=mini_batch_size)
    way(model, loss, tmp_path, num_negatives=1)
    for dim in [32] if loss_class is stm.TempAggLoss else [8, 16, 32]:
        after, earlier = (measure(m, 1, (1.0, 0.0), loss.scale, dim) for m in (model, before))
        assert after < 0.9 * earlier
    assert model.similarity_fn_name == "dot"


# --- adapters ---------------------------------------------------------------------------------------------------------


@BATCHING
@pytest.mark.parametrize("way", [fit, train])
@pytest.mark.parametrize("loss_class", MAIN)
@pytest.mark.parametrize("adapter_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_lora(model, tmp_path, loss_class, mini_batch_size, way, adapter_first):
    config = LoraConfig(r=4, target_modules=["q_lin", "v_lin", "lin1"])
    unadapted = copy.deepcopy(model)
    if adapter_first:
        model.add_adapter(config)
    loss = loss_class(model, mini_batch_size=mini_batch_size)
    if not adapter_first:
        model.add_adapter(config)
    before = state(model)
    way(model, loss, tmp_path / "run", 1, learning_rate=0.02)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    exponents = {"2.query_bias", "2.document_bias"} if loss_class is stm.LearnableNormLoss else set()
    assert exponents < changed
    assert all("lora_" in name for name in changed - exponents)
    assert measure(model, 1, loss.similarity.exponents, loss.scale) < measure(
        unadapted, 1, EXPONENTS[loss_class], loss.scale
    )

    path = stm.export(model, tmp_path / "saved")
    assert any(path.rglob("adapter_model.safetensors"))
    torch.testing.assert_close(scores(stm.load(path, device="cpu")), scores(model), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss_class", MAIN)
def test_lora_on_minilm(minilm_path, tmp_path, loss_class):
    model = stm.strip_normalize(SentenceTransformer(minilm_path, device="cpu"))
    model.add_adapter(LoraConfig(r=8, target_modules=["query", "value"]))
    train(model, loss_class(model), tmp_path / "run", 1, learning_rate=1e-3)
    path = stm.export(model, tmp_path / "saved")
    torch.testing.assert_close(scores(stm.load(path, device="cpu")), scores(model), rtol=1e-5, atol=1e-5)


# --- resume and best model --------------------------------------------------------------------------------------------


def entries(trainer, key="auto_scale"):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@BATCHING
@pytest.mark.parametrize("loss_class", MAIN)
def test_resume(folder, tmp_path, loss_class, mini_batch_size):
    options = {
        "num_negatives": 1,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
        "learning_rate": 0.01,  # so that norms, and with them what "auto" would come to, change within three steps
        "lr_scheduler_type": "linear",
        "per_device_train_batch_size": 4,
    }
    straight = load_transformer(folder)
    loss = loss_class(straight, mini_batch_size=mini_batch_size)
    trainer = train(straight, loss, tmp_path, **options)
    assert entries(trainer) == [loss.scale]
    assert loss.get_config_dict()["scale"] == loss.scale

    resumed = load_transformer(folder)
    again = loss_class(resumed, mini_batch_size=mini_batch_size)
    trainer = train(resumed, again, tmp_path / "again", resume=str(tmp_path / "checkpoint-3"), **options)
    assert again.scale == loss.scale
    assert entries(trainer) == [loss.scale]
    for name, value in straight.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=1e-6)
    if loss_class is stm.LearnableNormLoss:
        assert abs(straight[-1].gamma_query - 0.5) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("first_attached", [True, False])
def test_a_resume_that_would_measure_again_is_refused(folder, tmp_path, first_attached):
    """A number that differs from the first run's is worse than an error, which names both ways out."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.01}
    model = load_transformer(folder)
    loss = stm.QNormRankingLoss(model)
    train(model, loss, tmp_path, attach=first_attached, **options)
    options["resume"] = str(tmp_path / "checkpoint-2")
    for attach in (False,) if first_attached else (False, True):
        model = load_transformer(folder)
        with pytest.raises(ValueError, match=r"stm\.attach\(trainer\).* or pass the number .* scale="):
            train(model, stm.QNormRankingLoss(model), tmp_path / "again", attach=attach, **options)
    model = load_transformer(folder)
    again = stm.QNormRankingLoss(model, scale=loss.scale)
    train(model, again, tmp_path / "again", attach=False, **options)
    assert again.scale == loss.scale
    assert not model._load_state_dict_post_hooks


def test_attach_is_idempotent_and_keeps_a_given_scale(folder, tmp_path):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    model = load_transformer(folder)
    trainer = train(model, stm.DotRankingLoss(model, scale=3.0), tmp_path, **options)
    callbacks = list(trainer.callback_handler.callbacks)
    assert stm.attach(stm.attach(trainer)) is trainer
    assert trainer.callback_handler.callbacks == callbacks
    assert entries(trainer) == []
    model = load_transformer(folder)
    loss = stm.DotRankingLoss(model, scale=4.0)
    train(model, loss, tmp_path / "again", resume=str(tmp_path / "checkpoint-1"), **options)
    assert loss.scale == 4.0


@BATCHING
def test_a_loop_of_your_own(folder, mini_batch_size):
    """The loss's own state_dict holds the scale, so that a plain loop resumes too."""

    def built(scale="auto"):
        model = load_transformer(folder)
        loss = stm.SIGRegInfoNCE(
            model, similarity="qnorm", scale=scale, sigreg=stm.SIGReg(8), mini_batch_size=mini_batch_size
        )
        return loss, torch.optim.SGD(loss.parameters(), lr=0.05)

    def steps(loss, optimizer, number):
        batch = [loss.model.preprocess(column) for column in columns(8, 1).values()]
        for _ in range(number):
            optimizer.zero_grad()
            sum(loss([dict(column) for column in batch]).values()).backward()
            optimizer.step()

    loss, optimizer = built()
    steps(loss, optimizer, 2)
    saved, generator = copy.deepcopy(loss.state_dict()), torch.get_rng_state()
    steps(loss, optimizer, 2)
    resumed, optimizer = built()
    resumed.load_state_dict(saved)
    torch.set_rng_state(generator)
    steps(resumed, optimizer, 2)
    assert resumed.scale == loss.scale
    for name, value in loss.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value, rtol=0, atol=1e-6)


def test_scale_keeps_no_tensor_of_the_first_batch(model):
    loss = stm.DotRankingLoss(model)
    embeddings = [torch.randn(4, 8, requires_grad=True) * 2 for _ in range(2)]
    alive = [weakref.ref(x) for x in embeddings]
    gc.disable()  # a reference cycle would keep them as well
    try:
        loss.compute_loss_from_embeddings(embeddings)
        del embeddings
        assert [reference() for reference in alive] == [None, None]
    finally:
        gc.enable()


class Scripted(SentenceEvaluator):
    """The second evaluation is the best; remembers the model at each."""

    def __init__(self):
        super().__init__()
        self.primary_metric, self.seen = "score", []

    def __call__(self, model, output_path=None, epoch=-1, steps=-1):
        self.seen.append(state(model))
        return {"score": [0.1, 0.9, 0.2, 0.3][len(self.seen) - 1]}


@pytest.mark.parametrize("loss_class", MAIN)
def test_best_model_at_end(model, tmp_path, loss_class):
    evaluator = Scripted()
    train(
        model,
        loss_class(model),
        tmp_path,
        max_steps=4,
        evaluator=evaluator,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_score",
        learning_rate_mapping=stm.LearnableNormLoss.learning_rate_mapping(0.1) if len(model) == 3 else {},
    )
    assert len(evaluator.seen) == 4
    for name, value in model.state_dict().items():
        assert torch.equal(value, evaluator.seen[1][name])
    if loss_class is stm.LearnableNormLoss:
        assert len({seen["2.query_bias"].item() for seen in evaluator.seen}) == 4


# --- several datasets, evaluation, logs -------------------------------------------------------------------------------


class MeanNorm(nn.Module):
    def forward(self, embeddings):
        return (embeddings.norm(dim=1) - 2).square().mean()


def test_dict_of_losses(folder, tmp_path):
    data = DatasetDict(pairs=Dataset.from_dict(columns(16)), triplets=Dataset.from_dict(columns(16, num_negatives=1)))
    options = {"data": data, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.01}
    options["multi_dataset_batch_sampler"] = "round_robin"
    scales = []
    for resume in (None, str(tmp_path / "first" / "checkpoint-2")):
        model = load_transformer(folder)
        losses = {
            "pairs": stm.LearnableNormLoss(model),
            "triplets": stm.DotRankingLoss(model, regularizers=[(MeanNorm(), 0.01)], mini_batch_size=3),
        }
        trainer = train(model, losses, tmp_path / ("again" if resume else "first"), resume=resume, **options)
        scales.append({name: loss.scale for name, loss in losses.items()})
        for name, loss in losses.items():
            assert entries(trainer, f"auto_scale_{name}") == [loss.scale]
        assert entries(trainer, "mean_norm")
        assert entries(trainer, "infonce")
        assert model[-1].query_bias != 0
    assert scales[0] == scales[1]
    assert scales[0]["pairs"] != scales[0]["triplets"]


@BATCHING
def test_named_terms_are_logged(model, tmp_path, mini_batch_size):
    loss = stm.QNormRankingLoss(model, regularizers=[(MeanNorm(), 0.1)], mini_batch_size=mini_batch_size)
    trainer = train(model, loss, tmp_path, max_steps=3)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    for entry in steps:
        assert entry["mean_norm"] > 0
        assert entry["loss"] == pytest.approx(entry["infonce"] + entry["mean_norm"], abs=2e-3)


@BATCHING
def test_last_batch_of_one_row(model, tmp_path, mini_batch_size, caplog):
    data = Dataset.from_dict(columns(9))
    with caplog.at_level(logging.WARNING):
        train(model, stm.QNormRankingLoss(model, mini_batch_size=mini_batch_size), tmp_path, data=data, max_steps=4)
    assert sum("dataloader_drop_last=True" in record.message for record in caplog.records) == 1
    assert all(p.isfinite().all() for p in model.parameters())


@BATCHING
def test_evaluation_loss(model, tmp_path, mini_batch_size):
    loss = stm.LearnableNormLoss(model, mini_batch_size=mini_batch_size)
    args = SentenceTransformerTrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], per_device_eval_batch_size=16
    )
    data = Dataset.from_dict(columns())
    trainer = SentenceTransformerTrainer(model, args, train_dataset=data, eval_dataset=data, loss=loss)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(measure(model, 0, (0.5, 0.5), loss.scale), rel=1e-4)


# --- saved, and loaded elsewhere --------------------------------------------------------------------------------------

FRESH_PROCESS = """
import json, sys
plain, ours, queries, documents = json.load(sys.stdin)
sys.modules["st_magnitude"] = None  # an import of it fails from here on
from sentence_transformers import SentenceTransformer
models = {folder: SentenceTransformer(folder, device="cpu") for folder in plain}
assert sys.modules.pop("st_magnitude") is None
assert not any(name.startswith("st_magnitude") for name in sys.modules)
from st_magnitude import load
models |= {folder: load(folder, device="cpu") for folder in ours}
found = {}
for folder, model in models.items():
    scores = model.similarity(model.encode_query(queries), model.encode_document(documents))
    found[folder] = [model.similarity_fn_name, scores.tolist()]
json.dump(found, open(sys.argv[1], "w"))
"""


@pytest.mark.slow
def test_trained_models_in_a_fresh_process(folder, minilm_path, tmp_path):
    """Discrete similarities where this package cannot be imported; learned exponents with it, without trust."""
    raw = {}
    for loss_class, name in DISCRETE.items():
        model = stm.prepare(load_transformer(folder), name)
        train(model, loss_class(model), tmp_path / "run", max_steps=2)
        model.save_pretrained(str(tmp_path / name))
        raw[name] = scores(model)
    minilm = stm.prepare(SentenceTransformer(minilm_path, device="cpu"), "qnorm")
    train(minilm, stm.QNormRankingLoss(minilm), tmp_path / "run", max_steps=1, learning_rate=5e-5)
    raw["minilm"] = scores(minilm)
    stm.export(minilm, tmp_path / "minilm")
    plain = [str(tmp_path / name) for name in raw]
    learned = load_transformer(folder)
    train(learned, stm.LearnableNormLoss(learned), tmp_path / "run", max_steps=2, learning_rate=0.05)
    raw["learned"] = scores(learned)
    learned.save_pretrained(str(tmp_path / "learned"))

    subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(tmp_path / "found.json")],
        input=json.dumps([plain, [str(tmp_path / "learned")], QUERIES, DOCUMENTS]),
        text=True,
        check=True,
        timeout=120,
    )
    found = {Path(path).name: result for path, result in json.loads((tmp_path / "found.json").read_text()).items()}
    functions = {name: "cosine" if name in ("cosine", "dnorm") else "dot" for name in raw}
    assert {name: result[0] for name, result in found.items()} == functions
    for name, expected in raw.items():
        torch.testing.assert_close(torch.tensor(found[name][1]), expected, rtol=1e-5, atol=1e-5)
    assert learned[-1].gamma_document != pytest.approx(0.5, abs=1e-3)


# --- two processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(folder, tmp_path_factory):
    """What two gloo processes found, one dict of results a rank."""
    output = tmp_path_factory.mktemp("two_ranks")
    script = Path(__file__).with_name("_two_ranks.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script), folder, str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *launch], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    return [torch.load(output / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_are_one_process_on_the_joined_batch(model, two_ranks, case):
    name, _, direction, _ = case
    if name == "learnable":
        model.append(ExponentNorm(0.5, 0.5, learnable=True))
    model.double()
    rows = [row[:3] for row in ROWS[: 2 * NUM_ROWS]]
    embeddings = raw_embeddings(model, [model.preprocess(list(column)) for column in zip(*rows, strict=True)])
    seen = embeddings if direction != "document_to_query" else embeddings[:2]
    lengths = embeddings[0].norm(dim=1).mean(), torch.cat(seen[1:]).norm(dim=1).mean()
    if name == "learnable":
        exponents = model[-1].query_bias.sigmoid(), model[-1].document_bias.sigmoid()
        scale = 20 / (lengths[0] * lengths[1]).sqrt().item()
    else:
        exponents, scale = (1.0, 0.0), 20 / lengths[1].item()

    ranks = [results[case] for results in two_ranks]
    assert ranks[0]["scale"] == ranks[1]["scale"] == pytest.approx(scale, rel=1e-6)
    scale = ranks[0]["scale"]
    if name == "temp_agg_mrl":
        parts = itertools.product((8, 16, 32), (0.03, 0.06, 0.1))
        expected = sum(formula(embeddings, exponents, scale * 0.05 / tau, direction, dim) for dim, tau in parts)
    else:
        expected = formula(embeddings, exponents, scale, direction)
    expected.backward()
    assert ranks[0]["loss"] != ranks[1]["loss"]
    assert (ranks[0]["loss"] + ranks[1]["loss"]) / 2 == pytest.approx(expected.item(), rel=1e-10)
    for rank in ranks:
        assert rank["gradients"].keys() == dict(model.named_parameters()).keys()
        for parameter, gradient in rank["gradients"].items():
            reference = model.get_parameter(parameter).grad
            assert reference.abs().max() > 0 or "k_lin.bias" in parameter
            torch.testing.assert_close(gradient, reference, rtol=1e-7, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("way", [None, 3, "ring"], ids=["plain", "cached", "ring"])
def test_two_ranks_in_the_trainer(model, two_ranks, way):
    first, second = (results["trainer", way] for results in two_ranks)
    assert first["scale"] == second["scale"]
    assert torch.equal(first["biases"], second["biases"])
    assert (first["biases"] - torch.tensor(2 * [0.05, 0.1]).log()).abs().min() > 0.05
    start = dict(model.named_parameters())
    for name, parameter in first["parameters"].items():
        assert torch.equal(parameter, second["parameters"][name])
        assert not torch.equal(parameter, start.get(name, torch.zeros(())))
    assert {"2.query_bias", "2.document_bias"} < first["parameters"].keys()
    if way == "ring":  # as gathering does
        gathered = two_ranks[0]["trainer", 3]["parameters"]
        for name in ("2.query_bias", "2.document_bias"):
            torch.testing.assert_close(first["parameters"][name], gathered[name], rtol=1e-3, atol=0)
        torch.testing.assert_close(first["biases"], two_ranks[0]["trainer", 3]["biases"], rtol=1e-3, atol=0)


@pytest.mark.slow
@BATCHING
def test_two_ranks_learn_one_temperature(model, two_ranks, mini_batch_size):
    """The gradient is that of the joined batch. It is not a parameter of the model, so DDP does not average it."""
    model.double()
    rows = [row[:3] for row in ROWS[: 2 * NUM_ROWS]]
    embeddings = raw_embeddings(model, [model.preprocess(list(column)) for column in zip(*rows, strict=True)])
    bias = torch.tensor(0.05).log().requires_grad_()
    formula(embeddings, (0.0, 1.0), 3.0 * 0.05 / bias.exp()).backward()
    for results in two_ranks:
        assert results["temperature", mini_batch_size].item() == pytest.approx(bias.grad.item(), rel=1e-5)


@pytest.mark.slow
def test_two_ranks_with_different_data_sets(two_ranks):
    first, second = (results["data sets"] for results in two_ranks)
    assert first == second
    assert len({round(bias, 2) for bias in [*first.values(), math.log(0.05)]}) == 3

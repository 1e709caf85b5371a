"""Training with a trimmed vocabulary gives the weights of training without it, bit for bit."""

import copy
import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from _losses import batch_of
from _ranks import needs_fork, on_ranks
from _tables import (
    LARS,
    MODELS,
    NUM_ROWS,
    TEXTS,
    UNSEEN,
    assert_same,
    both,
    encoder,
    folder,
    scaled,
    static,
    table_of,
    two_tables,
)
from _tiny import ROWS, columns
from _trainer import make_trainer
from datasets import Dataset, DatasetDict
from sentence_transformers import InputExample, SentenceTransformer
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import st_magnitude as stm
from st_magnitude.surgery import vocabulary


class Shapes(TrainerCallback):
    """The number of rows that each step trained, and that its optimizer has."""

    def __init__(self):
        self.rows = []

    def on_step_end(self, args, state, control, model, optimizer, **kwargs):
        trained = {id(x) for group in optimizer.param_groups for x in group["params"]}
        if id(weight := table_of(model).weight) in trained:
            self.rows.append(len(weight))


def trained(model, trims, output, loss=stm.CosineRankingLoss, resume=None, **options):
    """The model after training; with and without trimming the same random numbers are drawn."""
    torch.manual_seed(0)
    options = {"max_steps": 3, "callbacks": [shapes := Shapes()]} | options
    trainer = make_trainer(model, loss(model), output, **options)
    start, weight = table_of(model).weight.detach().clone(), table_of(model).weight
    with stm.trimmed_vocabulary(trainer) if trims else nullcontext():
        trainer.train(resume_from_checkpoint=resume)
        read = model.encode(UNSEEN + TEXTS)
    assert (read == model.encode(UNSEEN + TEXTS)).all()
    assert bool(shapes.rows) == weight.requires_grad
    if shapes.rows:
        assert all((rows < NUM_ROWS / 10) == trims for rows in shapes.rows)
        assert 50 < (weight != start).any(dim=1).sum() < NUM_ROWS / 10
    assert table_of(model).weight is weight
    return model


OPTIONS = {
    "AdamW": {"optim": "adamw_torch", "learning_rate": 0.1},
    "SGD with momentum": {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.5},
    "clipping": {"max_grad_norm": 1e-3, "optim": "sgd", "learning_rate": 100.0},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bfloat16": {"bf16": True},
    "prompts": {"prompts": {"anchor": "jjj zzz: ", "positive": "[qqq] "}},
    "several data sets": {
        "data": DatasetDict(a=Dataset.from_dict(columns()), b=Dataset.from_dict(columns(9, 1)))
    },
}


@both
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_weights_are_those_of_a_whole_table(tmp_path, build, options):
    models = [trained(build(), trims, tmp_path, **options) for trims in (True, False)]
    assert_same(*models)


@pytest.mark.parametrize("build", [encoder, scaled])
def test_gradcache(tmp_path, build):
    loss = partial(stm.LearnableNormLoss, mini_batch_size=3)
    assert_same(*(trained(build(), trims, tmp_path, loss) for trims in (True, False)))


@both
def test_a_run_continues_with_and_without_trimming(tmp_path, build):
    """A checkpoint holds the whole table and the whole state, and knows nothing of ours."""
    whole = trained(build(), False, tmp_path / "whole", max_steps=4)
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    states = []
    for first, second in itertools.product((True, False), repeat=2):
        output = tmp_path / f"{first}{second}"
        trained(build(), first, output, **options)
        states.append(torch.load(output / "checkpoint-2" / "optimizer.pt")["state"])
        assert {len(x["exp_avg"]) for x in states[-1].values()} >= {NUM_ROWS}
        model = trained(build(), second, output, resume=f"{output}/checkpoint-2", **options)
        assert_same(model, whole)
        assert_same(SentenceTransformer(f"{output}/checkpoint-4", device="cpu"), whole)
    for state in states[1:]:
        for number, values in states[0].items():
            assert_same(values, state[number])


@both
def test_fit(tmp_path, monkeypatch, build):
    monkeypatch.chdir(tmp_path)
    models = []
    for trims in (True, False):
        model = build()
        torch.manual_seed(0)
        rows = [InputExample(texts=list(row[:2])) for row in ROWS]
        loader = DataLoader(rows, batch_size=8)
        with stm.trimmed_vocabulary(model, TEXTS) if trims else nullcontext():
            model.fit(
                [(loader, stm.CosineRankingLoss(model))],
                warmup_steps=0,
                weight_decay=0,
                optimizer_params={"lr": 0.01},
                show_progress_bar=False,
            )
        models.append(model)
    assert_same(*models)
    assert not torch.equal(table_of(models[0]).weight, table_of(build()).weight)


@pytest.mark.parametrize("saved", [[], ["word_embeddings"]], ids=str)
def test_a_table_under_lora(tmp_path, saved):
    """Which is frozen, or the copy that `modules_to_save` trains."""
    peft = pytest.importorskip("peft")
    models = []
    for trims in (True, False):
        model = encoder()
        torch.manual_seed(2)
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["query"], modules_to_save=saved))
        models.append(trained(model, trims, tmp_path))
    assert_same(*models)


def on_a_rank(output):
    """The state of a rank after two trainings, of which the second begins anew."""
    found = []
    for trims in (True, False):
        for build in MODELS.values():
            model = build()
            loss = stm.CosineRankingLoss(model, gather_across_devices=True)
            options = {"max_steps": 3, "per_device_train_batch_size": 4, "ddp_backend": "gloo"}
            trainer = make_trainer(model, loss, output, **options)
            with stm.trimmed_vocabulary(trainer) if trims else nullcontext():
                trainer.train()
            trainer.optimizer = None
            trainer.train()
            found.append(model.state_dict())
    return found


@pytest.mark.slow
@needs_fork
def test_two_ranks(tmp_path):
    folder()  # which both ranks then read
    first, second = on_ranks(2, on_a_rank, tmp_path)
    for mine, other in zip(first, second, strict=True):
        assert_same(mine, other)
    for trimmed, whole in zip(first[:2], first[2:], strict=True):
        assert_same(trimmed, whole)


def of_a_rank():
    """The rows that one of two ranks trains, each of which has read other texts."""
    rank = torch.distributed.get_rank()
    model = static()
    with stm.trimmed_vocabulary(model, ["tea", "rain"][rank : rank + 1]):
        return len(table_of(model).weight)


@needs_fork
def test_ranks_train_the_same_rows():
    assert on_ranks(2, of_a_rank) == [2, 2]


# --- a model within the block ---------------------------------------------------------------------


MODELS_TO_READ = [static, encoder, scaled, two_tables]


@pytest.mark.parametrize("build", MODELS_TO_READ)
def test_a_model_reads_and_saves_as_before(tmp_path, build):
    plain, model = build(), build()
    with stm.trimmed_vocabulary(model, TEXTS):
        assert sum(x.numel() for x in model.parameters()) < sum(
            x.numel() for x in plain.parameters()
        )
        for found in (model, copy.deepcopy(model)):
            assert_same(found, plain)
            for texts, route in itertools.product((TEXTS, UNSEEN), ("query", "document")):
                embeddings, expected = (
                    x.encode(texts, task=route, convert_to_tensor=True) for x in (found, plain)
                )
                assert torch.equal(embeddings, expected)
        model.save_pretrained(str(tmp_path))
        other = copy.deepcopy(plain)
        with torch.no_grad():
            for weight in other.parameters():
                weight.add_(1)
        model.load_state_dict(copy.deepcopy(plain).state_dict(), assign=True)
        assert_same(model, plain)
        model.load_state_dict(other.state_dict())
        assert_same(model, other)
    assert_same(model, other)
    assert_same(SentenceTransformer(str(tmp_path), device="cpu"), plain)


@both
def test_a_token_without_a_row(tmp_path, build):
    model = build()
    loss = stm.CosineRankingLoss(model)
    with stm.trimmed_vocabulary(model, TEXTS):
        for train in (True, False):
            model.train(train)
            with pytest.raises(ValueError, match=r"The token \d+ of a training batch"):
                loss(batch_of(model, [("jjj", "zzz")]), None)
    trainer = make_trainer(model, stm.CosineRankingLoss(model), tmp_path, max_steps=1)
    preprocess = model.preprocess

    def preprocess_at_random(texts, **options):
        return preprocess(["qqq"] * 8 if len(texts) == 8 else texts, **options)

    trainer.data_collator.preprocess_fn = preprocess_at_random
    with stm.trimmed_vocabulary(trainer), pytest.raises(ValueError, match="The token"):
        trainer.train()
    with stm.trimmed_vocabulary(trainer, ["qqq"]):
        trainer.train()


def test_padding_has_a_row_where_no_text_is_padded():
    model = scaled()
    padding = table_of(model).padding_idx
    with stm.trimmed_vocabulary(model, ["rain", "snow"]):
        assert table_of(model).padding_idx != padding
        model(model.preprocess(["rain", "snow rain"]))["sentence_embedding"].sum().backward()
    assert table_of(model).padding_idx == padding


@pytest.mark.parametrize("keeps", [True, False])
def test_a_trainer_trains_again(tmp_path, keeps):
    """With the same optimizer or a new one, in another block or without one."""
    found = []
    for trims in itertools.product((True, False), repeat=2):
        model = static()
        trainer = make_trainer(model, stm.CosineRankingLoss(model), tmp_path)
        for is_trimmed in trims:
            trainer.optimizer = trainer.optimizer if keeps else None
            with stm.trimmed_vocabulary(trainer) if is_trimmed else nullcontext():
                trainer.train()
        found.append(model)
    for model in found[1:]:
        assert_same(model, found[0])


def test_a_model_without_texts():
    with pytest.raises(ValueError, match="pass them, or pass the Trainer"):
        stm.trimmed_vocabulary(static()).__enter__()


def test_a_block_in_a_block_changes_nothing(caplog):
    model = static()
    with stm.trimmed_vocabulary(model, TEXTS):
        weight = table_of(model).weight
        with stm.trimmed_vocabulary(model, ["tea"]):
            assert table_of(model).weight is weight
        assert table_of(model).weight is weight
    assert "an outer block has trimmed it" in caplog.text


def tie(trainer):
    trainer.loss.head = nn.Linear(32, NUM_ROWS, bias=False)
    trainer.loss.head.weight = table_of(trainer.model).weight


def stream(trainer):
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()


WHOLE = {
    "tied to other weights": tie,
    "sparse gradients": lambda trainer: setattr(table_of(trainer.model), "sparse", True),
    "limit of norms": lambda trainer: setattr(table_of(trainer.model), "max_norm", 1.0),
    "bag with padding": lambda trainer: setattr(table_of(trainer.model), "padding_idx", 0),
    "a stream": stream,
    "on 2 GPUs": lambda trainer: setattr(trainer.args, "_n_gpu", 2),
    "FSDP divides": lambda trainer: setattr(trainer, "is_fsdp_enabled", True),
    "model_init makes another": lambda trainer: setattr(trainer, "model_init", static),
    "Adafactor reads other rows": lambda trainer: setattr(trainer.args, "optim", "adafactor"),
    "LARS reads other rows": lambda trainer: setattr(
        trainer, "optimizer", LARS(trainer.model.parameters())
    ),
    "a hook on its gradient": lambda trainer: table_of(trainer.model).weight.register_hook(abs),
}


@pytest.mark.parametrize("message", WHOLE)
def test_what_is_left_whole(tmp_path, caplog, message):
    model = static()
    weight = table_of(model).weight
    trainer = make_trainer(model, stm.CosineRankingLoss(model), tmp_path)
    WHOLE[message](trainer)
    with stm.trimmed_vocabulary(trainer):
        assert table_of(model).weight is weight
    assert message in caplog.text


def test_a_table_of_few_other_rows_is_left_whole(caplog, monkeypatch):
    caplog.set_level("INFO", "st_magnitude")
    model = static()
    monkeypatch.setattr(vocabulary, "LEAST_SHARE", 0.97)
    with stm.trimmed_vocabulary(model, TEXTS):
        assert len(table_of(model).weight) == NUM_ROWS
    assert "120 of 2,000 rows of the word table are used, and all are trained." in caplog.text

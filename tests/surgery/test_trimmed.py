"""Whatever a program does to a model whose vocabulary is trimmed, it finds what it would find
without trimming, bit for bit: casts, averages, copies, pickles and optimizers."""

import copy
import io
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from _losses import batch_of
from _tables import (
    LARS,
    NUM_ROWS,
    TEXTS,
    UNSEEN,
    assert_same,
    both,
    static,
    table_of,
    two_tables,
)
from _tiny import ROWS
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_hooks
from transformers.optimization import Adafactor

import st_magnitude as stm
from st_magnitude.surgery import trimmed, vocabulary
from st_magnitude.surgery.trimmed import why_rows_depend

PAIRS = [row[:2] for row in ROWS]


def optimizer_of(model, kind=torch.optim.AdamW, **options):
    return kind(model.parameters(), **{"lr": 0.1, "weight_decay": 0} | options)


def step(model, optimizer, rows=PAIRS):
    loss = stm.CosineRankingLoss(model)(batch_of(model, rows), None)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def average(target, source):
    for mine, other in zip(target, source, strict=True):
        mine.copy_(mine * 0.75 + other * 0.25)


# --- programs: each takes a model and a block, and returns models and tensors ---------------------


def cast(how):
    def program(model, block):
        with block:
            step(model, optimizer_of(model))
            how(model)
            yield model.state_dict()
            yield model.encode(UNSEEN + TEXTS, convert_to_tensor=True)

    return program


def averages_of_state_dicts(copies_in_block):
    def program(model, block):
        ema = copy.deepcopy(model)
        with block:
            optimizer = optimizer_of(model)
            ema = copy.deepcopy(model) if copies_in_block else ema
            for _ in range(3):
                step(model, optimizer)
                average(ema.state_dict().values(), model.state_dict().values())
            yield ema.encode(UNSEEN + TEXTS, convert_to_tensor=True)
        yield ema

    return program


def written_state_dict(model, block):
    """Which is live: it follows each step, and what is written into it is trained on."""
    start = copy.deepcopy(model).state_dict()
    with block:
        optimizer = optimizer_of(model)
        held = model.state_dict()
        step(model, optimizer)
        yield {name: x.clone() for name, x in held.items()}
        with torch.inference_mode():
            average(held.values(), start.values())
        step(model, optimizer)
        average(held.values(), start.values())
        yield model.encode(UNSEEN + TEXTS, convert_to_tensor=True)
        step(model, optimizer)
        average(held.values(), start.values())
        yield copy.deepcopy(model)
        yield pickle.loads(pickle.dumps(model))


def written_between_gradient_and_step(model, block):
    with block:
        optimizer = optimizer_of(model)
        stm.CosineRankingLoss(model)(batch_of(model, PAIRS), None).backward()
        for value in model.state_dict().values():
            value.mul_(0.5)
        optimizer.step()


def pickles(model, block):
    with block:
        step(model, optimizer_of(model))
        stored = io.BytesIO()
        torch.save(model, stored)
        found = [
            pickle.loads(pickle.dumps(model)),
            torch.load(io.BytesIO(stored.getvalue()), weights_only=False),
        ]
        step(model, optimizer_of(model))
    for loaded in found:
        assert type(table_of(loaded)) is type(table_of(model))
        step(loaded, optimizer_of(loaded), [("zzz", "qqq"), ("jjj", "kkk")])
        yield loaded


def copies(model, block):
    """Are trained as the model is, in the block and after it."""
    with block:
        step(model, optimizer_of(model))
        copied = copy.deepcopy(model)
        optimizer = optimizer_of(copied)
        step(copied, optimizer)
        again = copy.deepcopy(copied)
    step(copied, optimizer, [("zzz", "qqq"), ("jjj", "kkk")])
    yield copied
    yield again


def lives_on(kind, **options):
    def program(model, block):
        optimizer = optimizer_of(model, kind, **options)
        kept = step(model, optimizer)  # whose graph ends in the weight as it was
        with block:
            step(model, optimizer)
            yield copy.deepcopy(optimizer.state_dict()["state"][0])
        assert kept.grad_fn is not None
        yield copy.deepcopy(optimizer.state_dict()["state"][0])
        step(model, optimizer)
        yield copy.deepcopy(optimizer.state_dict()["state"][0])

    return program


def first_stepped_after(model, block):
    with block:
        optimizer = optimizer_of(model)
    step(model, optimizer)


class Averaging(torch.optim.SGD):
    """Steps on its own copy of the weights, as ScheduleFree's optimizers do."""

    @torch.no_grad()
    def step(self):
        for weight in (x for group in self.param_groups for x in group["params"]):
            steps = self.state[weight].setdefault("z", weight.clone())
            if weight.grad is not None:
                steps.sub_(weight.grad)
                weight.lerp_(steps, 0.5)

    @torch.no_grad()
    def eval(self):
        for weight, state in self.state.items():
            weight.lerp_(state["z"], 0.25)


def averaged_after_the_block(model, block):
    with block:
        optimizer = optimizer_of(model, Averaging)
        step(model, optimizer)
        step(model, optimizer)
    optimizer.eval()


PROGRAMS = {
    "bfloat16": cast(lambda model: model.bfloat16()),
    "to": cast(lambda model: model.to(torch.float64).to(torch.float32)),
    "averages": averages_of_state_dicts(copies_in_block=False),
    "averages in a copy": averages_of_state_dicts(copies_in_block=True),
    "written": written_state_dict,
    "written before a step": written_between_gradient_and_step,
    "pickles": pickles,
    "copies": copies,
    "AdamW lives on": lives_on(torch.optim.AdamW),
    "SGD lives on": lives_on(torch.optim.SGD, momentum=0.9),
    "Adagrad lives on": lives_on(torch.optim.Adagrad, initial_accumulator_value=0.5),
    "Averaging lives on": lives_on(Averaging),
    "averages after the block": averaged_after_the_block,
    "stepped after": first_stepped_after,
}


@both
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_finds_what_it_would_find_without_trimming(monkeypatch, build, program):
    monkeypatch.setattr(trimmed, "CHUNK", 700)
    found = []
    for trims in (True, False):
        model = build()
        weight = table_of(model).weight
        block = stm.trimmed_vocabulary(model, TEXTS) if trims else nullcontext()
        results = list(program(model, block) or [])
        assert table_of(model).weight is weight
        assert len(weight) == NUM_ROWS
        found.append([*results, model])
    for mine, other in zip(*found, strict=True):
        if isinstance(mine, nn.Module):
            assert [x.shape for x in mine.parameters()] == [x.shape for x in other.parameters()]
        if torch.is_tensor(mine):
            mine, other = {"": mine}, {"": other}
        assert_same(mine, other)


# --- what differs ---------------------------------------------------------------------------------


def test_the_device_of_the_whole_table():
    model = static()
    with stm.trimmed_vocabulary(model, TEXTS):
        model.to("meta")
    assert table_of(model).weight.is_meta
    assert len(table_of(model).weight) == NUM_ROWS


def test_no_gradient_crosses_the_block():
    model = static()
    weight = table_of(model).weight
    loss = stm.CosineRankingLoss(model)
    loss(batch_of(model, PAIRS), None).backward()
    with stm.trimmed_vocabulary(model, TEXTS):
        assert weight.grad is None
        loss(batch_of(model, PAIRS), None).backward()
        assert len(weight.grad) == len(weight) < NUM_ROWS
    assert weight.grad is None


def test_an_interrupt_while_the_second_table_is_set_up(monkeypatch):
    """And an error at the end of the block: everything is as it was."""
    model = two_tables()
    tables = [part for part in model.modules() if isinstance(part, nn.EmbeddingBag)]
    before = [dict(vars(table)) for table in tables]
    rows_to_train, calls = vocabulary._rows_to_train, []

    def interrupt(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rows_to_train(*args)

    hooks = dict(optimizer_hooks)
    with monkeypatch.context() as patch:
        patch.setattr(vocabulary, "_rows_to_train", interrupt)
        with pytest.raises(KeyboardInterrupt), stm.trimmed_vocabulary(model, TEXTS):
            raise AssertionError
    with pytest.raises(IndexError), stm.trimmed_vocabulary(model, TEXTS):
        tables[0].weight.data = torch.zeros(3)
    assert [dict(vars(table)) for table in tables] == before
    assert all(type(table) is nn.EmbeddingBag for table in tables)
    assert [len(table.weight) for table in tables] == [NUM_ROWS] * 2
    assert dict(optimizer_hooks) == hooks


@pytest.mark.parametrize("option", ["weight_decay", "lambd"])
def test_what_shrinks_all_rows_is_said(caplog, option):
    model = static()
    kind = torch.optim.ASGD if option == "lambd" else torch.optim.AdamW
    with stm.trimmed_vocabulary(model, TEXTS):
        optimizer = optimizer_of(model, kind, **{option: 0.1})
        step(model, optimizer)
        step(model, optimizer)
    assert caplog.text.count(f"{option} does not shrink the 1,880 rows") == 1


# --- optimizers that read other rows --------------------------------------------------------------


class Clipping(torch.optim.SGD):
    """Clips a step that is longer than those before, as StableAdamW does."""

    def step(self):
        for weight in (x for group in self.param_groups for x in group["params"]):
            weight.grad /= weight.grad.square().mean().sqrt().clamp(min=5)
        super().step()


class Unknown(torch.optim.SGD):
    def __init__(self, params, other, lr):
        super().__init__(params, lr)


OF_TORCH = [x for x in vars(torch.optim).values() if isinstance(x, type)]
BY_ROW = {
    "ASGD Adadelta Adagrad Adam AdamW Adamax Averaging NAdam RAdam RMSprop Rprop SGD": None,
    "Adafactor Clipping LARS Muon": "reads other rows",
    "LBFGS SparseAdam Unknown": "cannot be tried",
}


@pytest.mark.parametrize("kind", [*OF_TORCH, Adafactor, LARS, Clipping, Averaging, Unknown])
def test_an_optimizer_trains_each_row_by_itself(kind):
    if kind is torch.optim.Optimizer:
        return
    expected = next(value for names, value in BY_ROW.items() if kind.__name__ in names.split())
    defaults = {} if kind is Adafactor else {"lr": 1e-4}
    torch.manual_seed(0)
    state = torch.get_rng_state()
    found = why_rows_depend(kind, defaults, torch.device("cpu"))
    assert found is expected is None or found.startswith(expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(LARS, lr=0.1), "LARS reads other rows"),
        (partial(Unknown, other=None, lr=0.1), "Unknown cannot be tried"),
    ],
)
def test_an_optimizer_that_may_read_other_rows_is_refused_in_the_block(make, said):
    model = static()
    with stm.trimmed_vocabulary(model, TEXTS):
        optimizer = make(model.parameters())
        with pytest.raises(ValueError, match=f"^{said} .* such as AdamW"):
            step(model, optimizer)


@pytest.mark.slow
def test_processes_that_encode_in_the_block():
    """After a step, which pickles the model."""
    model = static()
    with stm.trimmed_vocabulary(model, TEXTS):
        step(model, optimizer_of(model))
        expected = model.encode(TEXTS + UNSEEN)
        pool = model.start_multi_process_pool(["cpu", "cpu"])
        found = model.encode(TEXTS + UNSEEN, pool=pool)
        model.stop_multi_process_pool(pool)
    assert (found == expected).all()

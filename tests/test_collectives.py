"""The collectives of a step at 8, 64 and 512 ranks, in process groups that move no data: all ranks
have to enter the same ones, in one order and with the same shapes, or they wait for ever."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _tiny import ROWS, load_transformer
from sentence_transformers import SentenceTransformerTrainer
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import st_magnitude as stm
from st_magnitude.revela.trainer import RevelaTrainer, _LanguageModelCallback

BOTH = ("query_to_doc", "doc_to_query")


class Recorder(TorchDispatchMode):
    """The names of collectives, and the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            shapes = [tuple(x.shape) for x in tree_leaves(args) if torch.is_tensor(x)]
            self.calls.append((function.overloadpacket.__name__, shapes[0], len(shapes)))
        return function(*args, **(kwargs or {}))


def collectives(step: Callable[[int], object], rank: int, num_ranks: int) -> list[tuple[Any, ...]]:
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        torch.manual_seed(rank)
        with Recorder() as recorder:
            step(rank)
    finally:
        dist.destroy_process_group()
    return recorder.calls


def ranking(folder: object, rank: int) -> None:
    options = {"directions": BOTH, "margin": -0.1, "scale": "auto"}
    loss = stm.QNormRankingLoss(load_transformer(folder), gather_across_devices=True, **options)
    rows = ROWS[4 * (rank % 4) :][:4]  # texts of other lengths on each rank
    value = loss([loss.model.preprocess([row[i] for row in rows]) for i in (0, 1)], None)
    value.backward()


def sigreg(rank: int) -> None:
    """The batches of the ranks may differ in size. Over all directions they are padded to the size
    of the largest, which the ranks of this test do not hear."""
    stm.SIGReg()(torch.randn(6, 8, requires_grad=True)).backward()
    stm.SIGReg(16)(torch.randn(6 + rank % 2, 8, requires_grad=True)).backward()


def revela(rank: int) -> None:
    """Odd ranks have no gradients."""
    model = nn.Linear(3, 2)
    if rank % 2 == 0:
        model(torch.ones(3)).sum().backward()
    trainer = RevelaTrainer.__new__(RevelaTrainer)
    vars(trainer).update(
        args=SimpleNamespace(world_size=dist.get_world_size()),
        accelerator=SimpleNamespace(sync_gradients=True),
        lm_parameters=lambda: dict(model.named_parameters()),
    )
    _LanguageModelCallback(trainer).on_train_begin(trainer.args, None, None)
    trainer.training_step(model, {})


@pytest.mark.parametrize("num_ranks", [8, 64, pytest.param(512, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["gather", "sigreg", "revela"])
def test_all_ranks_enter_the_same_collectives(folder, monkeypatch, name, num_ranks):
    monkeypatch.setattr(SentenceTransformerTrainer, "training_step", lambda *_: torch.zeros(()))
    steps = {"gather": partial(ranking, folder), "sigreg": sigreg, "revela": revela}
    first, *others = [collectives(steps[name], r, num_ranks) for r in (0, 1, num_ranks - 1)]
    assert all(calls == first for calls in others)
    assert 0 < len(first) <= 13  # however many ranks there are


def test_a_collective_of_some_ranks_is_found():
    def step(rank):
        if rank:
            dist.broadcast(torch.zeros(3), src=0)

    assert collectives(step, 0, 8) != collectives(step, 1, 8)

"""torch.compile of the kernel, and of encoders: no more graphs than sentence-transformers'."""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from _tiny import ROWS, load_transformer
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import BoW
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._dynamo.utils import counters

import st_magnitude as stm
from st_magnitude.kernel.batch import Above, Ids

COMPILED_LOSSES = {
    "cosine": stm.CosineRankingLoss,
    "qnorm": stm.QNormRankingLoss,
    "learnable": stm.LearnableNormLoss,
    "margin": lambda model: stm.DotRankingLoss(model, margin=-0.1),
    "joint": partial(stm.CosineRankingLoss, directions=("query_to_doc", "query_to_query")),
    "temp_agg_mrl": stm.TempAggMRLLoss,
    "sigreg": stm.SIGRegInfoNCE,
    "cached": lambda model: stm.CosineRankingLoss(model, mini_batch_size=2),
}


def run(folder: str, loss_class, is_compiled: bool):
    """The losses of batches whose texts differ in length, and the number of graphs."""
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounter()
    torch.manual_seed(0)
    model = load_transformer(folder)
    loss = loss_class(model)
    if is_compiled:
        # as accelerate does for torch_compile=True
        loss.model = torch.compile(model, backend=counter)
    values = []
    for start in range(0, 16, 4):
        rows = ROWS[start : start + 4]
        value = loss([model.preprocess([row[i] for row in rows]) for i in (0, 1)], None)
        value = sum(value.values()) if isinstance(value, dict) else value
        value.backward()
        values.append(value.item())
    return values, counter.frame_count


def test_hooks_take_effect_on_a_model_that_has_run_compiled():
    """GradScale, attached twice, and NormMonitor."""
    found = []
    words = sorted({word for row in ROWS[:4] for word in " ".join(row[:2]).split()})
    for is_compiled in (False, True):
        torch.manual_seed(0)
        modules = [BoW(words), Dense(len(words), 8, activation_function=None)]
        model = SentenceTransformer(modules=modules, device="cpu")
        loss = stm.CosineRankingLoss(model)
        loss.model = torch.compile(model, backend="eager") if is_compiled else model
        monitor = stm.NormMonitor(loss)
        gradients = []

        def step(model=model, loss=loss, gradients=gradients):
            model.zero_grad()
            loss([model.preprocess([row[i] for row in ROWS[:4]]) for i in (0, 1)], None).backward()
            gradients.append([x.grad for x in model.parameters() if x.grad is not None])

        step()
        for _ in range(2):
            with stm.attach_grad_scale(model):
                step()
            step()
        monitor.on_train_begin(None, None, None, model=model)
        monitor.on_step_begin(
            None,
            SimpleNamespace(is_world_process_zero=True, global_step=0),
            None,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        )
        step()
        monitor.on_step_end(None, SimpleNamespace(global_step=1), None)
        monitor.on_train_end()
        found.append([gradients, monitor.rows])
    torch.testing.assert_close(found[1], found[0])
    plain, scaled = (found[1][0][i][0] for i in (0, 1))
    assert not torch.allclose(plain, scaled)
    assert len(found[1][1]) == 1


@cache
def graphs_of_theirs(folder: str, is_cached: bool) -> int:
    cached = partial(CachedMultipleNegativesRankingLoss, mini_batch_size=2)
    return run(folder, cached if is_cached else MultipleNegativesRankingLoss, is_compiled=True)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED_LOSSES)
def test_graphs(folder, name):
    most = graphs_of_theirs(folder, name == "cached")
    values, graphs = run(folder, COMPILED_LOSSES[name], is_compiled=True)
    assert 0 < graphs <= most
    assert not counters["graph_break"]
    eager, _ = run(folder, COMPILED_LOSSES[name], is_compiled=False)
    assert values == pytest.approx(eager, rel=1e-5)


def masks(queries: int, documents: int) -> dict[str, object]:
    ids = Ids(torch.arange(queries), torch.arange(documents) % queries)
    terms = (stm.Term(4, 0.1), stm.Term(8, 0.2, 0.5), stm.Term(None, 0.3))
    above = Above(lambda positives: positives - 0.1, spares=ids)
    return {"terms": terms, "exclude": [torch.arange(documents) // 2, above]}


def targets(queries: int, documents: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    return {
        "targets": torch.rand(queries, documents, generator=generator),
        "weights": torch.rand(queries, generator=generator),
        "log_q": torch.rand(documents, generator=generator),
    }


@pytest.mark.slow
@pytest.mark.parametrize("options", [masks, targets])
@pytest.mark.parametrize(("backend", "graphs"), [("plain", 2), ("tiled", 4)])
def test_the_kernel_is_one_graph(options, backend, graphs):
    """Plain, one for the first size and one for all others; tiled, one for each size."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor" if backend == "plain" else "eager")
    infonce = partial(stm.infonce, backend=backend)
    compiled = torch.compile(infonce, fullgraph=True, backend=counter)
    for number in (4, 6, 9, 5):
        pair = [torch.randn(n, 16, requires_grad=True) for n in (number, 2 * number)]
        given = options(number, 2 * number)
        loss, expected = (f(*pair, **given) for f in (compiled, infonce))
        torch.testing.assert_close(loss, expected)
        found, wanted = (torch.autograd.grad(x, pair) for x in (loss, expected))
        torch.testing.assert_close(found, wanted)
    assert counter.frame_count == graphs

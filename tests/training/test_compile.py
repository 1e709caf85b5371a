"""torch.compile of the encoder: losses cause no more graphs and no more recompilations than
sentence-transformers'."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from _tiny import ROWS, load_transformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from torch._dynamo.testing import CompileCounter

import st_magnitude as stm

LOSSES = {
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
    """The losses of batches whose texts differ in length, and the number of graphs; with it the
    model as it trains."""
    torch._dynamo.reset()
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


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_graphs(folder, name):
    theirs = {"cached": lambda model: CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)}
    _, most = run(folder, theirs.get(name, MultipleNegativesRankingLoss), is_compiled=True)
    values, graphs = run(folder, LOSSES[name], is_compiled=True)
    assert 0 < graphs <= most
    eager, _ = run(folder, LOSSES[name], is_compiled=False)
    assert values == pytest.approx(eager, rel=1e-5)

"""Time and memory of the infonce kernel, forward and backward on embeddings, as ratios within one
run.

    python benchmarks/speed/kernel.py
    OMP_NUM_THREADS=1 python benchmarks/speed/kernel.py loss

Against sentence-transformers' MultipleNegativesRankingLoss (MNRL), its MatryoshkaLoss around one
MNRL per temperature (the way to compose dims x temperatures from its parts), and the floor: the 6
B^2 D floating-point operations of the three matrix products at the rate that a product of the same
shape reaches here. Memory is the peak of tensors allocated during the step, inputs and their
gradients' accumulators not counted.

"barest" is normalise, multiply, cross_entropy. Excluded ids are each shared by two documents on
average. Options are compared with the same loss without them. ``loss`` compares
``compute_loss_from_embeddings`` of CosineRankingLoss with MNRL's, for texts that all differ and for
positives of which each stands twice on average, and stores the cells.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from benchmarks.speed.memory import MIB, peak_bytes
from benchmarks.studies.estimates import markdown
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import BoW, Dense
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from st_magnitude import COSINE, CosineRankingLoss, Term, infonce
from st_magnitude.losses.keys import Texts

TEMPERATURES = (0.03, 0.06, 0.1)
OPTIONS = ("exclude", "positives", "log q", "joint")


class Embedded(nn.Module):
    """A stand-in for the model: its features are the embeddings."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["sentence_embedding"]}

    def get_embedding_dimension(self) -> int:
        return self.dim

    def __getitem__(self, _: int) -> Embedded:
        return self


def seconds(
    steps: dict[str, Callable[[], object]],
    repeats: int,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """The fastest of several rounds for each, in turn: all meet the same machine."""
    best = dict.fromkeys(steps, float("inf"))
    for round_ in range(repeats + 1):  # the first warms up
        for name, step in steps.items():
            began = clock()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            if round_:
                best[name] = min(best[name], clock() - began)
    return best


def compare(size: int, dim: int, repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    queries, documents = (torch.randn(size, dim, requires_grad=True) for _ in range(2))
    ids = torch.randint(size // 2, (size,))
    dims = (dim // 4, dim // 2, dim)
    many = [Term(k, temperature) for k in dims for temperature in TEMPERATURES]
    stub = Embedded(dim)
    plain = MultipleNegativesRankingLoss(stub)
    log_q = torch.rand(size).log()
    labels = torch.arange(size)
    parts = [
        MatryoshkaLoss(stub, MultipleNegativesRankingLoss(stub, scale=1 / t), dims)
        for t in TEMPERATURES
    ]

    def features() -> list[dict[str, Tensor]]:
        return [{"sentence_embedding": queries}, {"sentence_embedding": documents}]

    losses: dict[str, Callable[[], Tensor]] = {
        "mnrl": lambda: plain(features(), None),
        "barest": lambda: cross_entropy(normalize(queries) @ normalize(documents).T * 20, labels),
        "one term": lambda: infonce(queries, documents, similarity=COSINE),
        "nine terms": lambda: infonce(queries, documents, many, COSINE),
        "composition": lambda: sum(part(features(), None) for part in parts),
        "exclude": lambda: infonce(queries, documents, exclude=ids),
        "positives": lambda: infonce(queries, documents, positives=ids),
        "log q": lambda: infonce(queries, documents, log_q=log_q),
        "joint": lambda: infonce(queries, documents, directions=("query_to_doc", "query_to_query")),
    }
    for ours, theirs in (("one term", "mnrl"), ("nine terms", "composition")):
        torch.testing.assert_close(losses[ours](), losses[theirs](), rtol=1e-5, atol=1e-5)

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            queries.grad = documents.grad = None
            loss().backward()

        return run

    steps = {name: step(loss) for name, loss in losses.items()}
    measured = seconds(steps, repeats)
    a, b, out = queries.detach(), documents.detach(), queries.new_empty(512, size)

    def product() -> None:  # in tiles, whose results need not go to main memory
        for start in range(0, size, 512):
            torch.mm(a[start : start + 512], b.T, out=out)

    floor = 3 * seconds({"product": product}, 2 * repeats)["product"]
    memory = {name: peak_bytes(run) for name, run in steps.items()}
    ratios = {
        "one term": ("one term", "mnrl"),
        "one : barest": ("one term", "barest"),
        "nine terms": ("nine terms", "mnrl"),
        "nine : composition": ("nine terms", "composition"),
        **{f"{name} : one": (name, "one term") for name in OPTIONS},
    }
    found = {"mnrl ms": measured["mnrl"] * 1e3, "floor": floor / measured["mnrl"]}
    found |= {name: measured[a] / measured[b] for name, (a, b) in ratios.items()}
    found["mnrl MB"] = memory["mnrl"] / MIB
    for name in ("one term", "nine terms", "nine : composition"):
        ours, theirs = ratios[name]
        found[f"{name} MB"] = memory[ours] / memory[theirs]
    return found


def loss_cell(size: int, dim: int) -> dict[str, float]:
    """Milliseconds of a step of MNRL, and the time of ours over it."""
    columns = [torch.randn(size, dim, requires_grad=True) for _ in range(2)]
    model = SentenceTransformer(modules=[BoW(["tea"]), Dense(1, dim)], device="cpu")
    ours, mnrl = CosineRankingLoss(model), MultipleNegativesRankingLoss(model)
    queries, documents = torch.randperm(2 * size).split(size)
    keys = {"differ": documents, "repeat": documents[torch.randint((size + 1) // 2, (size,))]}

    def step(loss: nn.Module, texts: Texts | None) -> None:
        for column in columns:
            column.grad = None
        loss.compute_loss_from_embeddings(columns, texts).backward()

    steps: dict[str, Callable[[], object]] = {"mnrl": partial(step, mnrl, None)}
    for name, texts in keys.items():
        steps[name] = partial(step, ours, Texts([queries, texts], [queries, texts]))
    found = seconds(steps, max(8, min(2000, 2**27 // size**2)))
    ratios = {name: found[name] / found["mnrl"] for name in keys}
    return {"batch": size, "dim": dim, "mnrl ms": 1e3 * found["mnrl"], **ratios}


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    if sys.argv[1:2] == ["loss"]:
        cells = [loss_cell(2**i, dim) for dim in (256, 768) for i in range(3, 14)]
        print("\n".join(markdown(cells[0], [[f"{x:.4g}" for x in c.values()] for c in cells], "r")))
        record = {"torch": torch.__version__, "cells": cells}
        place = Path(__file__).with_name("kernel.json")
        place.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return
    rows = []
    for size, repeats in ((512, 40), (1024, 25), (2048, 12), (4096, 5), (8192, 2)):
        for dim in (384, 1024):
            found = compare(size, dim, repeats)
            digits = {name: 0 if name in ("mnrl ms", "mnrl MB") else 2 for name in found}
            rows.append([size, dim, *(f"{x:.{digits[name]}f}" for name, x in found.items())])
    print("\n".join(markdown(["B", "D", *found], rows, "r")))


if __name__ == "__main__":
    main()

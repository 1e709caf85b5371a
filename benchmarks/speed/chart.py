"""The chart of the README: what sentence-transformers' classes take over ours with the same loss,
in time and memory.

    python benchmarks/speed/chart.py [--size 512] [--output docs/cost.png] [--device cpu]

Forward and backward on embeddings (cosine, float32, D = 384), by the fastest of interleaved rounds;
memory is what a step allocates at its peak. In each row both sides have the same value, which is
checked before it is measured:

- in-batch negatives: MultipleNegativesRankingLoss, and all four directions in one softmax;
- gradient caching, without the encoder: CachedMultipleNegativesRankingLoss with mini-batches of 32;
- a guide for false negatives: GISTEmbedLoss, and CachedGISTEmbedLoss (64 of its rows, whose time is
  multiplied);
- three prefixes at three temperatures: MatryoshkaLoss around one MultipleNegativesRankingLoss for
  each temperature.

Expected before measuring, at B = 512: MNRL 1.1 x the time and 2 x the memory; four directions 1.2 x
and 3 x; caching 1.1 x and 1 x; GIST losses more than 100 x the time, GISTEmbedLoss more than 100 x
the memory; the composition 6 x and 5 x.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.speed.false_negatives import CACHED_ROWS, DIM, Stub, pairs
from benchmarks.speed.kernel import TEMPERATURES, Embedded, peak_bytes, seconds
from sentence_transformers.sentence_transformer.losses import (
    CachedGISTEmbedLoss,
    CachedMultipleNegativesRankingLoss,
    GISTEmbedLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from torch import Tensor

from st_magnitude import COSINE, CosineRankingLoss, Term, infonce
from st_magnitude._plot import draw, key_above
from st_magnitude.losses.texts import Texts

ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
Loss = Callable[[], Tensor]
# name, ours, theirs, and the number of times that the batch takes their step
Row = tuple[str, Loss, Loss, float]


def rows(size: int, device: str) -> tuple[list[Row], list[Tensor]]:
    """The rows of the chart, and the embeddings that get gradients."""
    torch.manual_seed(0)
    queries, documents = (x.requires_grad_() for x in pairs(size, device))
    guided = pairs(size, device)
    few = queries[:CACHED_ROWS].detach().requires_grad_()
    features = [{"model": a, "guide": b} for a, b in zip((queries, documents), guided, strict=True)]
    embedded = [{"sentence_embedding": x} for x in (queries, documents)]
    stub, dims = Embedded(DIM), (DIM // 4, DIM // 2, DIM)

    plain, joint = (
        MultipleNegativesRankingLoss(stub),
        MultipleNegativesRankingLoss(stub, directions=ALL),
    )
    cached = CachedMultipleNegativesRankingLoss(Stub("model"), mini_batch_size=32)
    parts = [
        MatryoshkaLoss(stub, MultipleNegativesRankingLoss(stub, scale=1 / t), dims)
        for t in TEMPERATURES
    ]
    gist: dict[str, Any] = {
        "model": Stub("model"),
        "guide": Stub("guide"),
        "temperature": 0.05,
        "margin": 0.05,
    }
    gist |= {"contrast_anchors": False, "contrast_positives": False}
    guides = [[guided[0][:CACHED_ROWS]], [guided[1]]]
    plain_gist, cached_gist = GISTEmbedLoss(**gist), CachedGISTEmbedLoss(**gist, mini_batch_size=32)
    with_guide = CosineRankingLoss(Stub("model"), same_text="keep", margin=0.05)
    guide = Texts(guide=[COSINE.document(x) for x in guided])
    nine = [Term(dim, temperature) for dim in dims for temperature in TEMPERATURES]

    def one() -> Tensor:
        return infonce(queries, documents)

    def guided_by() -> Tensor:
        return with_guide.compute_loss_from_embeddings([queries, documents], guide)

    columns = [list(x.split(32)) for x in (queries, documents)]
    found: list[Row] = [
        ("MultipleNegativesRankingLoss", one, lambda: plain(embedded, None), 1),
        (
            "the same, four directions",
            lambda: infonce(queries, documents, directions=ALL),
            lambda: joint(embedded, None),
            1,
        ),
        (
            "CachedMultipleNegativesRankingLoss",
            one,
            lambda: cached.calculate_loss(columns, with_backward=True),
            1,
        ),
        (
            "MatryoshkaLoss, 3 dims x 3 temperatures",
            lambda: infonce(queries, documents, nine),
            lambda: sum((part(embedded, None) for part in parts), torch.zeros(())),
            1,
        ),
        (
            "CachedGISTEmbedLoss",
            guided_by,
            lambda: cached_gist.calculate_loss([[few], [documents]], guides, with_backward=True),
            size / len(few),
        ),
        ("GISTEmbedLoss", guided_by, lambda: plain_gist(features, None), 1),
    ]
    for name, ours, theirs, times in found:
        if times == 1:
            torch.testing.assert_close(
                ours().detach(), theirs().detach(), rtol=1e-4, atol=1e-4, msg=name
            )
    return found, [queries, documents, few]


def measure(size: int, device: str, repeats: int = 10) -> list[tuple[str, float, float]]:
    """Name, and time and memory of their class over ours."""
    found, inputs = rows(size, device)

    def step(loss: Loss) -> Callable[[], None]:
        def run() -> None:
            value = loss()
            if value.requires_grad:  # a cached loss has taken its gradients
                value.backward()
            for x in inputs:
                x.grad = None

        return run

    ratios = []
    for name, ours, theirs, times in found:
        both = {"ours": step(ours), "theirs": step(theirs)}
        time, memory = (
            seconds(both, repeats, device),
            {side: peak_bytes(run, device) for side, run in both.items()},
        )
        ratios.append(
            (name, times * time["theirs"] / time["ours"], memory["theirs"] / memory["ours"])
        )
        print("| {} | {:.3g} | {:.3g} |".format(*ratios[-1]), flush=True)
    return ratios


def paint(axis: Any, ratios: list[tuple[str, float, float]], size: int) -> None:
    places = range(len(ratios))
    for shift, column, label in ((-0.19, 1, "time"), (0.19, 2, "peak memory")):
        values = [row[column] for row in ratios]
        axis.barh(
            [place + shift for place in places],
            [x - 1 for x in values],
            height=0.36,
            left=1,
            label=label,
        )
        for place, value in zip(places, values, strict=True):
            axis.text(
                max(value, 1) * 1.08, place + shift, f"{value:.3g} x", va="center", fontsize=8
            )
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(list(places), [name for name, *_ in ratios])
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(0.6, 3000)
    axis.set_xlabel(f"sentence-transformers over st_magnitude, batch of {size} (log scale)")
    key_above(axis)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", type=int, default=512, help="batch size B; GISTEmbedLoss holds B x B x D numbers"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/cost.png"))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    # the guide's embeddings are given, not the guide
    logging.getLogger("st_magnitude").setLevel(logging.ERROR)
    print(
        f"torch {torch.__version__}, {arguments.device}, {torch.get_num_threads()} threads, B ="
        f" {arguments.size}\n"
    )
    print(
        "| sentence-transformers | time over ours | peak memory over ours |\n| --- | ---: | ---: |"
    )
    ratios = measure(arguments.size, arguments.device)
    picture = draw(lambda axis: paint(axis, ratios, arguments.size), size=(8.0, 3.4), kind="png")
    arguments.output.write_bytes(picture)


if __name__ == "__main__":
    main()

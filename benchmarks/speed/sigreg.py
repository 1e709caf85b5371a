"""SIGReg: what it costs, what it does to a collapsed cone, and what it does to MiniLM.

    python benchmarks/speed/sigreg.py [a] [b] [c] [--quick] [--compile]

(a) Time and memory, forward and backward on embeddings, D = 384, 1,024 directions, 17 knots: of the
naive form (the
    N x K x knots tensor under autograd), of SIGReg, and of the matrix products alone (projections
    and their gradient). Memory is the peak of tensors allocated during the step.
(b) Embeddings in a cone, moved by Adam down SIGReg alone: IsoScore (over what a Gaussian sample of
the size reaches)
    and mean cosine, for 16 .. 1024 directions drawn anew each step and 16 held fixed; scaled by
    sqrt(D) and unscaled.
(c) MiniLM on the demo's docstring task, one epoch at batch 32 .. 256, cosine InfoNCE with and
without SIGReg:
    IsoScore and mean cosine of the test documents, nDCG@10. There is no STS set offline; in its
    place stands the Spearman correlation of the cosines of document pairs with those of the model
    before training.

Expected, before measuring: (a) N = 2048: at least 3 x as fast as the naive form, and at most 1/20
of its memory; at most 3 x the time of the
    products alone.
(b) scaled: at least .9 of the reachable IsoScore at every D for 1,024 directions; less and less
    below 256 directions; 16 fixed directions change nothing, as most of the space is never seen.
    Unscaled: the mean cosine falls all the same (the scale changes bandwidth and size of the
    gradient, not its sign), and with Adam, which divides the size out, it is not far behind.
(c) IsoScore rises with SIGReg at every batch size, and at 32 with it is above 256 without it (the
blog: 64 with it
    above 2,048 without). nDCG within .02 (noise) or slightly lower (the blog: a slight loss on
    MTEB).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.speed.kernel import peak_bytes, seconds
from torch import Tensor

from st_magnitude import SIGReg, geometry


def table(header: list[str], rows: list[list[str]]) -> None:
    print("| " + " | ".join(header) + " |")
    print("|" + " ---: |" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


# --- (a) cost -------------------------------------------------------------------------------------


def naive(x: Tensor, directions: Tensor) -> Tensor:
    """SIGReg() as one writes it down."""
    knots = torch.linspace(0, 3, 17, device=x.device)
    target = torch.exp(-knots.square() / 2)
    # (N, K, T)
    angles = (F.normalize(x, dim=1) * x.shape[1] ** 0.5 @ directions)[..., None] * knots
    error = (angles.cos().mean(dim=0) - target).square() + angles.sin().mean(dim=0).square()
    return 2 * torch.trapezoid(error * target, knots).mean() * len(x)


def cost(size: int, dim: int, num_directions: int, repeats: int, with_compile: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(size, dim, requires_grad=True)
    directions = F.normalize(torch.randn(dim, num_directions), dim=0)
    sigreg = SIGReg()
    losses: dict[str, Callable[[], Tensor]] = {
        "naive": lambda: naive(x, directions),
        "SIGReg": lambda: sigreg(x, directions),
        "SIGReg, drawing": lambda: SIGReg(num_directions)(x),
    }
    if with_compile:
        compiled = torch.compile(naive)
        losses["naive, compiled"] = lambda: compiled(x, directions)
    torch.testing.assert_close(losses["SIGReg"](), losses["naive"](), rtol=1e-3, atol=0)

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            x.grad = None
            loss().backward()

        return run

    steps = {name: step(loss) for name, loss in losses.items()}
    a, out, back = x.detach(), x.new_empty(size, num_directions), x.new_empty(size, dim)

    def products() -> None:
        torch.mm(a, directions, out=out)
        torch.mm(out, directions.T, out=back)

    steps["products"] = products
    measured = seconds(steps, repeats, "cpu")
    memory = {name: peak_bytes(run, "cpu") for name, run in steps.items()}
    print(
        f"\n(a) N = {size}, D = {dim}, {num_directions} directions, 17 knots; over the naive form"
    )
    table(
        ["form", "ms", "times as fast", "MB", "part of its memory"],
        [
            [
                name,
                f"{t * 1e3:.0f}",
                f"{measured['naive'] / t:.1f}",
                f"{memory[name] / 2**20:.0f}",
                f"1/{memory['naive'] / memory[name]:.0f}" if memory[name] else "-",
            ]
            for name, t in measured.items()
        ],
    )
    print(
        f"SIGReg takes {measured['SIGReg'] / measured['products']:.1f} x the time of the products"
        " alone."
    )


# --- (b) a collapsed cone -------------------------------------------------------------------------


def cone(size: int, dim: int) -> Tensor:
    """Unit rows with a mean cosine of about .8 and a falling spectrum."""
    generator = torch.Generator().manual_seed(0)
    spectrum = torch.arange(1, dim + 1).float() ** -0.5
    noise = torch.randn(size, dim, generator=generator) * spectrum / spectrum.norm()
    rotation = torch.linalg.qr(torch.randn(dim, dim, generator=generator))[0]
    return F.normalize((noise + 2 * F.normalize(torch.ones(dim), dim=0)) @ rotation, dim=1)


def open_cone(size: int, dim: int, sigreg: SIGReg, fixed: bool, steps: int) -> list[str]:
    torch.manual_seed(0)
    x = cone(size, dim).requires_grad_()
    directions = sigreg._draw(x.detach()) if fixed else None
    optimizer = torch.optim.Adam([x], lr=0.005)
    for _ in range(steps):
        optimizer.zero_grad()
        sigreg(x, directions).backward()
        optimizer.step()
    return measures(x.detach())


def measures(x: Tensor) -> list[str]:
    unit = F.normalize(x, dim=1)
    reached = geometry.isoscore(unit) / geometry.isoscore_ceiling(*unit.shape)
    return [f"{reached:.2f}", f"{geometry.mean_cosine(unit):.3f}"]


def collapse(dims: tuple[int, ...], numbers: tuple[int, ...], size: int, steps: int) -> None:
    print(
        f"\n(b) N = {size}, {steps} steps of Adam at 0.005: IsoScore over the reachable one, mean"
        " cosine"
    )
    header = ["directions", *(f"D = {dim}" for dim in dims)]
    rows = [["before", *(", ".join(measures(cone(size, dim))) for dim in dims)]]
    for scale in ("sqrt_d", 1.0):
        name = "scaled" if scale == "sqrt_d" else "unscaled"
        for number, fixed in [(16, True), *((n, False) for n in numbers)]:
            cells = [
                ", ".join(open_cone(size, dim, SIGReg(number, scale=scale), fixed, steps))
                for dim in dims
            ]
            rows.append([f"{name} {number}{' fixed' if fixed else ''}", *cells])
    table(header, rows)


# --- (c) MiniLM -----------------------------------------------------------------------------------


def minilm(
    batches: tuple[int, ...], weights: tuple[float, ...], max_steps: int, seed: int = 0
) -> None:
    from benchmarks.data.docstrings import build_docstring_task, bundled_minilm
    from scipy.stats import spearmanr
    from sentence_transformers import SentenceTransformer

    from st_magnitude.data.retrieval import RetrievalData
    from st_magnitude.finetune.run import TrainConfig, train
    from st_magnitude.similarity import COSINE

    task = build_docstring_task(seed=seed, progress=False)
    judged = RetrievalData(task.test.queries, task.test.corpus, task.test.relevant)
    rng = np.random.default_rng(seed)
    pairs = torch.from_numpy(rng.integers(len(task.test.corpus), size=(2, 20_000)))

    def fresh() -> SentenceTransformer:
        model = SentenceTransformer(bundled_minilm(), device="cpu")
        model.max_seq_length = 64
        return model

    def row(name: str, model: SentenceTransformer, began: float) -> list[str]:
        trained_for = time.perf_counter() - began
        encoded = judged.encode(model, batch_size=64, before_normalize=True)
        unit = F.normalize(encoded.documents, dim=1)
        cosines = (unit[pairs[0]] * unit[pairs[1]]).sum(dim=1)
        scores = encoded.ndcg(encoded.top(COSINE))
        before.setdefault("cosines", cosines)
        before.setdefault("scores", scores)
        difference, low, high = geometry.paired_bootstrap(scores, before["scores"])
        return [
            name,
            f"{geometry.isoscore(unit):.3f}",
            f"{geometry.mean_cosine(unit):.3f}",
            f"{scores.mean():.3f}",
            f"{difference:+.3f} [{low:+.3f}, {high:+.3f}]",
            f"{spearmanr(cosines, before['cosines']).statistic:.3f}",
            f"{trained_for:.0f}",
        ]

    before: dict = {}
    ceiling = geometry.isoscore_ceiling(len(task.test.corpus), 384)
    print(f"\n(c) MiniLM, {task.train}, test {task.test}; the reachable IsoScore is {ceiling:.2f}")
    header = [
        "run",
        "IsoScore",
        "eff. rank",
        "mean cos",
        "nDCG@10",
        "against pretrained",
        "pair cosines",
        "s",
    ]
    rows = [row("pretrained", fresh(), time.perf_counter())]
    for batch in batches:
        for weight in weights:
            model, began = fresh(), time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                train(
                    model,
                    task.train,
                    Path(folder) / "model",
                    TrainConfig(
                        loss="cosine",
                        negatives=1,
                        max_steps=max_steps,
                        batch_size=batch,
                        learning_rate=5e-5,
                        seed=seed,
                    ),
                    loss_options={"regularizers": [(SIGReg(), weight)]} if weight else {},
                )
            rows.append(
                row(
                    f"batch {batch}, {f'SIGReg x {weight:g}' if weight else 'without'}",
                    model,
                    began,
                )
            )
            print(" ", *rows[-1], sep="  ", flush=True)
    table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help="a, b, c; default: all")
    parser.add_argument("--quick", action="store_true", help="small sizes, three minutes")
    parser.add_argument(
        "--compile", action="store_true", help="also the naive form under torch.compile"
    )
    arguments = parser.parse_args()
    parts = arguments.parts or ["a", "b", "c"]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32")
    if "a" in parts:
        for size in (512, 2048):
            cost(size, 384, 1024, 3 if arguments.quick else 8, arguments.compile)
    if "b" in parts:
        if arguments.quick:
            collapse((64, 384), (16, 256), 256, 100)
        else:
            collapse((64, 384, 768), (16, 64, 256, 1024), 512, 200)
    if "c" in parts:
        if arguments.quick:
            minilm((16,), (0.0, 0.05), max_steps=4)
        else:
            minilm((32, 64, 128, 256), (0.0, 0.05), max_steps=-1)


if __name__ == "__main__":
    main()

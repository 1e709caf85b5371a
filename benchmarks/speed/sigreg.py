"""SIGReg: what it costs, what it does to a collapsed cone, and what it does to MiniLM.

    python benchmarks/speed/sigreg.py [a] [b] [c]

(a) Time and memory, forward and backward on embeddings, D = 384, 1,024 directions, 17 knots: of the
naive form (the N x K x knots tensor under autograd), of SIGReg, and of the matrix products alone.
(b) Embeddings in a cone, moved by Adam down SIGReg alone: IsoScore (over what a Gaussian sample of
the size reaches) and mean cosine, for 16 to 1,024 directions, scaled by sqrt(D) and unscaled.
(c) MiniLM on the demo's docstring task, one epoch at batch 32 and 128, cosine InfoNCE with and
without SIGReg: IsoScore and mean cosine of the test documents, nDCG@10.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.speed.kernel import seconds
from benchmarks.speed.memory import peak_bytes
from benchmarks.studies.estimates import markdown
from numpy.typing import NDArray
from torch import Tensor

from st_magnitude import SIGReg, geometry

# --- (a) cost -------------------------------------------------------------------------------------


def naive(x: Tensor, directions: Tensor) -> Tensor:
    """SIGReg() as one writes it down."""
    knots = torch.linspace(0, 3, 17, device=x.device)
    target = torch.exp(-knots.square() / 2)
    # (N, K, T)
    angles = (F.normalize(x, dim=1) * x.shape[1] ** 0.5 @ directions)[..., None] * knots
    error = (angles.cos().mean(dim=0) - target).square() + angles.sin().mean(dim=0).square()
    return 2 * torch.trapezoid(error * target, knots).mean() * len(x)


def cost(size: int, dim: int, num_directions: int, repeats: int = 8) -> None:
    torch.manual_seed(0)
    x = torch.randn(size, dim, requires_grad=True)
    directions = F.normalize(torch.randn(dim, num_directions), dim=0)
    sigreg = SIGReg()
    losses: dict[str, Callable[[], Tensor]] = {
        "naive": lambda: naive(x, directions),
        "SIGReg": lambda: sigreg(x, directions),
        "SIGReg, drawing": lambda: SIGReg(num_directions)(x),
    }
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
    rows = []
    for name, t in measured.items():
        part = f"1/{memory['naive'] / memory[name]:.0f}" if memory[name] else "-"
        sizes = [f"{memory[name] / 2**20:.0f}", part]
        rows.append([name, f"{t * 1e3:.0f}", f"{measured['naive'] / t:.1f}", *sizes])
    print(f"\n(a) N = {size}, D = {dim}, {num_directions} directions, 17 knots\n")
    head = ["form", "ms", "times as fast", "MB", "part of its memory"]
    print("\n".join(markdown(head, rows)), flush=True)


# --- (b) a collapsed cone -------------------------------------------------------------------------


def cone(size: int, dim: int) -> Tensor:
    """Unit rows with a mean cosine of about .8 and a falling spectrum."""
    generator = torch.Generator().manual_seed(0)
    spectrum = torch.arange(1, dim + 1).float() ** -0.5
    noise = torch.randn(size, dim, generator=generator) * spectrum / spectrum.norm()
    rotation = torch.linalg.qr(torch.randn(dim, dim, generator=generator))[0]
    return F.normalize((noise + 2 * F.normalize(torch.ones(dim), dim=0)) @ rotation, dim=1)


def open_cone(size: int, dim: int, sigreg: SIGReg, steps: int) -> list[str]:
    torch.manual_seed(0)
    x = cone(size, dim).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.005)
    for _ in range(steps):
        optimizer.zero_grad()
        sigreg(x).backward()
        optimizer.step()
    return measures(x.detach())


def measures(x: Tensor) -> list[str]:
    unit = F.normalize(x, dim=1)
    reached = geometry.isoscore(unit) / geometry.isoscore_ceiling(*unit.shape)
    return [f"{reached:.2f}", f"{geometry.mean_cosine(unit):.3f}"]


def collapse(dims: tuple[int, ...], numbers: tuple[int, ...], size: int, steps: int) -> None:
    print(f"\n(b) N = {size}, {steps} steps of Adam at 0.005: IsoScore, mean cosine\n")
    header = ["directions", *(f"D = {dim}" for dim in dims)]
    rows = [["before", *(", ".join(measures(cone(size, dim))) for dim in dims)]]
    for scale, name in (("sqrt_d", "scaled"), (1.0, "unscaled")):
        for number in numbers:
            sigreg = SIGReg(number, scale=scale)
            found = [", ".join(open_cone(size, dim, sigreg, steps)) for dim in dims]
            rows.append([f"{name} {number}", *found])
    print("\n".join(markdown(header, rows)), flush=True)


# --- (c) MiniLM -----------------------------------------------------------------------------------


def minilm(seed: int = 0) -> None:
    from benchmarks.data.docstrings import build_docstring_task, bundled_minilm
    from sentence_transformers import SentenceTransformer

    from st_magnitude.data.retrieval import RetrievalData
    from st_magnitude.finetune.run import TrainConfig, train
    from st_magnitude.similarity import COSINE

    task = build_docstring_task(seed=seed, progress=False)
    judged = RetrievalData(task.test.queries, task.test.corpus, task.test.relevant)

    def fresh() -> SentenceTransformer:
        model = SentenceTransformer(bundled_minilm(), device="cpu")
        model.max_seq_length = 64
        return model

    def row(name: str, model: SentenceTransformer) -> list[str]:
        encoded = judged.encode(model, batch_size=64, before_normalize=True)
        unit = F.normalize(encoded.documents, dim=1)
        scores = encoded.ndcg(encoded.top(COSINE))
        before.append(scores)
        difference, low, high = geometry.paired_bootstrap(scores, before[0])
        return [
            name,
            f"{geometry.isoscore(unit):.3f}",
            f"{geometry.mean_cosine(unit):.3f}",
            f"{scores.mean():.3f}",
            f"{difference:+.3f} [{low:+.3f}, {high:+.3f}]",
        ]

    before: list[NDArray[np.float64]] = []
    ceiling = geometry.isoscore_ceiling(len(task.test.corpus), 384)
    print(f"\n(c) MiniLM, {task.train}, test {task.test}; the reachable IsoScore is {ceiling:.2f}")
    header = ["run", "IsoScore", "mean cosine", "nDCG@10", "against pretrained"]
    rows = [row("pretrained", fresh())]
    for batch, weight in product((32, 128), (0.0, 0.05)):
        model = fresh()
        how = {"batch_size": batch, "learning_rate": 5e-5, "seed": seed}
        config = TrainConfig(loss="cosine", negatives=1, max_steps=-1, **how)
        options = {"regularizers": [(SIGReg(), weight)]} if weight else {}
        with tempfile.TemporaryDirectory() as folder:
            train(model, task.train, Path(folder) / "model", config, loss_options=options)
        rows.append(row(f"batch {batch}, weight {weight:g}", model))
    print("\n".join(markdown(header, rows)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help="a, b, c; default: all")
    parts = parser.parse_args().parts or ["a", "b", "c"]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32")
    if "a" in parts:
        for size in (512, 2048):
            cost(size, 384, 1024)
    if "b" in parts:
        collapse((64, 384, 768), (16, 256, 1024), 512, 200)
    if "c" in parts:
        minilm()


if __name__ == "__main__":
    main()

"""SIGReg: what it costs, and what it does to a collapsed cone.

    python benchmarks/speed/sigreg.py [a] [b]

(a) Time and memory, forward and backward on embeddings, D = 384, 1,024 directions, 17 knots: of the
naive form (the N x K x knots tensor under autograd), of SIGReg, and of the matrix products alone.
(b) Embeddings in a cone, moved by Adam down SIGReg alone: IsoScore (over what a Gaussian sample of
the size reaches) and mean cosine, for 16 to 1,024 directions, scaled by sqrt(D), unscaled, and as
in the listing of the blog post. Expected of that, before the run: level, because Adam divides the
size of the gradient out, and .02 higher or lower where it weighs large knots more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from benchmarks.speed.kernel import seconds
from benchmarks.speed.memory import peak_bytes
from benchmarks.studies.estimates import markdown
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
    measured = seconds(steps, repeats)
    memory = {name: peak_bytes(run) for name, run in steps.items()}
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


def unscaled(x: Tensor, number: int) -> Tensor:
    return SIGReg(number, scale=None)(F.normalize(x, dim=1))


def of_blog(x: Tensor, number: int) -> Tensor:
    """16 knots from 0 to 3, whose errors count alike, and no factor N."""
    directions = F.normalize(torch.randn(x.shape[1], number), dim=0)
    knots = torch.linspace(0, 3, 16)
    angles = (F.normalize(x, dim=1) * x.shape[1] ** 0.5 @ directions)[..., None] * knots
    real = angles.cos().mean(dim=0) - torch.exp(-knots.square() / 2)
    return (real.square() + angles.sin().mean(dim=0).square()).mean()


FORMS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "scaled": lambda x, number: SIGReg(number)(x),
    "unscaled": unscaled,
    "the blog's": of_blog,
}


def open_cone(size: int, dim: int, loss: Callable[[Tensor], Tensor], steps: int) -> list[str]:
    torch.manual_seed(0)
    x = cone(size, dim).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.005)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(x).backward()
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
    for name, form in FORMS.items():
        for number in numbers:
            loss = partial(form, number=number)
            found = [", ".join(open_cone(size, dim, loss, steps)) for dim in dims]
            rows.append([f"{name} {number}", *found])
    print("\n".join(markdown(header, rows)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help="a, b; default: both")
    parts = parser.parse_args().parts or ["a", "b"]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32")
    if "a" in parts:
        for size in (512, 2048):
            cost(size, 384, 1024)
    if "b" in parts:
        collapse((64, 384, 768), (16, 256, 1024), 512, 200)


if __name__ == "__main__":
    main()

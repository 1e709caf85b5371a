"""SIGReg: what it costs, and what it does to a collapsed cone.

    OMP_NUM_THREADS=1 python benchmarks/speed/sigreg.py [a] [b]

(a) Processor milliseconds and memory, forward and backward on embeddings: of CosineRankingLoss and
of SIGRegInfoNCE, which adds SIGReg over all directions, on N / 2 pairs; and of SIGReg alone over
all directions, with LeJEPA's 1,024 and as in the listing of the blog post.
(b) Embeddings in a cone, moved by Adam down SIGReg alone: IsoScore (over what a Gaussian sample of
the size reaches) and mean cosine, for 16 to 1,024 directions and all, scaled by sqrt(D) and
unscaled.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from benchmarks.speed.kernel import seconds
from benchmarks.speed.memory import MIB, peak_bytes
from benchmarks.studies.estimates import markdown
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW, Dense
from torch import Tensor

from st_magnitude import CosineRankingLoss, MagnitudeRankingLoss, SIGReg, SIGRegInfoNCE, geometry

# --- (a) cost -------------------------------------------------------------------------------------

SIZES = [(n, 384) for n in (64, 256, 1024, 4096, 16_384)] + [(n, 768) for n in (64, 256, 2048)]


def cost(size: int, dim: int) -> list[str]:
    """Milliseconds of each loss, of SIGRegInfoNCE over InfoNCE, and MiB of all directions."""
    columns = [torch.randn(size // 2, dim, requires_grad=True) for _ in range(2)]
    x = torch.randn(size, dim, requires_grad=True)
    model = SentenceTransformer(modules=[BoW(["tea"]), Dense(1, dim)], device="cpu")

    def of_columns(loss: MagnitudeRankingLoss) -> None:
        value = loss.compute_loss_from_embeddings(columns, None)
        terms = value.values() if isinstance(value, dict) else [value]
        sum(terms, torch.zeros(())).backward()

    def of_rows(loss: SIGReg) -> None:
        loss(x).backward()

    steps = {
        "InfoNCE": partial(of_columns, CosineRankingLoss(model)),
        "SIGRegInfoNCE": partial(of_columns, SIGRegInfoNCE(model)),
        "all": partial(of_rows, SIGReg()),
        "1,024": partial(of_rows, SIGReg(1024)),
        "listing": partial(of_rows, SIGReg(16, statistic="plain_mean")),
    }
    repeats = max(2, min(40, 2**14 // size))
    found = seconds(steps, repeats, clock=time.process_time)
    ratio = found["SIGRegInfoNCE"] / found["InfoNCE"]
    memory = peak_bytes(steps["all"]) / MIB
    ms = [f"{1e3 * value:.3g}" for value in found.values()]
    return [f"{size:,}", str(dim), *ms, f"{ratio:.1f}", f"{memory:.2g}"]


# --- (b) a collapsed cone -------------------------------------------------------------------------


def cone(size: int, dim: int) -> Tensor:
    """Unit rows with a mean cosine of about .8 and a falling spectrum."""
    generator = torch.Generator().manual_seed(0)
    spectrum = torch.arange(1, dim + 1).float() ** -0.5
    noise = torch.randn(size, dim, generator=generator) * spectrum / spectrum.norm()
    rotation = torch.linalg.qr(torch.randn(dim, dim, generator=generator))[0]
    return F.normalize((noise + 2 * F.normalize(torch.ones(dim), dim=0)) @ rotation, dim=1)


def unscaled(x: Tensor, number: int | None) -> Tensor:
    return SIGReg(number, scale=None)(F.normalize(x, dim=1))


FORMS: dict[str, Callable[[Tensor, int | None], Tensor]] = {
    "scaled": lambda x, number: SIGReg(number)(x),
    "unscaled": unscaled,
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
    ceiling = 1 / (1 + unit.shape[1] / unit.shape[0])  # of an isotropic sample
    reached = geometry.isoscore(unit) / ceiling
    return [f"{reached:.2f}", f"{geometry.mean_cosine(unit):.3f}"]


def collapse(dims: tuple[int, ...], numbers: tuple[int, ...], size: int, steps: int) -> None:
    print(f"\n(b) N = {size}, {steps} steps of Adam at 0.005: IsoScore, mean cosine\n")
    header = ["directions", *(f"D = {dim}" for dim in dims)]
    rows = [["before", *(", ".join(measures(cone(size, dim))) for dim in dims)]]
    for name, form in FORMS.items():
        for number in numbers if name == "unscaled" else (*numbers, None):
            loss = partial(form, number=number)
            found = [", ".join(open_cone(size, dim, loss, steps)) for dim in dims]
            rows.append([f"{name} {number or 'all'}", *found])
    print("\n".join(markdown(header, rows)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help="a, b; default: both")
    parts = parser.parse_args().parts or ["a", "b"]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32")
    if "a" in parts:
        print("\n(a) processor ms, forward and backward\n")
        head = ["N", "D", "InfoNCE", "SIGRegInfoNCE", "all", "1,024", "listing", "ratio", "MiB"]
        print("\n".join(markdown(head, [cost(*size) for size in SIZES], "r")), flush=True)
    if "b" in parts:
        collapse((64, 384, 768), (16, 256, 1024), 512, 200)


if __name__ == "__main__":
    main()

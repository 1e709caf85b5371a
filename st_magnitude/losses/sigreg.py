"""SIGReg, a regularizer that spreads embeddings over all directions, and InfoNCE with it.

The Epps-Pulley distance of N projected embeddings p_i = a · x_i from N(0, 1), with phi(t) = exp(-t²/2):

    T(a) = sum_k w_k [ (mean_i cos(t_k p_i) - phi(t_k))² + (mean_i sin(t_k p_i))² ]

is averaged over random directions a. The knots t_k are multiples of one step, so the cosines and sines at a few
multiples give those at all of them: with 2 and 3 multiples, cos(5b ± a) = cos 5b cos a ∓ sin 5b sin a reaches 17 knots.
The sums over rows of such products are one small matrix product per direction, and the gradient is another one with the
same factors.

Under torch.distributed the statistic is taken of the joined batch, also when batches differ in size. The gradient is
multiplied by the number of ranks, because DDP takes the mean over ranks.

Source: Epps and Pulley, A Test for Normality Based on the Empirical Characteristic Function, Biometrika 1983; LeJEPA,
arXiv 2511.08544, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from st_magnitude._checks import at_least, one_of, positive, prefix_dims, whole_number
from st_magnitude.geometry import knots_and_weights
from st_magnitude.kernel.ring import num_ranks
from st_magnitude.losses.ranking import MagnitudeRankingLoss, RankingOptions
from st_magnitude.similarity import COSINE, Similarity, at_least_float32, safe_norm

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SIGReg", "SIGRegInfoNCE"]

# The number of projections in a chunk; each takes 24 numbers of memory. On a CPU they stay in the cache.
_CHUNK = {"cpu": 2**16, "cuda": 2**21}

CITATION = """
@misc{balestriero2025lejepa,
    title={LeJEPA: Provable and Scalable Self-Supervised Learning Without the Heuristics},
    author={Randall Balestriero and Yann LeCun},
    year={2025},
    eprint={2511.08544},
    archivePrefix={arXiv},
    primaryClass={cs.LG}
}
"""


class SIGReg(nn.Module):
    """Sketched isotropic Gaussian regularization: how far projections of the embeddings are from N(0, 1).

        SIGReg(x) = mean_a N · sum_k w_k [ (mean_i cos(t_k a · x_i) - exp(-t_k²/2))² + (mean_i sin(t_k a · x_i))² ]

    over random unit directions a, the Epps-Pulley statistic of each. Rows are first normalised and multiplied by
    sqrt(D), which gives the projections of evenly spread rows variance 1. The best value is not 0: N rows drawn from
    the target have the expectation 1.0525 for any N (see `null_expectation`). Training lowers the excess over it.

    Args:
        num_directions: Number of directions that a step draws; fewer than about D leave much of the space unseen.
        num_knots: Number T of knots t_k, evenly spaced on [0, t_max].
        t_max: Largest knot.
        scale: Norm of the normalised rows: ``"sqrt_d"`` (of the prefix, if there are ``dims``) or a number. None takes
            the embeddings as they are, with their norms.
        window: Whether the integral over t has the weights exp(-t²/2).
        scale_by_n: Whether the statistic is multiplied by the number of rows N; its null expectation then does not
            depend on N.
        dims: Prefixes to regularise. Each is cut, normalised and scaled by itself, and the loss is their mean. None:
            all dimensions.
        views: Sample that a loss takes from its columns. ``"pooled"``: the rows of all columns (queries, documents,
            negatives) are one sample. ``"per_view"``: the mean over columns, with the same directions.
        gather: Whether to take the statistic of the joined batch of all ranks, under torch.distributed. Ranks may
            have batches of different sizes. The gradient is right under DDP, which averages over ranks.

    Attributes:
        last_excess: The last value minus its null expectation, detached; None before the first call.

    Raises:
        ValueError: If an argument is out of range.

    Directions come from torch's generator of the device, whose state the checkpoints of a Trainer contain, so a run
    that resumes draws the same directions. With ``gather`` all ranks take the directions of rank 0. Without gradient,
    as in evaluation, directions are always the same and leave the generator alone. SIGReg computes in float32 with
    autocast off; float64 stays float64. The forward pass takes the gradient, so a second derivative does not exist.

    Example:
        >>> import torch
        >>> from st_magnitude import SIGReg
        >>> sigreg, x = SIGReg(), torch.randn(256, 32)
        >>> sigreg(x) < 2 < sigreg(x + 3)  # spread out, and in a cone
        tensor(True)
        >>> round(sigreg.null_expectation(256), 4)
        1.0525

    Source: Balestriero and LeCun, LeJEPA, arXiv 2511.08544, section 4; with ``scale=None`` it is LeJEPA's.
    """

    def __init__(
        self,
        num_directions: int = 1024,
        num_knots: int = 17,
        t_max: float = 3.0,
        scale: float | Literal["sqrt_d"] | None = "sqrt_d",
        window: bool = True,
        scale_by_n: bool = True,
        *,
        dims: Iterable[int] | None = None,
        views: Literal["pooled", "per_view"] = "pooled",
        gather: bool = True,
    ) -> None:
        super().__init__()
        whole_number("num_directions", num_directions)
        positive("scale", scale, ["sqrt_d", None])
        one_of("views", views, ("pooled", "per_view"))
        knots_and_weights(num_knots, t_max, window, "trapezoid")  # checks them
        self.num_directions, self.num_knots, self.t_max = num_directions, num_knots, t_max
        self.scale, self.window, self.scale_by_n = scale, window, scale_by_n
        self.dims = None if dims is None else prefix_dims(dims)
        self.views, self.gather = views, gather
        self.last_excess: Tensor | None = None

    def forward(self, embeddings: Tensor, directions: Tensor | None = None) -> Tensor:
        """The statistic of one sample.

        Args:
            embeddings: Embeddings (n, D), not normalised.
            directions: Unit columns (D, K), constants. None: drawn anew at each call with gradient. A prefix takes
                the first rows, normalised again.
        """
        return self._mean([embeddings], directions)

    def of_columns(self, columns: Sequence[Tensor]) -> Tensor:
        """The statistic of a batch, from its columns (B, D). Losses call it."""
        return self._mean([torch.cat(list(columns))] if self.views == "pooled" else list(columns))

    def null_expectation(self, n: int) -> float:
        """The mean value of n independent rows whose projections have exactly the target distribution.

        sum_k w_k (1 - phi(t_k)²), divided by n unless ``scale_by_n``
        """
        w, phi = np.array(self._statistic.weights), np.array(self._statistic.target)
        return float(w @ (1 - phi**2)) / (1 if self.scale_by_n else n)

    @property
    def _statistic(self) -> Statistic:
        return _make_statistic(self.num_knots, self.t_max, self.window, self.scale_by_n)

    def _mean(self, columns: list[Tensor], directions: Tensor | None = None) -> Tensor:
        """The mean over columns and prefixes."""
        width = columns[0].shape[1]
        dims = (width,) if self.dims is None else self.dims
        if max(dims) > width:
            raise ValueError(f"dims={list(dims)} exceed the {width} dimensions of the embeddings.")
        with torch.autocast(columns[0].device.type, enabled=False):
            columns = [at_least_float32(x) for x in columns]
            directions = self._draw(columns[0]) if directions is None else directions.detach().to(columns[0])
            parts = [x[:, :dim] for x in columns for dim in dims]
            value = torch.stack([self._of_prefix(x, directions) for x in parts]).mean()
            # With scale_by_n the null expectation does not depend on the number of rows.
            sizes = [len(x) if self.scale_by_n else joined_rows(x, self._num_ranks()) for x in parts]
        self.last_excess = value.detach() - sum(map(self.null_expectation, sizes)) / len(sizes)
        return value

    def _of_prefix(self, x: Tensor, directions: Tensor) -> Tensor:
        dim = x.shape[1]
        if self.scale is not None:
            x = x / safe_norm(x) * (dim**0.5 if self.scale == "sqrt_d" else self.scale)  # (n, D)
        if dim < len(directions):
            directions = directions[:dim] / safe_norm(directions[:dim].T).T
        return EppsPulley.apply(x, directions, self._statistic, self._num_ranks())

    def _num_ranks(self) -> int:
        return num_ranks() if self.gather else 1

    def _draw(self, x: Tensor) -> Tensor:
        """The directions of this call, (D, K)."""
        generator = None if torch.is_grad_enabled() else torch.Generator(x.device).manual_seed(0)
        shape = x.shape[1], self.num_directions
        directions = torch.randn(shape, generator=generator, dtype=x.dtype, device=x.device)
        if self._num_ranks() > 1:
            dist.broadcast(directions, src=0)
        return directions / torch.linalg.vector_norm(directions, dim=0)

    def extra_repr(self) -> str:
        names = ("num_directions", "num_knots", "t_max", "scale", "window", "scale_by_n")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


class SIGRegInfoNCE(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` plus :class:`~st_magnitude.SIGReg` on the embeddings of all columns.

        L = InfoNCE + weight · SIGReg

    It is for embeddings that crowd in a cone or in few dimensions: after training with small batches, before truncation
    or quantisation, or for a backbone that was never trained to embed. It spreads the variance evenly over the
    dimensions; it is not designed to raise retrieval scores. The Trainer logs both terms by name. The class is a
    shorthand: every loss of this package takes ``regularizers=[(SIGReg(), 0.05)]``.

    Args:
        model: The SentenceTransformer to train.
        weight: Weight of SIGReg, for statistics that grow with the batch (``scale_by_n=True``, the default).
        similarity: A Similarity or its name. SIGReg depends on directions only (unless its ``scale`` is None), so
            the norm stays free under a similarity that keeps magnitude.
        sigreg: The regularizer; None: ``SIGReg()``. Use ``SIGReg(dims=...)`` for prefixes.
        **options: All other arguments of MagnitudeRankingLoss, such as ``terms``, ``scale``, more ``regularizers`` or
            ``mini_batch_size``, with which SIGReg still sees the whole batch.

    Raises:
        ValueError: As MagnitudeRankingLoss does, or if weight is negative.

    Example:
        ::

            loss = stm.SIGRegInfoNCE(model, weight=0.05, sigreg=stm.SIGReg(dims=(96, 192, 384)))
            SentenceTransformerTrainer(model=model, train_dataset=dataset, loss=loss).train()

    Source: LeJEPA, arXiv 2511.08544.
    """

    citation = CITATION

    def __init__(
        self,
        model: SentenceTransformer,
        weight: float = 0.05,
        similarity: Similarity | str = COSINE,
        *,
        sigreg: SIGReg | None = None,
        **options: Unpack[RankingOptions],
    ) -> None:
        at_least("weight", weight, 0, " and is usually 0.05")
        given: dict[str, Any] = dict(options)
        given["regularizers"] = [(sigreg or SIGReg(), weight), *given.get("regularizers", ())]
        super().__init__(model, similarity, **given)


# --- the statistic ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statistic:
    """Knots t_k > 0 (0 adds nothing), weights w_k, target phi(t_k), and whether the sum is multiplied by N."""

    knots: tuple[float, ...]
    weights: tuple[float, ...]
    target: tuple[float, ...]
    scale_by_n: bool


@lru_cache(maxsize=64)
def _make_statistic(num_knots: int, t_max: float, window: bool, scale_by_n: bool) -> Statistic:
    """The statistic whose target is N(0, 1)."""
    knots, weights = (v[1:] for v in knots_and_weights(num_knots, t_max, window, "trapezoid"))  # t = 0 adds nothing
    target = np.exp(-(knots**2) / 2)
    return Statistic(tuple(knots.tolist()), tuple(weights.tolist()), tuple(target.tolist()), scale_by_n)


class EppsPulley(torch.autograd.Function):
    """The mean of T(a) over columns of directions: (n, D), (D, K) -> scalar. The forward pass takes the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, directions: Tensor, statistic: Statistic, ranks: int) -> Tensor:
        loss, gradient = _walk(x, directions, statistic, ranks, ctx.needs_input_grad[0])
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * grad_output, None, None, None


def _walk(
    x: Tensor, directions: Tensor, statistic: Statistic, ranks: int, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss and its gradient, by chunks of directions."""
    rows, num_directions = len(x), directions.shape[1]
    total = joined_rows(x, ranks)
    num_fine, num_coarse = _basis(len(statistic.knots))
    products = _product_formulas(len(statistic.knots)).to(x)  # (2 T, P Q)
    first = statistic.knots[0]
    stride = 2 * num_fine + 1
    multiples = [*range(1, num_fine + 1), *(stride * b for b in range(1, num_coarse + 1))]
    steps = x.new_tensor([first * m for m in multiples])[:, None]  # (A + B, 1)
    knots, weights, target = (x.new_tensor(v) for v in (statistic.knots, statistic.weights, statistic.target))
    weights = weights * ((total if statistic.scale_by_n else 1) / num_directions)

    # All ranks must cut the directions in the same way, however many rows each of them has.
    chunk = max(1, min(num_directions, _CHUNK.get(x.device.type, 2**16) * ranks // total))
    fine_ = x.new_ones(chunk, 2 * num_fine + 1, rows)  # 1, cosines, sines of a θ
    coarse_ = x.new_ones(chunk, 2 * num_coarse + 1, rows)  # 1, cosines, sines of (2 A + 1) b θ
    loss, gradient = x.new_zeros(()), torch.zeros_like(x) if with_gradient else None
    for start in range(0, num_directions, chunk):
        a = directions[:, start : start + chunk].T  # (C, D)
        c = len(a)
        fine, coarse = fine_[:c], coarse_[:c]
        angles = (a @ x.T)[:, None] * steps  # (C, A + B, n)
        for planes, angle, size in (
            (fine, angles[:, :num_fine], num_fine),
            (coarse, angles[:, num_fine:], num_coarse),
        ):
            torch.cos(angle, out=planes[:, 1 : size + 1])
            torch.sin(angle, out=planes[:, size + 1 :])
        # The sums over rows of cos kθ and sin kθ at all knots are sums of products of a fine and a coarse factor.
        sums = torch.bmm(fine, coarse.mT).view(c, -1) @ products.T  # (C, 2 T): of cosines and of sines at all knots
        error = (_sum_over_ranks(sums, ranks) / total).view(c, 2, -1)
        error[:, 0] -= target
        loss += (error.square() * weights).sum()
        if gradient is not None:
            # d T / d p = 2/N sum_k w_k t_k (imaginary error · cos(t_k p) - real error · sin(t_k p))
            slope = torch.stack([error[:, 1], -error[:, 0]], dim=1) * (weights * knots * (2 * ranks / total))
            mixed = (slope.view(c, -1) @ products).view(c, fine.shape[1], -1)  # (C, P, Q)
            slopes = torch.bmm(mixed.mT, fine).mul_(coarse).sum(dim=1)  # (C, n)
            gradient.addmm_(slopes.T, a)
    return loss, gradient


@lru_cache
def _basis(num_knots: int) -> tuple[int, int]:
    """The fewest multiples (A fine ones, B coarse ones) that reach num_knots: A + (2 A + 1) B >= num_knots."""
    candidates = [(a, -(-(num_knots - a) // (2 * a + 1))) for a in range(1, num_knots + 1)]
    return min(candidates, key=sum)


@lru_cache
def _product_formulas(num_knots: int) -> Tensor:
    """cos kθ (rows 0 .. T - 1) and sin kθ (rows T .. 2 T - 1), k = 1 .. T, of products fine x coarse: (2 T, P Q).

    With k = (2 A + 1) b + a and |a| <= A.
    """
    num_fine, num_coarse = _basis(num_knots)
    formulas = torch.zeros(2, num_knots, 2 * num_fine + 1, 2 * num_coarse + 1, dtype=torch.float64)
    for k in range(1, num_knots + 1):
        b = (k + num_fine) // (2 * num_fine + 1)
        a = k - (2 * num_fine + 1) * b
        cos_a, sin_a, sign = abs(a), num_fine + abs(a), math.copysign(1, a)  # 0 is the constant 1
        cos_b, sin_b = b, num_coarse + b
        formulas[0, k - 1, cos_a, cos_b] = 1
        if a:
            formulas[1, k - 1, sin_a, cos_b] = sign
        if b:
            formulas[1, k - 1, cos_a, sin_b] = 1
        if a and b:
            formulas[0, k - 1, sin_a, sin_b] = -sign
    return formulas.view(2 * num_knots, -1)


def joined_rows(x: Tensor, ranks: int) -> int:
    """The number of rows of the joined batch."""
    return int(_sum_over_ranks(x.new_tensor(float(len(x))), ranks).item()) if ranks > 1 else len(x)


def _sum_over_ranks(x: Tensor, ranks: int) -> Tensor:
    if ranks > 1:
        dist.all_reduce(x)
    return x

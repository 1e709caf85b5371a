"""Regularizers: functions of embeddings (n, D) that return a scalar."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Real
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from st_magnitude._checks import at_least, positive, prefix_dims, whole_number
from st_magnitude.kernel.ring import num_ranks
from st_magnitude.similarity import at_least_float32, safe_norm

__all__ = ["Penalties", "Regularizer", "SIGReg", "weighted_list"]

# The projections in a chunk, each of which takes six numbers of memory, in the cache of a CPU
CHUNK = {"cpu": 2**16, "cuda": 2**21}

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

Regularizer = Callable[[Tensor], Tensor]

# Names that a Trainer logs, and the names of the main losses
TAKEN = {"infonce", "contrastive", "loss", "steps", "learning_rate", "grad_norm", "epoch"}


class Penalties(nn.ModuleDict):
    """Weighted regularizers by the names that they are logged under.

    The name is the attribute ``name``, or the name of the function or class in snake case:
    ``sigreg``, ``sigreg_2``. A name that the log has for something else is numbered too:
    ``infonce_2``. MagnitudeRankingLoss says what a regularizer is.

    Raises:
        TypeError: If something else is given. A single regularizer or pair needs no list around it.
    """

    def __init__(self, regularizers: Iterable[Regularizer | tuple[Regularizer, float]]) -> None:
        self.weighted: dict[str, tuple[Regularizer, float]] = {}
        for regularizer, weight in weighted_list(regularizers):
            of_class = getattr(regularizer, "__name__", type(regularizer).__name__)
            given = getattr(regularizer, "name", None) or of_class
            base = name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(given)).lower()
            numbers = itertools.count(2)
            while name in TAKEN | self.weighted.keys():
                name = f"{base}_{next(numbers)}"
            self.weighted[name] = (regularizer, weight)
        modules = {k: r for k, (r, _) in self.weighted.items() if isinstance(r, nn.Module)}
        super().__init__(modules)

    def __bool__(self) -> bool:
        return bool(self.weighted)

    def forward(self, columns: Sequence[Tensor]) -> dict[str, Tensor]:
        """The weighted penalties of the embeddings of a batch, (B, D) for each column."""
        penalties = {}
        for name, (regularizer, weight) in self.weighted.items():
            of_columns = getattr(regularizer, "of_columns", None)
            if of_columns is None:
                penalties[name] = weight * regularizer(torch.cat(list(columns)))
            else:
                penalties[name] = weight * of_columns(columns)
        return penalties

    def get_config_dict(self) -> dict[str, float]:
        return {name: weight for name, (_, weight) in self.weighted.items()}


def weighted_list(given: Any) -> list[tuple[Regularizer, float]]:
    """Pairs of a regularizer and its weight, from a list or a single regularizer or pair."""
    is_pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Real)
    if is_pair or _is_regularizer(given):
        given = [given]
    pairs = [item if isinstance(item, tuple) and len(item) == 2 else (item, 1.0) for item in given]
    for regularizer, weight in pairs:
        if not _is_regularizer(regularizer) or not isinstance(weight, Real):
            raise TypeError(
                "regularizers are functions of embeddings, or pairs of one and its weight, such as "
                f"regularizers=[(SIGReg(), 0.05)]; got {(regularizer, weight)!r}."
            )
    return pairs


def _is_regularizer(given: object) -> bool:
    return callable(given) or hasattr(given, "of_columns")


class SIGReg(nn.Module):
    """Sketched isotropic Gaussian regularization: how far projections of the embeddings are from
    N(0, 1).

        SIGReg(x) = mean_a N · sum_k w_k |mean_i exp(i t_k a · x_i) - exp(-t_k²/2)|²

    over random unit directions a: the mean of Epps-Pulley statistics, whose w_k are the weights of
    the trapezoid rule for the integral over t from -t_max to t_max with the density exp(-t²/2).
    Rows are first normalised and multiplied by sqrt(D), which gives the projections of evenly
    spread rows variance 1. The best value is not 0: N rows drawn from the target have the
    expectation 1.0525 for any N (see `null_expectation`). Training lowers the excess over it, whose
    last value is the attribute ``last_excess``.

    Args:
        num_directions: Number of directions that a step draws; about D or more see all the space.
        num_knots: Number of knots t_k, evenly spaced on [0, t_max].
        t_max: Largest knot.
        scale: Norm of the normalised rows: ``"sqrt_d"`` (of the prefix, if there are ``dims``) or a
            number. None takes the embeddings as they are, with their norms.
        dims: Prefixes, each cut, normalised and scaled by itself, whose mean is the loss.
        gather: Whether to take the statistic of the joined batch of all ranks, which may have
            batches of different sizes. The gradient is right under DDP, which averages over ranks.

    Raises:
        ValueError: If an argument is out of range.

    Directions come from torch's generator of the device, whose state the checkpoints of a Trainer
    contain, so a run that resumes draws the same directions. With ``gather`` all ranks take the
    directions of rank 0. Without gradient, as in evaluation, directions are always the same and
    leave the generator alone. SIGReg computes in float32 with autocast off; float64 stays float64.
    A second derivative does not exist.

    Example:
        >>> import torch
        >>> from st_magnitude import SIGReg
        >>> sigreg, x = SIGReg(), torch.randn(256, 32)
        >>> sigreg(x) < 2 < sigreg(x + 3)  # spread out, and in a cone
        tensor(True)
        >>> round(sigreg.null_expectation, 4)
        1.0525

    Source: Epps and Pulley, A Test for Normality Based on the Empirical Characteristic Function,
        Biometrika 1983; Balestriero and LeCun, LeJEPA, arXiv 2511.08544, section 4, which has
        ``scale=None``.
    """

    def __init__(
        self,
        num_directions: int = 1024,
        num_knots: int = 17,
        t_max: float = 3.0,
        scale: float | Literal["sqrt_d"] | None = "sqrt_d",
        *,
        dims: Iterable[int] | None = None,
        gather: bool = True,
    ) -> None:
        super().__init__()
        whole_number("num_directions", num_directions)
        at_least("num_knots", num_knots, 2)
        positive("t_max", t_max)
        positive("scale", scale, ["sqrt_d", None])
        self.num_directions, self.num_knots, self.t_max = num_directions, num_knots, t_max
        self.scale, self.gather = scale, gather
        self.dims = None if dims is None else prefix_dims(dims)
        self.last_excess: Tensor | None = None

    def forward(self, embeddings: Tensor, directions: Tensor | None = None) -> Tensor:
        """The statistic of embeddings (n, D), which are not normalised.

        ``directions`` are unit columns (D, K); None draws them. A prefix takes the first rows,
        normalised again.
        """
        width = embeddings.shape[1]
        dims = (width,) if self.dims is None else self.dims
        if max(dims) > width:
            raise ValueError(f"dims={list(dims)} exceed the {width} dimensions of the embeddings.")
        with torch.autocast(embeddings.device.type, enabled=False):
            x = at_least_float32(embeddings)
            directions = self._draw(x) if directions is None else directions.detach().to(x)
            value = torch.stack([self._of_prefix(x[:, :dim], directions) for dim in dims]).mean()
        self.last_excess = value.detach() - self.null_expectation
        return value

    @property
    def null_expectation(self) -> float:
        """The mean value of rows that have exactly the target: sum_k w_k (1 - phi(t_k)²)."""
        step = self.t_max / (self.num_knots - 1)
        targets = [math.exp(-((step * k) ** 2) / 2) for k in range(1, self.num_knots)]
        values = [2 * step * (phi - phi**3) for phi in targets]
        return sum(values) - values[-1] / 2

    def _knots(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The knots t_k > 0, their weights and the targets exp(-t_k²/2), (T,) each."""
        step = self.t_max / (self.num_knots - 1)
        knots = step * torch.arange(1, self.num_knots, dtype=like.dtype, device=like.device)
        target = (-knots.square() / 2).exp()
        weights = 2 * step * target
        weights[-1] /= 2
        return knots, weights, target

    def _of_prefix(self, x: Tensor, directions: Tensor) -> Tensor:
        dim = x.shape[1]
        if self.scale is not None:
            x = x / safe_norm(x) * (dim**0.5 if self.scale == "sqrt_d" else self.scale)  # (n, D)
        if dim < len(directions):
            directions = directions[:dim] / safe_norm(directions[:dim].T).T
        return EppsPulley.apply(x, directions, *self._knots(x), num_ranks() if self.gather else 1)

    def _draw(self, x: Tensor) -> Tensor:
        """The directions of this call, (D, K)."""
        generator = None if torch.is_grad_enabled() else torch.Generator(x.device).manual_seed(0)
        shape = x.shape[1], self.num_directions
        directions = torch.randn(shape, generator=generator, dtype=x.dtype, device=x.device)
        if self.gather and num_ranks() > 1:
            dist.broadcast(directions, src=0)
        return directions / torch.linalg.vector_norm(directions, dim=0)


class EppsPulley(torch.autograd.Function):
    """The mean of N sum_k w_k |error_k|² over directions, with error_k = mean_i exp(i t_k p_i) -
    phi_k and p = x @ a.

    The knots are multiples of the first one, so exp(i t_k p) are powers of z = exp(i t_1 p), and
    the gradient is a polynomial in z: d / d p_i = -2/N Im( sum_k w_k t_k conj(error_k) z_i^k ). The
    forward pass takes it, because a chunk of directions is gone after it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (n, D)
        directions: Tensor,  # (D, K)
        knots: Tensor,  # (T,)
        weights: Tensor,  # (T,)
        target: Tensor,  # (T,)
        ranks: int,
    ) -> Tensor:
        total = x.new_full((), len(x))
        chunks = _chunks(x, directions, knots[0])
        sums = torch.cat([_sums_of_powers(z, len(knots)) for _, z in chunks])  # (K, T)
        if ranks > 1:
            parts = torch.cat([torch.view_as_real(sums).flatten(), total[None]])
            dist.all_reduce(parts)
            sums, total = torch.view_as_complex(parts[:-1].view(*sums.shape, 2)), parts[-1]
        error = sums / total - target
        weights = weights * (total / directions.shape[1])
        if ctx.needs_input_grad[0]:
            # Times the number of ranks, because DDP takes the mean over ranks.
            coefficients = error.conj() * (weights * knots * (-2 * ranks / total))  # (K, T)
            gradient = torch.zeros_like(x)
            for columns, z in _chunks(x, directions, knots[0]):
                slope = _polynomial(z, coefficients[columns]).imag  # (C, n)
                gradient.addmm_(slope.T, directions[:, columns].T)
            ctx.save_for_backward(gradient)
        return ((error.real.square() + error.imag.square()) * weights).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * grad_output, None, None, None, None, None


def _chunks(x: Tensor, directions: Tensor, knot: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """A few directions at a time, and exp(i knot p) of the rows' projections on them, (C, n)."""
    size = max(1, CHUNK.get(x.device.type, 2**16) // len(x))
    for start in range(0, directions.shape[1], size):
        columns = slice(start, start + size)
        angles = knot * (directions[:, columns].T @ x.T)
        yield columns, torch.polar(torch.ones_like(angles), angles)


def _sums_of_powers(z: Tensor, number: int) -> Tensor:
    """The sums over rows of z, z², ..., z^number: (C, n) -> (C, number)."""
    power, sums = z.clone(), [z.sum(dim=1)]
    for _ in range(1, number):
        sums.append(power.mul_(z).sum(dim=1))
    return torch.stack(sums, dim=1)


def _polynomial(z: Tensor, coefficients: Tensor) -> Tensor:
    """sum_k c_k z^k for k = 1 ... T, by Horner's rule: (C, n), (C, T) -> (C, n)."""
    value = coefficients[:, -1:] * z
    for k in range(coefficients.shape[1] - 2, -1, -1):
        value.add_(coefficients[:, k, None]).mul_(z)
    return value

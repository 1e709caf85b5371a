"""Regularizers: functions of embeddings (n, D) that return a scalar."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from sentence_transformers.util import all_gather, all_gather_with_grad
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from st_magnitude._checks import InputError, InputTypeError, at_least, one_of, prefix_dims
from st_magnitude._distributed import num_ranks
from st_magnitude.losses.isotropy import NUM_KNOTS, Statistic, knots_of, over_all_directions
from st_magnitude.similarity import at_least_float32, safe_norm, without_autocast

# The most angles, each of a row, a direction and a knot, that are held at a time
CHUNK = {"cpu": 2**20, "cuda": 2**24}

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


@runtime_checkable
class OfColumns(Protocol):
    """A regularizer that tells the columns of a batch apart."""

    def of_columns(self, embeddings: Sequence[Tensor]) -> Tensor:
        """A scalar, from the embeddings (B, D) of each column."""
        ...


Regularizer = Callable[[Tensor], Tensor] | OfColumns  # the first from embeddings (n, D)

# Names that a Trainer logs, and the names of the main losses
TAKEN = {"infonce", "contrastive", "loss", "steps", "learning_rate", "grad_norm", "epoch"}


class Penalties(nn.ModuleDict):
    """Weighted regularizers by their names in the log.

    The name is the attribute ``name``, or the name of the function or class in snake case:
    ``sigreg``, ``sigreg_2``. A name that the log has for something else is numbered too:
    ``infonce_2``.
    """

    def __init__(self, regularizers: Iterable[Regularizer | tuple[Regularizer, float]]) -> None:
        self.weighted: dict[str, tuple[Regularizer, float]] = {}
        for given in regularizers:
            regularizer, weight = given if isinstance(given, tuple) else (given, 1.0)
            is_regularizer = callable(regularizer) or isinstance(regularizer, OfColumns)
            if not is_regularizer or not isinstance(weight, Real):
                raise InputTypeError(
                    "regularizers are functions of embeddings, or pairs of one and its weight, such"
                    f" as regularizers=[(SIGReg(), 0.05)]; got {(regularizer, weight)!r}."
                )
            self.weighted[self._new_name(regularizer)] = (regularizer, weight)
        modules = {k: r for k, (r, _) in self.weighted.items() if isinstance(r, nn.Module)}
        super().__init__(modules)
        used = (getattr(r, "uses_norms", False) for r, _ in self.weighted.values())
        self.uses_norms = any(used)

    def _new_name(self, regularizer: Regularizer) -> str:
        of_class = getattr(regularizer, "__name__", type(regularizer).__name__)
        given = getattr(regularizer, "name", None) or of_class
        base = name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(given)).lower()
        numbers = itertools.count(2)
        while name in TAKEN | self.weighted.keys():
            name = f"{base}_{next(numbers)}"
        return name

    def forward(self, embeddings: Sequence[Tensor]) -> dict[str, Tensor]:
        """The weighted penalties of a batch by name, from the embeddings (B, D) of each column."""
        penalties = {}
        for name, (regularizer, weight) in self.weighted.items():
            if isinstance(regularizer, OfColumns):
                penalty = regularizer.of_columns(embeddings)
            else:
                penalty = regularizer(torch.cat(list(embeddings)))
            if penalty.ndim:
                raise InputError(
                    f"The regularizer {name!r} must return a scalar; got the shape"
                    f" {tuple(penalty.shape)}. Return its mean, for example."
                )
            penalties[name] = weight * penalty
        return penalties

    def get_config_dict(self) -> dict[str, float]:
        return {name: weight for name, (_, weight) in self.weighted.items()}


class SIGReg(nn.Module):
    """Sketched isotropic Gaussian regularization: how far projections of the embeddings are from
    N(0, 1).

        SIGReg(x) = mean_a N · sum_k w_k |mean_i exp(i t_k a · x_i) - exp(-t_k²/2)|²

    over all unit directions a: the mean of Epps-Pulley statistics, whose w_k are the weights of
    the trapezoid rule, with 17 knots in [0, 3], for the integral over t from -3 to 3 with the
    density exp(-t²/2). Rows are first normalised and multiplied by sqrt(D), which gives the
    projections of evenly spread rows variance 1. The best value is not 0: N rows drawn from the
    target have the expectation sum_k w_k (1 - exp(-t_k²)) = 1.0525 for any N.

    A text that is twice in a batch counts twice, because its frequency belongs to the distribution:
    the expected gradient of N drawn rows is then N - 1 times that of the distance between the
    distribution and the target. Without copies it would be that of another distribution, which
    changes with N. Pairs of copies add a constant to the value.

    The mean over all directions is exact: N · mean_ij P(cos(x_i, x_j)), with a polynomial P that
    :mod:`st_magnitude.losses.isotropy` gives, in time that grows with N², and memory with N.

    Args:
        num_directions: Number of directions that a step draws instead, with noise, in time that
            grows with N. LeJEPA takes 1,024; about D or more see all the space.
        scale: Norm of the normalised rows: ``"sqrt_d"`` (of the prefix, if there are ``dims``).
            None takes the embeddings as they are, with their norms, and needs a number of
            directions.
        statistic: ``"plain_mean"``: without the factor N, with 16 knots that weigh 1 / 16 each, as
            in the listing from which sqrt(D) comes, ``SIGReg(16, statistic="plain_mean")``. The
            default is 1.5213 N times as much in expectation for N rows drawn from the target, and
            for N copies of one row: a weight w of the listing is about w / (1.5 N) of the default.
        dims: Prefixes, each cut, normalised and scaled by itself, whose mean is the loss.
        gather: Whether to take the statistic of the joined batch of all ranks, which may have
            batches of different sizes. The gradient is right under DDP, which averages over ranks.

    Raises:
        ValueError: If an argument is out of range.
        RuntimeError: If somebody asks for a second derivative over all directions.

    Drawn directions come from torch's generator of the device. With ``gather`` all ranks take those
    of rank 0. Without gradient, as in evaluation, they are always the same. SIGReg computes in
    float32 with autocast off; float64 stays float64.

    Example:
        >>> import torch
        >>> from st_magnitude import SIGReg
        >>> sigreg, x = SIGReg(), torch.randn(256, 32)
        >>> sigreg(x) < 2 < sigreg(x + 3)  # spread out, and in a cone
        tensor(True)

    Source: Epps and Pulley, A Test for Normality Based on the Empirical Characteristic Function,
        Biometrika 1983; Balestriero and LeCun, LeJEPA, arXiv 2511.08544, section 4, which has
        ``SIGReg(1024, scale=None)``; Gretton et al., A Kernel Two-Sample Test, JMLR 2012.
    """

    def __init__(
        self,
        num_directions: int | None = None,
        scale: Literal["sqrt_d"] | None = "sqrt_d",
        *,
        statistic: Statistic = "epps_pulley",
        dims: Iterable[int] | None = None,
        gather: bool = True,
    ) -> None:
        super().__init__()
        one_of("scale", scale, ("sqrt_d", None))
        one_of("statistic", statistic, tuple(NUM_KNOTS))
        if num_directions is not None:
            at_least("num_directions", num_directions, 1, " or None, which takes all directions")
        elif scale is None:
            raise InputError(
                "scale=None keeps the norms, and the mean over all directions needs rows of one"
                " norm. Give a number of directions: SIGReg(1024, scale=None)."
            )
        self.num_directions = num_directions
        self.scale = scale
        self.uses_norms = scale is None
        self.statistic = statistic
        self.gather = gather
        self.dims = None if dims is None else prefix_dims(dims)

    def forward(self, embeddings: Tensor, directions: Tensor | None = None) -> Tensor:
        """The statistic of embeddings (n, D), which are not normalised.

        ``directions`` are unit columns (D, K) to take instead. A prefix takes the first rows,
        normalised again.
        """
        width = embeddings.shape[1]
        dims = (width,) if self.dims is None else self.dims
        if max(dims) > width:
            raise InputError(f"dims={list(dims)} exceed the {width} dimensions of the embeddings.")
        with without_autocast(embeddings):
            x = at_least_float32(embeddings)
            if directions is not None:
                directions = directions.detach().to(x)
            elif self.num_directions is None:
                return over_all_directions(x, dims, self.statistic, self.gather)
            else:
                directions = self._draw(x, self.num_directions)
            return torch.stack([self._of_prefix(x[:, :dim], directions) for dim in dims]).mean()

    def _of_prefix(self, x: Tensor, directions: Tensor) -> Tensor:
        dim = x.shape[1]
        if self.scale is not None:
            x = x / safe_norm(x) * dim**0.5  # (n, D)
        if dim < len(directions):
            directions = directions[:dim] / safe_norm(directions[:dim].T).T
        numbers = torch.arange(1, NUM_KNOTS[self.statistic], dtype=x.dtype, device=x.device)
        knots, weights, target = knots_of(self.statistic, numbers)

        # A few directions at a time, whose angles (n, C, T) the backward pass computes again
        size = max(1, CHUNK.get(x.device.type, CHUNK["cuda"]) // (len(x) * len(knots)))
        parts = [
            checkpoint(
                characteristic_sums, x, part, knots, use_reentrant=False, preserve_rng_state=False
            )
            for part in directions.split(size, dim=1)
        ]
        sums = torch.cat(parts, dim=1)  # (2, K, T)
        number = sums.new_full((), len(x))
        if self.gather and num_ranks() > 1:
            sums = all_gather_with_grad(sums[None]).sum(dim=0)
            number = all_gather(number[None]).sum()

        real, imaginary = sums / number
        error = (real - target).square() + imaginary.square()  # (K, T)
        mean: Tensor = (error @ weights).mean()
        return mean if self.statistic == "plain_mean" else number * mean

    def _draw(self, x: Tensor, number: int) -> Tensor:  # (D, K)
        generator = None if torch.is_grad_enabled() else torch.Generator(x.device).manual_seed(0)
        shape = x.shape[1], number
        directions = torch.randn(shape, generator=generator, dtype=x.dtype, device=x.device)
        if self.gather and num_ranks() > 1:
            dist.broadcast(directions, src=0)
        unit: Tensor = directions / torch.linalg.vector_norm(directions, dim=0)
        return unit


def characteristic_sums(x: Tensor, directions: Tensor, knots: Tensor) -> Tensor:
    """sum_i exp(i t_k a · x_i), real and imaginary: (n, D), (D, C), (T,) -> (2, C, T)."""
    angles = (x @ directions)[..., None] * knots  # (n, C, T)
    return torch.stack([angles.cos().sum(dim=0), angles.sin().sum(dim=0)])

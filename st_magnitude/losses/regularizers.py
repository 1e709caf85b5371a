"""Regularizers: embeddings (n, D) to a scalar. Every loss takes them: ``regularizers=[(SIGReg(), 0.05)]``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import index
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from st_magnitude.geometry import knots_and_weights
from st_magnitude.losses import _sigreg
from st_magnitude.losses._sigreg import Statistic
from st_magnitude.similarity import safe_norm
from st_magnitude.training.trainer import calling_trainer

__all__ = ["SIGReg", "covariance_penalty", "norm_variance_penalty"]


_PRESETS: dict[str, dict[str, Any]] = {
    "lejepa": {"scale": None},
    "blog": {"num_directions": 16, "num_knots": 16, "window": False, "scale_by_n": False, "quadrature": "mean"},
}


class SIGReg(nn.Module):
    """Sketched isotropic Gaussian regularization: how far projections of the embeddings are from N(0, 1).

        SIGReg(x) = mean_a N · sum_k w_k [ (mean_i cos(t_k a · x_i) - exp(-t_k²/2))² + (mean_i sin(t_k a · x_i))² ]

    over random unit directions a (the Epps-Pulley statistic of each). Rows are normalised and multiplied by sqrt(D)
    first, so that the projections of evenly spread ones have variance 1. It is not 0 at its best: N rows drawn from
    the target have the expectation 1.0525 for any N (see `null_expectation`); the excess over it is what training
    lowers.

    Args:
        num_directions: How many directions a step draws; below about D they leave much of the space unseen.
            ``"exact"`` takes the expectation over all of them, a closed form of the distances of all pairs: no noise,
            O(N² D) time, not more memory. Best for batches up to about the number of directions that you would draw.
        num_knots: T, with t_k evenly spaced on [0, t_max].
        t_max: The largest knot.
        scale: Length of the normalised rows: ``"sqrt_d"`` (of the prefix, where there are ``dims``) or a number. None
            takes embeddings as they are, length included.
        window: Weights exp(-t²/2) in the integral over t.
        scale_by_n: Multiply by the number of rows N, so that the null expectation does not depend on it.
        target: ``"gaussian"``, or ``"sphere"``: the exact marginal of uniform points on the sphere of radius ``scale``,
            which is what normalised rows can reach. They differ in small dimensions.
        quadrature: ``"trapezoid"`` over [-t_max, t_max], or the plain ``"mean"`` over the knots.
        dims: Prefixes to regularise, each cut, normalised and scaled by itself; the loss is their mean. Default: all
            dimensions.
        views: In a loss: ``"pooled"`` takes the rows of all columns (queries, documents, negatives) as one sample,
            ``"per_view"`` is the mean over columns with the same directions.
        gather: Under torch.distributed, take the statistic of the joined batch of all ranks. Ranks may have batches of
            different size. The gradient is right under DDP, which averages over ranks.
        subtract_null: Subtract `null_expectation`: the gradient stays as it is, logs show the excess.
        seed: Of the directions.

    Attributes:
        last_excess: The last value minus its null expectation, detached; None before the first call.
        num_calls: Calls with gradient outside a Trainer. Restore it in a training loop of your own to go on with the
            same directions.

    Raises:
        ValueError: If an argument is out of range, or ``target="sphere"`` comes without a scale.

    Directions depend on the seed and the step only: they are the same on every rank, on every device and after a
    resume, and the global generators are left alone. In a Trainer the step is its ``global_step`` and the number of
    calls since that began, elsewhere ``num_calls``. Without gradient (evaluation) they are always the same. Computed in
    float32 with autocast off; float64 stays float64. The gradient is taken in the forward pass: there is no second
    derivative. Rows that are not finite give nan, or a ValueError where their length is needed (exact, scale=None).

    Example:
        >>> import torch
        >>> from st_magnitude import SIGReg
        >>> sigreg, x = SIGReg(), torch.randn(256, 32)
        >>> sigreg(x) < 2 < sigreg(x + 3)  # spread out, and in a cone
        tensor(True)
        >>> round(sigreg.null_expectation(256, 32), 4)
        1.0525

    Source: Balestriero and LeCun, LeJEPA, arXiv 2511.08544, section 4. For normalised text embeddings: the blog post of
    which ``SIGReg.preset("blog")`` is the listing.
    """

    def __init__(
        self,
        num_directions: int | Literal["exact"] = 1024,
        num_knots: int = 17,
        t_max: float = 3.0,
        scale: float | Literal["sqrt_d"] | None = "sqrt_d",
        window: bool = True,
        scale_by_n: bool = True,
        target: Literal["gaussian", "sphere"] = "gaussian",
        *,
        quadrature: Literal["trapezoid", "mean"] = "trapezoid",
        dims: Iterable[int] | None = None,
        views: Literal["pooled", "per_view"] = "pooled",
        gather: bool = True,
        subtract_null: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if num_directions != "exact" and not (isinstance(num_directions, int) and num_directions >= 1):
            raise ValueError(f"num_directions is a number from 1 up, or 'exact'; got {num_directions!r}.")
        if scale is not None and scale != "sqrt_d" and not (isinstance(scale, (int, float)) and scale > 0):
            raise ValueError(f"scale is 'sqrt_d', a positive number, or None (as they are); got {scale!r}.")
        if target not in ("gaussian", "sphere"):
            raise ValueError(f"target is 'gaussian' or 'sphere', got {target!r}.")
        if target == "sphere" and scale is None:
            raise ValueError("target='sphere' is a sphere of radius scale, but scale is None. Give scale='sqrt_d'.")
        if views not in ("pooled", "per_view"):
            raise ValueError(f"views is 'pooled' or 'per_view', got {views!r}.")
        dims = None if dims is None else tuple(index(dim) for dim in dims)
        if dims is not None and (not dims or min(dims) < 1 or len(set(dims)) < len(dims)):
            raise ValueError(f"dims are distinct whole numbers from 1 up, at least one of them; got {list(dims)}.")
        knots_and_weights(num_knots, t_max, window, quadrature)
        self.num_directions, self.num_knots, self.t_max = num_directions, num_knots, t_max
        self.scale, self.window, self.scale_by_n, self.target = scale, window, scale_by_n, target
        self.quadrature, self.dims, self.views, self.gather = quadrature, dims, views, gather
        self.subtract_null, self.seed = subtract_null, seed
        self._is_exact = num_directions == "exact"
        self._samples: Callable[[Sequence[Tensor]], list[Tensor]] = _pooled if views == "pooled" else list
        self.last_excess: Tensor | None = None
        self.num_calls = 0
        self._step, self._calls_in_step = -1, 0

    @classmethod
    def preset(cls, name: Literal["lejepa", "blog"], **overrides: Any) -> SIGReg:
        """``"lejepa"``: as in LeJEPA, with embeddings as they are. ``"blog"``: the listing for normalised text
        embeddings, whose values are some 1.5 N to 3 N times smaller (no N, no window, a mean over knots).

        Raises:
            ValueError: If the name is another.

        Example:
            >>> SIGReg.preset("blog", num_directions=256).num_knots
            16
        """
        if name not in _PRESETS:
            raise ValueError(f"The presets are {', '.join(_PRESETS)}; got {name!r}.")
        return cls(**{**_PRESETS[name], **overrides})

    def forward(self, embeddings: Tensor, directions: Tensor | None = None) -> Tensor:
        """The statistic of one sample.

        Args:
            embeddings: (n, D), not normalised.
            directions: (D, K), unit columns, constants. Default: drawn anew at each step. A prefix takes the first
                rows, at unit length again.

        Raises:
            ValueError: If shapes do not fit, columns are not of unit length, or directions come with ``"exact"``.
        """
        return self._mean([embeddings], directions)

    def of_columns(self, columns: Sequence[Tensor]) -> Tensor:
        """The statistic of a batch, from its columns (B, D): what losses call."""
        return self._mean(self._samples(columns), None)

    def null_expectation(self, n: int, dim: int) -> float:
        """What n independent rows whose projections have exactly the target distribution give on average.

        sum_k w_k (1 - phi(t_k)²), over n unless ``scale_by_n``
        """
        return _sigreg.null_expectation(self._statistic(dim), n)

    def _mean(self, columns: list[Tensor], directions: Tensor | None) -> Tensor:
        """Over columns and prefixes."""
        for x in columns:
            if x.ndim != 2 or not x.numel():
                raise ValueError(f"SIGReg takes embeddings (n, D) with at least one row, got shape {tuple(x.shape)}.")
        width = columns[0].shape[1]
        dims = (width,) if self.dims is None else self.dims
        if max(dims) > width:
            raise ValueError(f"dims={list(dims)} exceed the {width} dimensions of the embeddings.")
        with torch.autocast(columns[0].device.type, enabled=False):
            columns = [x if x.dtype == torch.float64 else x.float() for x in columns]
            if not self._is_exact:
                directions = self._draw(columns[0]) if directions is None else _checked(directions, columns[0])
            elif directions is not None:
                raise ValueError("num_directions='exact' takes the mean over all directions: leave directions out.")
            parts = [x[:, :dim] for x in columns for dim in dims]
            value = torch.stack([self._of_prefix(x, directions) for x in parts]).mean()
            null = sum(self.null_expectation(self._num_rows(x), x.shape[1]) for x in parts) / len(parts)
        self.last_excess = value.detach() - null
        return value - null if self.subtract_null else value

    def _of_prefix(self, x: Tensor, directions: Tensor | None) -> Tensor:
        dim = x.shape[1]
        radius, statistic = self._radius(dim), self._statistic(dim)
        if radius is not None:
            x = x / safe_norm(x) * radius  # (n, D)
        if directions is None:
            return _sigreg.exact(x, statistic, radius, self.gather)
        if dim < len(directions):
            directions = directions[:dim] / safe_norm(directions[:dim].T).T
        return _sigreg.sampled(x, directions, statistic, self.gather)

    def _num_rows(self, x: Tensor) -> int:
        """Over all ranks, where it matters."""
        return len(x) if self.scale_by_n else _sigreg.num_rows(x, self.gather)

    def _radius(self, dim: int) -> float | None:
        return dim**0.5 if self.scale == "sqrt_d" else self.scale

    def _statistic(self, dim: int) -> Statistic:
        radius = self._radius(dim) if self.target == "sphere" else None
        return _make_statistic(
            self.num_knots, self.t_max, self.window, self.quadrature, self.scale_by_n, radius, dim if radius else None
        )

    def _draw(self, x: Tensor) -> Tensor:
        """(D, K), on the CPU in float32 first: equal on all devices."""
        seeds = np.random.SeedSequence((self.seed, *self._key())).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(seeds[0]) >> 1)
        directions = torch.randn(x.shape[1], self.num_directions, generator=generator)  # type: ignore[arg-type]
        directions = directions.to(x.dtype)
        return (directions / torch.linalg.vector_norm(directions, dim=0)).to(x.device)

    def _key(self) -> tuple[int, ...]:
        """(step, call within it) in a Trainer, (call,) elsewhere, () in evaluation."""
        if not torch.is_grad_enabled():
            return ()
        if (trainer := calling_trainer()) is None:
            self.num_calls += 1
            return (self.num_calls,)
        if trainer.state.global_step != self._step:
            self._step, self._calls_in_step = trainer.state.global_step, 0
        self._calls_in_step += 1
        return self._step, self._calls_in_step

    def extra_repr(self) -> str:
        names = ("num_directions", "num_knots", "t_max", "scale", "window", "scale_by_n", "target")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


@lru_cache(maxsize=64)
def _make_statistic(
    num_knots: int, t_max: float, window: bool, rule: str, scale_by_n: bool, radius: float | None, dim: int | None
) -> Statistic:
    """With the marginal of a sphere as target where there is a radius."""
    knots, weights = (v[1:] for v in knots_and_weights(num_knots, t_max, window, rule))  # t = 0 adds nothing
    if radius is None or dim is None:
        target = np.exp(-(knots**2) / 2)
    else:
        target = _sigreg.sphere_characteristic(dim, knots * radius)
    return Statistic(tuple(knots.tolist()), tuple(weights.tolist()), tuple(target.tolist()), scale_by_n)


def _pooled(columns: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat(list(columns))]


def _checked(directions: Tensor, x: Tensor) -> Tensor:
    if directions.ndim != 2 or len(directions) != x.shape[1] or not directions.numel():
        raise ValueError(f"directions are columns ({x.shape[1]}, K), got shape {tuple(directions.shape)}.")
    directions = directions.detach().to(x)
    off = (torch.linalg.vector_norm(directions, dim=0) - 1).abs().max().item()
    if not off < 1e-3:
        raise ValueError(
            f"directions have unit columns, got one whose length is off by {off:.3g}. Divide by the lengths."
        )
    return directions


def covariance_penalty(embeddings: Tensor) -> Tensor:
    """Sum of the squared off-diagonal covariances, over D: (n, D) -> scalar.

        1/D sum_{a != b} C_ab²,   C the covariance of the raw embeddings, with n - 1

    It takes linear dependence from the coordinates and leaves their variances alone. Of this rank's rows only. One row
    gives 0.

    Example:
        >>> import torch
        >>> covariance_penalty(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))  # C = [[2, 2], [2, 2]]
        tensor(4.)

    Source: Bardes et al., VICReg, ICLR 2022, Eq. 4.
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        x = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        x = x - x.mean(dim=0)
        covariance = x.T @ x / max(len(x) - 1, 1)  # (D, D)
        return (covariance.square().sum() - covariance.diagonal().square().sum()) / x.shape[1]


def norm_variance_penalty(embeddings: Tensor) -> Tensor:
    """Variance of the lengths relative to their mean, the squared coefficient of variation: (n, D) -> scalar.

        mean_i (|x_i| - m)² / m²,   m = mean_i |x_i|

    For training by cosine, where nothing else holds the length. Of this rank's rows only.

    Example:
        >>> import torch
        >>> norm_variance_penalty(torch.tensor([[3.0, 4.0], [0.0, 15.0]]))  # lengths 5 and 15
        tensor(0.2500)
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        x = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        norms = torch.linalg.vector_norm(x, dim=1)
        mean = norms.mean()
        return (norms - mean).square().mean() / mean.square().clamp_min(torch.finfo(x.dtype).tiny)

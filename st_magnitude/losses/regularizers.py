"""Regularizers: functions of embeddings (n, D) that return a scalar.

Every loss of this package takes them: ``regularizers=[(SIGReg(), 0.05)]``. SIGReg's statistic itself, and its gradient,
are in :mod:`st_magnitude.losses._sigreg`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from st_magnitude._checks import one_of, positive, prefix_dims
from st_magnitude.geometry import knots_and_weights
from st_magnitude.losses import _sigreg
from st_magnitude.losses._sigreg import Statistic
from st_magnitude.similarity import at_least_float32, safe_norm
from st_magnitude.training.state import Remembering

__all__ = ["SIGReg", "covariance_penalty", "norm_variance_penalty"]


_PRESETS: dict[str, dict[str, Any]] = {
    "lejepa": {"scale": None},
    "blog": {"num_directions": 16, "num_knots": 16, "window": False, "scale_by_n": False},
}


class SIGReg(Remembering):
    """Sketched isotropic Gaussian regularization: how far projections of the embeddings are from N(0, 1).

        SIGReg(x) = mean_a N · sum_k w_k [ (mean_i cos(t_k a · x_i) - exp(-t_k²/2))² + (mean_i sin(t_k a · x_i))² ]

    over random unit directions a, the Epps-Pulley statistic of each. Rows are first normalised and multiplied by
    sqrt(D), so that the projections of evenly spread rows have variance 1. The best value is not 0: N rows drawn from
    the target have the expectation 1.0525 for any N (see `null_expectation`). Training lowers the excess over it.

    Args:
        num_directions: Number of directions that a step draws; fewer than about D leave much of the space unseen.
            ``"exact"`` takes the expectation over all directions, a closed form of the distances of all pairs: without
            noise, in O(N² D) time and with no more memory. It is best for batches up to about the number of
            directions that you would draw.
        num_knots: Number T of knots t_k, evenly spaced on [0, t_max].
        t_max: Largest knot.
        scale: Norm of the normalised rows: ``"sqrt_d"`` (of the prefix, if there are ``dims``) or a number. None takes
            the embeddings as they are, with their norms.
        window: Whether the integral over t has the weights exp(-t²/2).
        scale_by_n: Whether the statistic is multiplied by the number of rows N, so that its null expectation does not
            depend on N.
        target: ``"gaussian"``, or ``"sphere"`` for the exact marginal of uniform points on the sphere of radius
            ``scale``, which normalised rows can reach. The two differ in small dimensions.
        dims: Prefixes to regularise. Each is cut, normalised and scaled by itself, and the loss is their mean. None:
            all dimensions.
        views: Sample that a loss takes from its columns. ``"pooled"``: the rows of all columns (queries, documents,
            negatives) are one sample. ``"per_view"``: the mean over columns, with the same directions.
        gather: Whether the statistic is that of the joined batch of all ranks, under torch.distributed. Ranks may
            have batches of different sizes. The gradient is right under DDP, which averages over ranks.
        seed: Seed of the directions.

    Attributes:
        last_excess: The last value minus its null expectation, detached; None before the first call.
        num_calls: Number of calls with gradient. Together with the seed it determines the directions. It is part of
            the ``state_dict``, and :func:`st_magnitude.attach` puts it into the checkpoints of a Trainer.

    Raises:
        ValueError: If an argument is out of range, or ``target="sphere"`` comes without a scale.

    Directions depend only on the seed and on ``num_calls``: they are the same on every rank and on every device, and
    the global generators stay as they are. Without gradient, as in evaluation, they are always the same. SIGReg
    computes in float32 with autocast off; float64 stays float64. The forward pass takes the gradient, so a second
    derivative does not exist. Rows that are not finite give nan, or a ValueError where SIGReg needs their norm (exact
    with scale=None).

    Example:
        >>> import torch
        >>> from st_magnitude import SIGReg
        >>> sigreg, x = SIGReg(), torch.randn(256, 32)
        >>> sigreg(x) < 2 < sigreg(x + 3)  # spread out, and in a cone
        tensor(True)
        >>> round(sigreg.null_expectation(256, 32), 4)
        1.0525

    Source: Balestriero and LeCun, LeJEPA, arXiv 2511.08544, section 4. ``SIGReg.preset("blog")`` is the listing of the
    blog post about normalised text embeddings.
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
        dims: Iterable[int] | None = None,
        views: Literal["pooled", "per_view"] = "pooled",
        gather: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if num_directions != "exact" and not (isinstance(num_directions, int) and num_directions >= 1):
            raise ValueError(f"num_directions must be a whole number of at least 1 or 'exact'; got {num_directions!r}.")
        positive("scale", scale, ["sqrt_d", None])
        one_of("target", target, ("gaussian", "sphere"))
        one_of("views", views, ("pooled", "per_view"))
        if target == "sphere" and scale is None:
            raise ValueError("target='sphere' is a sphere of radius scale, but scale is None. Give scale='sqrt_d'.")
        knots_and_weights(num_knots, t_max, window, "trapezoid")  # checks them
        self.num_directions, self.num_knots, self.t_max = num_directions, num_knots, t_max
        self.scale, self.window, self.scale_by_n, self.target = scale, window, scale_by_n, target
        self.dims = None if dims is None else prefix_dims(dims)
        self.views, self.gather, self.seed = views, gather, seed
        self._quadrature = "trapezoid"
        self.last_excess: Tensor | None = None
        self.num_calls = 0

    @classmethod
    def preset(cls, name: Literal["lejepa", "blog"], **overrides: Any) -> SIGReg:
        """The settings of a publication.

        Args:
            name: ``"lejepa"``: as in LeJEPA, on embeddings as they are. ``"blog"``: the listing for normalised text
                embeddings. It does not multiply by N, has no window and takes the mean over the knots instead of an
                integral, so that its values are 1.5 N to 3 N times smaller.
            **overrides: Arguments of SIGReg that differ from the preset.

        Raises:
            ValueError: If there is no preset of that name.

        Example:
            >>> SIGReg.preset("blog", num_directions=256).num_knots
            16
        """
        one_of("name", name, tuple(_PRESETS))
        sigreg = cls(**{**_PRESETS[name], **overrides})
        sigreg._quadrature = "mean" if name == "blog" else "trapezoid"
        return sigreg

    def forward(self, embeddings: Tensor, directions: Tensor | None = None) -> Tensor:
        """The statistic of one sample.

        Args:
            embeddings: Embeddings (n, D), not normalised.
            directions: Unit columns (D, K), constants. None: drawn anew at each call with gradient. A prefix takes
                the first rows, normalised again.

        Raises:
            ValueError: If shapes do not fit, a column does not have norm 1, or directions come with ``"exact"``.
        """
        return self._mean([embeddings], directions)

    def of_columns(self, columns: Sequence[Tensor]) -> Tensor:
        """The statistic of a batch, from its columns (B, D). Losses call it."""
        return self._mean([torch.cat(list(columns))] if self.views == "pooled" else list(columns))

    def null_expectation(self, n: int, dim: int) -> float:
        """The mean value of n independent rows whose projections have exactly the target distribution.

        sum_k w_k (1 - phi(t_k)²), divided by n unless ``scale_by_n``
        """
        return _sigreg.null_expectation(self._statistic(dim), n)

    def _mean(self, columns: list[Tensor], directions: Tensor | None = None) -> Tensor:
        """The mean over columns and prefixes."""
        for x in columns:
            if x.ndim != 2 or not x.numel():
                raise ValueError(f"SIGReg takes embeddings (n, D) with at least one row; got shape {tuple(x.shape)}.")
        width = columns[0].shape[1]
        dims = (width,) if self.dims is None else self.dims
        if max(dims) > width:
            raise ValueError(f"dims={list(dims)} exceed the {width} dimensions of the embeddings.")
        with torch.autocast(columns[0].device.type, enabled=False):
            columns = [at_least_float32(x) for x in columns]
            if self.num_directions != "exact":
                directions = self._draw(columns[0]) if directions is None else _checked(directions, columns[0])
            elif directions is not None:
                raise ValueError("num_directions='exact' takes the mean over all directions. Leave directions out.")
            parts = [x[:, :dim] for x in columns for dim in dims]
            value = torch.stack([self._of_prefix(x, directions) for x in parts]).mean()
            null = sum(self.null_expectation(self._num_rows(x), x.shape[1]) for x in parts) / len(parts)
        self.last_excess = value.detach() - null
        return value

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
        """The number of rows over all ranks; with scale_by_n the null expectation does not depend on it."""
        return len(x) if self.scale_by_n else _sigreg.num_rows(x, self.gather)

    def _radius(self, dim: int) -> float | None:
        return dim**0.5 if self.scale == "sqrt_d" else self.scale

    def _statistic(self, dim: int) -> Statistic:
        radius = self._radius(dim) if self.target == "sphere" else None
        return _make_statistic(
            self.num_knots, self.t_max, self.window, self._quadrature, self.scale_by_n, radius, dim if radius else None
        )

    # --- directions -------------------------------------------------------------------------------------------------

    def _draw(self, x: Tensor) -> Tensor:
        """The directions of this call, (D, K): drawn on the CPU in float32, so that they are equal on all devices."""
        key: tuple[int, ...] = (self.seed,)
        if torch.is_grad_enabled():
            key = (self.seed, self.num_calls, 1)
            self.num_calls += 1
        (seed,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(seed) >> 1)
        directions = torch.randn(x.shape[1], self.num_directions, generator=generator)  # type: ignore[arg-type]
        directions = directions.to(x.dtype)
        return (directions / torch.linalg.vector_norm(directions, dim=0)).to(x.device)

    def get_extra_state(self) -> dict[str, Any]:
        return {"num_calls": self.num_calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.num_calls = state["num_calls"]

    def extra_repr(self) -> str:
        names = ("num_directions", "num_knots", "t_max", "scale", "window", "scale_by_n", "target")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


@lru_cache(maxsize=64)
def _make_statistic(
    num_knots: int, t_max: float, window: bool, rule: str, scale_by_n: bool, radius: float | None, dim: int | None
) -> Statistic:
    """The statistic whose target is N(0, 1), or the marginal of the sphere of that radius."""
    knots, weights = (v[1:] for v in knots_and_weights(num_knots, t_max, window, rule))  # t = 0 adds nothing
    if radius is None or dim is None:
        target = np.exp(-(knots**2) / 2)
    else:
        target = _sigreg.sphere_characteristic(dim, knots * radius)
    return Statistic(tuple(knots.tolist()), tuple(weights.tolist()), tuple(target.tolist()), scale_by_n)


def _checked(directions: Tensor, x: Tensor) -> Tensor:
    if directions.ndim != 2 or len(directions) != x.shape[1] or not directions.numel():
        raise ValueError(f"directions must be columns ({x.shape[1]}, K); got shape {tuple(directions.shape)}.")
    directions = directions.detach().to(x)
    off = (torch.linalg.vector_norm(directions, dim=0) - 1).abs().max().item()
    if not off < 1e-3:
        raise ValueError(
            f"The columns of directions must have norm 1, but one norm is off by {off:.3g}. Divide by the norms."
        )
    return directions


def covariance_penalty(embeddings: Tensor) -> Tensor:
    """Sum of the squared off-diagonal covariances, over D: (n, D) -> scalar.

        1/D sum_{a != b} C_ab²,   C the covariance of the raw embeddings, with n - 1

    It removes linear dependence between coordinates and leaves their variances alone. The rows are those of this rank
    only. One row gives 0.

    Example:
        >>> import torch
        >>> covariance_penalty(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))  # C = [[2, 2], [2, 2]]
        tensor(4.)

    Source: Bardes et al., VICReg, ICLR 2022, Eq. 4.
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        x = at_least_float32(embeddings)
        x = x - x.mean(dim=0)
        covariance = x.T @ x / max(len(x) - 1, 1)  # (D, D)
        return (covariance.square().sum() - covariance.diagonal().square().sum()) / x.shape[1]


def norm_variance_penalty(embeddings: Tensor) -> Tensor:
    """Variance of the norms relative to their mean, the squared coefficient of variation: (n, D) -> scalar.

        mean_i (|x_i| - m)² / m²,   m = mean_i |x_i|

    It is for training by cosine, where nothing else keeps the norms together. The rows are those of this rank only.

    Example:
        >>> import torch
        >>> norm_variance_penalty(torch.tensor([[3.0, 4.0], [0.0, 15.0]]))  # norms 5 and 15
        tensor(0.2500)
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        x = at_least_float32(embeddings)
        norms = torch.linalg.vector_norm(x, dim=1)
        mean = norms.mean()
        return (norms - mean).square().mean() / mean.square().clamp_min(torch.finfo(x.dtype).tiny)

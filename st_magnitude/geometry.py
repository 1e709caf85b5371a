"""Geometry of a set of embeddings: pure functions on arrays, one row per embedding.

Arrays, tensors (any device, any float type) and nested lists go in; numbers come out, computed in float64.
Evaluators, callbacks and reports measure with these functions and nothing else.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp
from scipy.stats import mannwhitneyu, spearmanr
from torch import Tensor

__all__ = [
    "adjusted_cohens_d",
    "alignment",
    "auroc",
    "coefficient_of_variation",
    "cohens_d",
    "effective_rank",
    "epps_pulley",
    "explained_variance",
    "infonce_alignment",
    "infonce_uniformity",
    "intrinsic_dimension",
    "isoscore",
    "isoscore_ceiling",
    "mean_cosine",
    "norms",
    "paired_bootstrap",
    "risk_coverage",
    "spearman",
    "symmetry_gap",
    "uniformity",
]

Array = NDArray[np.float64]


def norms(x: Any) -> Array:
    """Euclidean length of every row: (n, D) -> (n,).

    Example:
        >>> norms([[3.0, 4.0], [0.0, 2.0]])
        array([5., 2.])
    """
    return np.linalg.norm(_matrix(x), axis=1)


def cohens_d(relevant: Any, irrelevant: Any, pooled: str = "df") -> float:
    """Cohen's d, the standardised difference of two means: (n,), (m,) -> number of standard deviations.

        d = (mean(relevant) - mean(irrelevant)) / s

    Between the norms of relevant and of irrelevant documents it says how well length alone tells them apart:
    0.2 is called small, 0.5 medium, 0.8 large. Values that agree to one part in a million (the norms of normalised
    float32 embeddings) count as equal and give 0; two different constants give plus or minus infinity, the limit.

    Args:
        relevant: A sample, such as ``norms(documents[is_relevant])``.
        irrelevant: The sample to compare it with.
        pooled: How the unbiased variances make s²: ``"df"`` weighs them by their degrees of freedom n - 1 (Cohen's
            own definition), ``"mean"`` averages them plainly. With groups of unequal size and spread the two
            differ much, so a report says which.

    Raises:
        ValueError: If a sample has fewer than two values, or ``pooled`` is something else.

    Example:
        >>> cohens_d([4.0, 5.0, 6.0], [2.0, 3.0, 4.0])
        2.0

    Source: Cohen (1988), Statistical Power Analysis, Eq. 2.5.2; Beyond the Unit Hypersphere, arXiv 2602.09229, Eq. 8.
    """
    a, b = _sample(relevant, "relevant", at_least=2), _sample(irrelevant, "irrelevant", at_least=2)
    if pooled not in ("df", "mean"):
        raise ValueError(
            f"pooled is 'df' (variances weighted by degrees of freedom) or 'mean' (plain average), got {pooled!r}."
        )
    weights = (len(a) - 1, len(b) - 1) if pooled == "df" else (1, 1)
    both = np.concatenate([a, b])
    if np.ptp(both) <= 1e-6 * np.abs(both).max():
        return 0.0
    difference = float(a.mean() - b.mean())
    deviation = math.sqrt(np.average([s.var(ddof=1) if np.ptp(s) else 0.0 for s in (a, b)], weights=weights))
    return difference / deviation if deviation else math.copysign(math.inf, difference)


def adjusted_cohens_d(values: Any, covariate: Any, is_relevant: Any, pooled: str = "df") -> float:
    """Cohen's d of what a linear regression on a covariate leaves of the values: (n,), (n,), (n,) -> d.

    The control for "relevant documents are merely longer": with norms as values and log text lengths as covariate,
    d falls to 0 where length explains the difference. What relevance and covariate share is credited to the
    covariate, so the answer is conservative.

    Args:
        values: One value per document, such as its norm.
        covariate: What to control for, such as the logarithm of its length.
        is_relevant: Which documents belong to the first group, as booleans.
        pooled: As in `cohens_d`.

    Raises:
        ValueError: If the three differ in length, or a group has fewer than two members.

    Example:
        >>> lengths, is_relevant = [1.0, 2.0, 3.0, 4.0], [False, False, True, True]
        >>> adjusted_cohens_d([5.0, 6.0, 7.0, 8.0], lengths, is_relevant)  # length explains it all
        0.0
    """
    y, x = _sample(values, "values", at_least=4), _sample(covariate, "covariate", at_least=4)
    group = np.asarray(is_relevant, dtype=bool)
    if not len(y) == len(x) == len(group):
        raise ValueError(
            f"values, covariate and is_relevant describe the same documents, got {len(y)}, {len(x)} and {len(group)}."
        )
    x = x - x.mean()
    slope = x @ y / (x @ x) if x.any() else 0.0
    residual = y - slope * x
    return cohens_d(residual[group], residual[~group], pooled=pooled)


def coefficient_of_variation(x: Any, ddof: int = 0) -> float:
    """Standard deviation over mean of a sample: (n,) -> CV, without unit; nan when the mean is 0.

    Of embedding norms: at most about 0.05 says that length is noise, at least about 0.1 that the model uses it.

    Args:
        x: The sample, such as ``norms(documents)``.
        ddof: Degrees of freedom taken off: 0 for the population, 1 for the unbiased variance.

    Raises:
        ValueError: If the sample has no more than ``ddof`` values.

    Example:
        >>> coefficient_of_variation([1.0, 3.0])
        0.5

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, App. M.
    """
    sample = _sample(x, "x", at_least=ddof + 1)
    mean = float(sample.mean())
    return float(sample.std(ddof=ddof)) / mean if mean else math.nan


def mean_cosine(x: Any) -> float:
    """Mean cosine over all pairs of different rows: (n, D) -> [-1, 1], in O(n D).

    With unit rows u the sum over ordered pairs is |sum u|² - sum |u|². A zero row has cosine 0 with everything.
    0 is what random directions give; 1 is collapse onto one direction.

    Raises:
        ValueError: If there are fewer than two rows.

    Example:
        >>> mean_cosine([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])  # pairs: 0, 1, 0
        0.3333333333333333
    """
    return CosineSum().add(_matrix(x, at_least=2)).mean


def alignment(queries: Any, documents: Any, alpha: float = 2.0) -> float:
    """Mean distance of positive pairs on the unit sphere, to a power: (n, D), (n, D) -> [0, 2^alpha], lower is better.

        mean_i |u_i - v_i|^alpha,   u and v the normalised rows

    Raises:
        ValueError: If the two differ in shape: row i of one is the positive of row i of the other.

    Example:
        >>> alignment([[2.0, 0.0]], [[0.0, 1.0]])
        2.0

    Source: Wang and Isola, Understanding Contrastive Representation Learning through Alignment and Uniformity on
    the Hypersphere, ICML 2020, Sec. 4.1.
    """
    u, v = _unit(_matrix(queries)), _unit(_matrix(documents))
    if u.shape != v.shape:
        raise ValueError(f"Row i of queries and of documents make a pair, got shapes {u.shape} and {v.shape}.")
    return float(np.mean(np.square(u - v).sum(axis=1) ** (alpha / 2)))


def uniformity(x: Any, t: float = 2.0) -> float:
    """Logarithm of the mean Gaussian potential of all pairs on the unit sphere: (n, D) -> [-4 t, 0], lower is better.

        log mean_{i < j} exp(-t |u_i - u_j|²),   u the normalised rows

    Raises:
        ValueError: If there are fewer than two rows.

    Example:
        >>> uniformity([[1.0, 0.0], [-5.0, 0.0]])  # opposite points: -t 2²
        -8.0

    Source: Wang and Isola, ICML 2020, Sec. 4.1. Takes O(n² D) time, in tiles of 1,024 rows.
    """
    unit = _unit(_matrix(x, at_least=2))
    n, squares = len(unit), np.square(unit).sum(axis=1)
    total = 0.0
    for i in range(0, n, 1024):
        distances = squares[i : i + 1024, None] + squares[i:] - 2 * unit[i : i + 1024] @ unit[i:].T
        total += np.triu(np.exp(-t * distances), k=1).sum()  # row a, column b of the tile: the pair (i + a, i + b)
    return math.log(total / (n * (n - 1) / 2))


def infonce_alignment(queries: Any, documents: Any, temperature: float) -> float:
    """The part of the InfoNCE loss that pulls positive pairs together: (n, D), (n, D) -> float, lower is better.

        -mean_i cos(q_i, d_i) / tau

    Not `alignment`, which is a distance and knows no temperature.

    Raises:
        ValueError: If the two differ in shape, or the temperature is not positive.

    Example:
        >>> infonce_alignment([[2.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 3.0]], temperature=0.5)
        -2.0

    Source: Dinu et al., Effective Post-Training Embedding Compression via Temperature Control in Contrastive
    Training, ICLR 2025, Eq. 4, first term; with `infonce_uniformity` it is the limit of InfoNCE - log M for M
    negatives.
    """
    u, v = _unit(_matrix(queries)), _unit(_matrix(documents))
    if u.shape != v.shape:
        raise ValueError(f"Row i of queries and of documents make a pair, got shapes {u.shape} and {v.shape}.")
    return -float((u * v).sum(axis=1).mean()) / _positive(temperature)


def infonce_uniformity(x: Any, temperature: float) -> float:
    """The part of the InfoNCE loss that pushes all others apart: (n, D) -> [-1/tau, 1/tau], lower is better.

        mean_i log mean_{j != i} exp(cos(x_i, x_j) / tau)

    Not `uniformity`, which has one mean over all pairs inside the logarithm and a fixed bandwidth. At a low
    temperature it looks at the nearest neighbours; at a high one it is the mean cosine over tau.

    Raises:
        ValueError: If there are fewer than two rows, or the temperature is not positive.

    Example:
        >>> infonce_uniformity([[1.0, 0.0], [-5.0, 0.0]], temperature=0.5)  # opposite points: -1 / 0.5
        -2.0

    Source: Dinu et al., ICLR 2025, Eq. 4, second term, with cosine (their section 3.2). Takes O(n² D) time, in tiles
    of 1,024 rows.
    """
    unit, tau = _unit(_matrix(x, at_least=2)), _positive(temperature)
    n, total = len(unit), 0.0
    for start in range(0, n, 1024):
        logits = unit[start : start + 1024] @ unit.T / tau  # (rows, n)
        own = np.arange(len(logits))
        logits[own, start + own] = -np.inf
        total += float(logsumexp(logits, axis=1).sum())
    return total / n - math.log(n - 1)


def isoscore(x: Any) -> float:
    """IsoScore, how evenly the variance fills the dimensions: (n, D) -> [0, 1]; 1 is isotropic, 0 a single line.

        (PR - 1) / (D - 1),   PR = (sum lambda)² / sum lambda²

    over the eigenvalues lambda of the covariance; PR is the participation ratio. Rows without any variance give 0.
    A finite sample cannot reach 1: read the score against `isoscore_ceiling`.

    Raises:
        ValueError: If there are fewer than two rows or two columns.

    Example:
        >>> isoscore([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        1.0

    Source: Rudman et al., IsoScore: Measuring the Uniformity of Embedding Space Utilization, ACL 2022, Alg. 1,
    simplified (the two are equal).
    """
    scatter = _scatter(x)
    if (dim := np.shape(x)[1]) < 2:
        raise ValueError(f"IsoScore compares dimensions and needs at least 2 of them, got {dim}.")
    trace, squares = float(np.trace(scatter)), float(np.square(scatter).sum())
    return (trace**2 / squares - 1) / (dim - 1) if squares else 0.0


def isoscore_ceiling(num_samples: int, dim: int) -> float:
    """IsoScore that an isotropic Gaussian sample of this size reaches, about 1 / (1 + D / N).

    Example:
        >>> isoscore_ceiling(num_samples=1000, dim=1000)
        0.5
    """
    return 1 / (1 + dim / num_samples)


def intrinsic_dimension(x: Any, variance: float = 0.95, num_samples: int | None = 5000, seed: int = 0) -> int:
    """Number of principal components that explain a share of the variance: (n, D) -> 0 .. min(n - 1, D).

    Depends on n: compare samples of one size (5,000 x 1,024 Gaussian values give 896, 2,000 x 1,024 give 792). Warns
    when n is below 4 D, where the sample rather than the space sets the number. Rows without any variance give 0.

    Args:
        x: The embeddings.
        variance: The share to explain.
        num_samples: Of more rows than this, so many are drawn without replacement; None takes all.
        seed: Of the draw.

    Raises:
        ValueError: If there are fewer than two rows, ``num_samples`` is below 2, or the share is not strictly between
            0 and 1.

    Example:
        >>> intrinsic_dimension([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]] * 2)
        2

    Source: Dinu et al., Effective Post-Training Embedding Compression via Temperature Control in Contrastive
    Training, ICLR 2025, Fig. 4.
    """
    if not 0.0 < variance < 1.0:
        raise ValueError(f"variance is a share strictly between 0 and 1, got {variance}; the usual one is 0.95.")
    matrix = _drawn(x, num_samples, seed)
    if len(matrix) < 4 * matrix.shape[1]:
        warnings.warn(
            f"{len(matrix)} embeddings are few for the intrinsic dimension of {matrix.shape[1]} dimensions: the sample "
            f"limits it. Use at least {4 * matrix.shape[1]}, and compare samples of one size only.",
            stacklevel=2,
        )
    explained = _cumulated_variance(matrix)
    return int(np.searchsorted(explained, variance * explained[-1])) + 1 if explained[-1] > 0 else 0


def explained_variance(x: Any, num_samples: int | None = 5000, seed: int = 0) -> Array:
    """Share of the variance in the first k principal components, k = 1 .. D: (n, D) -> (D,), rising to 1.

    Rows without any variance give 1 throughout. `intrinsic_dimension` is the first k that reaches its share.

    Args:
        x: The embeddings.
        num_samples: Of more rows than this, so many are drawn without replacement; None takes all.
        seed: Of the draw.

    Raises:
        ValueError: If there are fewer than two rows, or ``num_samples`` is below 2.

    Example:
        >>> explained_variance([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        array([0.8, 1. ])
    """
    matrix = _drawn(x, num_samples, seed)
    explained = _cumulated_variance(matrix)
    shares = np.ones(matrix.shape[1])
    if explained[-1] > 0:
        shares[: len(explained)] = explained / explained[-1]
    return shares


def effective_rank(x: Any) -> float:
    """RankMe, how many dimensions the embeddings fill: (n, D) -> [1, min(n, D)].

        exp( -sum_k p_k log p_k ),   p_k = sigma_k / sum sigma

    over the singular values sigma of the matrix, not centred. All rows zero give 0.

    Example:
        >>> round(effective_rank([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), 6)
        2.0

    Source: Garrido et al., RankMe, ICML 2023, Eq. 1; Roy and Vetterli, The Effective Rank, EUSIPCO 2007.
    """
    values = np.linalg.svd(_matrix(x), compute_uv=False)
    shares = values[values > 0] / max(values.sum(), np.finfo(float).tiny)
    return float(np.exp(-(shares * np.log(shares)).sum())) if len(shares) else 0.0


def epps_pulley(
    x: Any,
    num_knots: int = 17,
    t_max: float = 3.0,
    *,
    window: bool = True,
    scale_by_n: bool = True,
    quadrature: Literal["trapezoid", "mean"] = "trapezoid",
) -> Any:
    """Distance of a sample from N(0, 1), by its characteristic function: (n,) -> float; (n, K) -> (K,), by column.

        N · integral over [-t_max, t_max] of |mean_i exp(i t x_i) - exp(-t²/2)|² exp(-t²/2) dt

    What :class:`~st_magnitude.SIGReg` averages over directions; its arguments mean the same. A sample of N(0, 1) has
    the expectation 1.0525 for any n. Mean and variance are part of the question: standardise first to test for
    normality alone.

    Raises:
        ValueError: If x has another shape or no rows, there are fewer than two knots, or t_max is not positive.

    Example:
        >>> sample = [-1.5, -0.8, -0.3, 0.0, 0.3, 0.8, 1.5]
        >>> epps_pulley(sample) < 0.2, epps_pulley([v + 2 for v in sample]) > 5
        (True, True)

    Source: Epps and Pulley, A Test for Normality Based on the Empirical Characteristic Function, Biometrika 1983.
    """
    sample = _float64(x)
    if sample.ndim not in (1, 2) or not sample.size:
        raise ValueError(f"epps_pulley takes a sample (n,) or columns (n, K), got shape {sample.shape}.")
    total = np.zeros(sample.shape[1:])
    for t, w in zip(*knots_and_weights(num_knots, t_max, window, quadrature), strict=True):
        real, imaginary = np.cos(t * sample).mean(axis=0), np.sin(t * sample).mean(axis=0)
        total = total + w * ((real - math.exp(-t * t / 2)) ** 2 + imaginary**2)
    total = total * (len(sample) if scale_by_n else 1)
    return float(total) if sample.ndim == 1 else total


def knots_and_weights(num_knots: int, t_max: float, window: bool, rule: str) -> tuple[Array, Array]:
    """Knots on [0, t_max] and their weights, (num_knots,) each.

    ``"trapezoid"`` is the one-sided rule doubled (the integrand is even): 2 dt inside, dt at both ends. ``"mean"``
    gives all knots the same weight. The window is exp(-t²/2).

    Raises:
        ValueError: If there are fewer than two knots, t_max is not positive, or the rule is another.
    """
    if num_knots < 2:
        raise ValueError(
            f"num_knots is at least 2, the two ends of [0, t_max]; got {num_knots}. The usual number is 17."
        )
    if not 0 < t_max < math.inf:
        raise ValueError(f"t_max must be positive, got {t_max}; the usual one is 3.")
    if rule not in ("trapezoid", "mean"):
        raise ValueError(f"quadrature is 'trapezoid' or 'mean', got {rule!r}.")
    knots = np.linspace(0.0, t_max, num_knots)
    if rule == "mean":
        weights = np.full(num_knots, 1 / num_knots)
    else:
        weights = np.full(num_knots, 2 * t_max / (num_knots - 1))
        weights[[0, -1]] /= 2
    return knots, weights * np.exp(-(knots**2) / 2) if window else weights


def paired_bootstrap(
    a: Any, b: Any = None, num_samples: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """Mean of a - b over queries with its percentile bootstrap interval: (n,), (n,) -> (difference, low, high).

    The queries are resampled, and each keeps its pair: what both systems find hard cancels. An interval without 0
    is a difference that other queries of the same kind should show too.

    Args:
        a: A metric per query, such as nDCG@10.
        b: The same metric of the other system on the same queries; ``None`` gives the interval of the mean of a.
        num_samples: How many resamples.
        confidence: The share of resampled means inside the interval.
        seed: Of the resampling.

    Raises:
        ValueError: If a and b differ in length or are empty, or ``confidence`` is not strictly between 0 and 1.

    Example:
        >>> paired_bootstrap([0.5, 1.0, 0.75], [0.25, 0.75, 0.5])
        (0.25, 0.25, 0.25)

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, Sec. 13.3.
    """
    difference = _sample(a, "a", at_least=1)
    if b is not None:
        other = _sample(b, "b", at_least=1)
        if len(difference) != len(other):
            raise ValueError(
                f"a and b hold the same queries in the same order, got {len(difference)} and {len(other)}."
            )
        difference = difference - other
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is strictly between 0 and 1, got {confidence}; the usual one is 0.95.")
    rng, n = np.random.default_rng(seed), len(difference)
    batch = max(1, 2**20 // n)  # resamples at a time: a few MB
    sizes = [min(batch, num_samples - i) for i in range(0, num_samples, batch)]
    means = np.concatenate([difference[rng.integers(n, size=(size, n))].mean(axis=1) for size in sizes])
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(difference.mean()), float(low), float(high)


def spearman(a: Any, b: Any) -> float:
    """Spearman's rank correlation of two samples, ties at their mean rank: (n,), (n,) -> [-1, 1].

    nan where all values of a sample are equal.

    Raises:
        ValueError: If the two differ in length or have fewer than two values.

    Example:
        >>> spearman([1.0, 2.0, 3.0], [10.0, 100.0, 1000.0])
        1.0
    """
    x, y = _same_length(a, b)
    is_constant = (x == x[0]).all() or (y == y[0]).all()  # of which scipy would warn
    return math.nan if is_constant else round(float(spearmanr(x, y).statistic), 15)  # of equal ranks 1 - 2e-16


def auroc(positive: Any, negative: Any) -> float:
    """Probability that a value of the first sample exceeds one of the second, ties counting half: -> [0, 1].

    The area under the ROC curve: 0.5 tells nothing apart, 1 everything. With norms of texts of the training domain
    and of others, 1 means that every stranger is shorter.

    Raises:
        ValueError: If a sample is empty.

    Example:
        >>> auroc([3.0, 2.0], [1.0, 2.0])
        0.875
    """
    a, b = _sample(positive, "positive", at_least=1), _sample(negative, "negative", at_least=1)
    return float(mannwhitneyu(a, b, method="asymptotic").statistic / (len(a) * len(b)))


def risk_coverage(confidence: Any, is_correct: Any) -> tuple[Array, Array, float]:
    """Share of wrong answers among the k most confident, for every k: (n,), (n,) -> coverage (n,), risk (n,), area.

    Answer only where the confidence exceeds a threshold: coverage k / n is the share of questions answered then, risk
    the share of those answers that are wrong. The area is the mean risk over all coverages; a confidence that knows
    nothing has the overall error rate as its area, a useful one less. Values that are equal cannot be told apart by
    a threshold: within such a group the errors are spread evenly.

    Raises:
        ValueError: If the two differ in length or have fewer than two values.

    Example:
        >>> coverage, risk, area = risk_coverage([3.0, 2.0, 1.0, 0.0], [True, True, False, False])
        >>> risk.round(2), round(area, 3)
        (array([0.  , 0.  , 0.33, 0.5 ]), 0.208)

    Source: El-Yaniv and Wiener, On the Foundations of Noise-free Selective Classification, JMLR 2010; the area is
    AURC of Geifman et al., ICLR 2019.
    """
    values, correct = _same_length(confidence, np.asarray(is_correct, dtype=np.float64))
    _, group = np.unique(-values, return_inverse=True)
    wrong = np.bincount(group, weights=1 - correct) / np.bincount(group)  # error rate of every group of equals
    answered = np.arange(1, len(values) + 1)
    risk = np.cumsum(wrong[np.sort(group)]) / answered
    return answered / len(values), risk, float(risk.mean())


def symmetry_gap(forward: Any, backward: Any) -> float:
    """How far swapping the two texts moves a score: s(a, b), s(b, a) of n pairs, (n,), (n,) -> float; 0 is symmetric.

        mean |s(a, b) - s(b, a)| over the standard deviation of s(a, b)

    nan where all scores are equal.

    Raises:
        ValueError: If the two differ in length or have fewer than two values.

    Example:
        >>> symmetry_gap([1.0, 3.0], [1.5, 3.0])
        0.25

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, Cor. 6.1: cosine and dot give 0, one-sided normalisation
    cannot.
    """
    a, b = _same_length(forward, backward)
    deviation = float(a.std())
    return float(np.abs(a - b).mean()) / deviation if deviation else math.nan


class CosineSum:
    """What `mean_cosine` needs of rows that arrive in chunks: the sum of the unit rows, and how many there were."""

    def __init__(self) -> None:
        self.total: Array = np.zeros(1)
        self.num_nonzero = self.num_rows = 0

    def add(self, x: Any) -> CosineSum:
        """One more chunk, (n, D); returns the sum itself."""
        unit = _unit(_matrix(x))
        self.total = self.total + unit.sum(axis=0)
        self.num_nonzero += int(unit.any(axis=1).sum())
        self.num_rows += len(unit)
        return self

    @property
    def mean(self) -> float:
        """Mean cosine over all pairs of different rows so far; nan below two rows."""
        pairs = self.num_rows * (self.num_rows - 1)
        return float(self.total @ self.total - self.num_nonzero) / pairs if pairs else math.nan


def _float64(x: Any) -> Array:
    return x.detach().cpu().double().numpy() if isinstance(x, Tensor) else np.asarray(x, dtype=np.float64)


def _matrix(x: Any, at_least: int = 1) -> Array:
    """Checked embeddings, (n, D) in float64."""
    matrix = _float64(x)
    if matrix.ndim != 2 or len(matrix) < at_least:
        raise ValueError(
            f"Embeddings are a matrix (n, D) of at least {at_least} row(s), got shape {matrix.shape}."
            + (" Pass x[None] for a single vector." if matrix.ndim == 1 else "")
        )
    return matrix


def _sample(x: Any, name: str, at_least: int) -> Array:
    """Checked one-dimensional sample, (n,) in float64."""
    sample = _float64(x)
    if sample.ndim != 1 or len(sample) < at_least:
        raise ValueError(
            f"{name} is a one-dimensional sample of at least {at_least} value(s), got shape {sample.shape}."
            + (" Pass norms(x) for embeddings." if sample.ndim == 2 else "")
        )
    return sample


def _same_length(a: Any, b: Any) -> tuple[Array, Array]:
    """Two checked samples of the same things, (n,) each."""
    x, y = _sample(a, "The first", at_least=2), _sample(b, "The second", at_least=2)
    if len(x) != len(y):
        raise ValueError(f"The two describe the same things in the same order, got {len(x)} and {len(y)} values.")
    return x, y


def _positive(temperature: float) -> float:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}; losses use 0.01 to 1.")
    return temperature


def _unit(matrix: Array) -> Array:
    """Rows at length 1; a zero row stays zero."""
    lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
    return matrix / np.where(lengths > 0, lengths, 1)


def _scatter(x: Any) -> Array:
    """Centred Gram matrix, (D, D) or (n, n), the smaller: n times the non-zero eigenvalues of the covariance."""
    matrix = _matrix(x, at_least=2)
    centred = np.where(np.ptp(matrix, axis=0) > 0, matrix - matrix.mean(axis=0), 0.0)  # constant columns: exactly 0
    return centred.T @ centred if centred.shape[0] > centred.shape[1] else centred @ centred.T


def _drawn(x: Any, num_samples: int | None, seed: int) -> Array:
    if num_samples is not None and num_samples < 2:
        raise ValueError(f"num_samples is at least 2, or None for all rows; got {num_samples}.")
    matrix = _matrix(x, at_least=2)
    if num_samples is None or len(matrix) <= num_samples:
        return matrix
    return matrix[np.random.default_rng(seed).choice(len(matrix), num_samples, replace=False)]


def _cumulated_variance(matrix: Array) -> Array:
    """Of the first principal components, times n: (min(n, D),)."""
    return np.cumsum(np.linalg.eigvalsh(_scatter(matrix))[::-1].clip(min=0.0))

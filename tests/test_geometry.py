"""Geometry against slow loops, closed forms, the papers' own algorithms, scikit-learn and scipy."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.decomposition import PCA
from sklearn.linear_model import LinearRegression

from st_magnitude import geometry


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def anisotropic(rng: np.random.Generator, n: int = 60, dim: int = 12) -> np.ndarray:
    return rng.normal(size=(n, dim)) * np.linspace(0.1, 3, dim) + rng.normal(size=dim)


def unit(x: np.ndarray) -> np.ndarray:
    return np.array([row / math.sqrt(sum(v * v for v in row)) for row in x])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tensors_give_the_float64_numbers_of_their_values(rng, dtype):
    x = torch.from_numpy(anisotropic(rng)).to(dtype).requires_grad_()
    values = x.detach().double().numpy()
    assert geometry.norms(x).dtype == np.float64
    assert geometry.norms(x) == pytest.approx([math.hypot(*row) for row in values], rel=1e-14)
    np.testing.assert_array_equal(geometry.norms(x), geometry.norms(values))
    for name in ("mean_cosine", "isoscore", "intrinsic_dimension"):
        function = getattr(geometry, name)
        assert function(x) == function(values)


def test_cohens_d(rng):
    a, b = rng.normal(1, 1, size=10), rng.normal(0, 3, size=200)
    # Student's t is d / sqrt(1/n + 1/m) with the same pooled deviation.
    t = stats.ttest_ind(a, b).statistic
    assert geometry.cohens_d(a, b) == pytest.approx(t * math.sqrt(1 / 10 + 1 / 200), rel=1e-12)
    assert geometry.cohens_d(b, a) == pytest.approx(-geometry.cohens_d(a, b), rel=1e-12)
    scaled = geometry.cohens_d(7 * a + 2, 7 * b + 2)
    assert scaled == pytest.approx(geometry.cohens_d(a, b), rel=1e-12)
    assert geometry.cohens_d([0.1] * 3, [0.1] * 7) == 0.0
    assert geometry.cohens_d([0.3] * 3, [0.1] * 7) == math.inf
    assert geometry.cohens_d([0.1] * 3, [0.3] * 7) == -math.inf


@pytest.mark.parametrize("effect", [0.0, 1.5])
def test_the_error_of_cohens_d_is_its_spread_over_samples(rng, effect):
    draws = zip(rng.normal(effect, size=(4000, 30)), rng.normal(size=(4000, 90)), strict=True)
    found = [geometry.cohens_d(a, b) for a, b in draws]
    assert np.std(found) == pytest.approx(geometry.cohens_d_error(effect, 30, 90), rel=0.04)


def test_adjusted_cohens_d_is_cohens_d_of_regression_residuals(rng):
    lengths, group = rng.normal(4, 1, size=80), rng.random(80) < 0.3
    values = 0.7 * lengths + 0.5 * group + rng.normal(0, 0.2, size=80)
    residual = values - LinearRegression().fit(lengths[:, None], values).predict(lengths[:, None])
    expected = geometry.cohens_d(residual[group], residual[~group])
    assert geometry.adjusted_cohens_d(values, lengths, group) == pytest.approx(expected, rel=1e-9)
    # The covariate's scale and origin do not matter, and a constant one explains nothing.
    scaled = geometry.adjusted_cohens_d(values, 5 - 3 * lengths, group)
    assert scaled == pytest.approx(expected, rel=1e-9)
    plain = geometry.cohens_d(values[group], values[~group])
    assert geometry.adjusted_cohens_d(values, np.ones(80), group) == pytest.approx(plain, rel=1e-12)
    with pytest.raises(ValueError, match="got 80 and 79 values"):
        geometry.adjusted_cohens_d(values, lengths[1:], group)


def test_coefficient_of_variation(rng):
    x = rng.gamma(3, size=50)
    assert geometry.coefficient_of_variation(x) == pytest.approx(stats.variation(x), rel=1e-13)
    assert math.isnan(geometry.coefficient_of_variation([0.0, 0.0]))
    with pytest.raises(ValueError, match="at least 1"):
        geometry.coefficient_of_variation([])


def test_mean_cosine_is_the_mean_over_pairs(rng):
    x = anisotropic(rng)
    expected = np.mean([a @ b for a, b in itertools.combinations(unit(x), 2)])
    assert geometry.mean_cosine(x) == pytest.approx(expected, rel=1e-12)
    scaled = geometry.mean_cosine(x * rng.gamma(2, size=(60, 1)))
    assert scaled == pytest.approx(expected, rel=1e-12)


def rudman_isoscore(x: np.ndarray) -> float:
    """IsoScore, Algorithm 1 of Rudman et al. 2022, step by step."""
    n = x.shape[1]
    diagonal = np.cov(PCA(svd_solver="full").fit_transform(x).T).diagonal()
    normalised = diagonal * math.sqrt(n) / np.linalg.norm(diagonal)
    defect = np.linalg.norm(normalised - 1) / math.sqrt(2 * (n - math.sqrt(n)))
    share = (n - defect**2 * (n - math.sqrt(n))) ** 2 / n**2
    return (n * share - 1) / (n - 1)


def test_isoscore_is_the_published_algorithm(rng):
    x = anisotropic(rng)
    assert geometry.isoscore(x) == pytest.approx(rudman_isoscore(x), rel=1e-10)
    rotation, _ = np.linalg.qr(rng.normal(size=(12, 12)))
    assert geometry.isoscore(4 * x @ rotation + 1) == pytest.approx(geometry.isoscore(x), rel=1e-10)
    x = rng.normal(size=(9, 30))  # fewer rows than columns
    eigenvalues = np.linalg.eigvalsh(np.cov(x.T))
    expected = (eigenvalues.sum() ** 2 / np.square(eigenvalues).sum() - 1) / 29
    assert geometry.isoscore(x) == pytest.approx(expected, rel=1e-10)
    assert np.isnan(geometry.isoscore([[1.0], [2.0], [4.0]]))


@pytest.mark.parametrize(("n", "dim"), [(4000, 64), (300, 300), (100, 400)])
def test_isoscore_of_a_gaussian_sample(rng, n, dim):
    reached = geometry.isoscore(rng.normal(size=(n, dim)))
    assert reached == pytest.approx(1 / (1 + dim / n), rel=0.02)


@pytest.mark.filterwarnings("ignore:.*intrinsic dimension")
@pytest.mark.parametrize("shape", [(80, 12), (10, 40)])
@pytest.mark.parametrize("variance", [0.5, 0.9, 0.95, 0.999])
def test_intrinsic_dimension_is_that_of_sklearn(rng, shape, variance):
    x = rng.normal(size=shape) * np.geomspace(0.05, 3, shape[1]) + 5
    pca = PCA(n_components=variance, svd_solver="full").fit(x)
    assert geometry.intrinsic_dimension(x, variance) == pca.n_components_
    fewer = geometry.intrinsic_dimension(x[:6], 1 - 1e-9)  # n rows span n - 1 dimensions
    assert fewer == 5


def test_intrinsic_dimension_depends_on_the_sample_size_as_published():
    x = np.random.default_rng(0).normal(size=(5000, 1024))
    assert geometry.intrinsic_dimension(x) == 896  # the temperature paper's "random vectors"
    with pytest.warns(UserWarning, match="2000 embeddings are few .* at least 4096"):
        assert geometry.intrinsic_dimension(x[:2000]) == 792


@pytest.mark.parametrize("scale", [1e-160, 1e-100, 1e100, 1e150])
def test_spectra_do_not_depend_on_the_scale(rng, scale):
    x = anisotropic(rng)
    assert geometry.intrinsic_dimension(x * scale) == geometry.intrinsic_dimension(x)
    assert geometry.isoscore(x * scale) == pytest.approx(geometry.isoscore(x), rel=1e-9)

"""judge: an interval that covers the true gain where a bootstrap does not, and verdicts from it."""

import numpy as np
import pytest
from scipy.stats import beta

from st_magnitude.judge import Difference, judge, norm_warning


@pytest.mark.parametrize(("share", "number"), [(0.02, 25), (0.04, 50), (0.1, 200)])
def test_the_interval_covers_the_gain_where_few_queries_change(share, number):
    rng = np.random.default_rng(0)
    covered = []
    for seed in range(200):
        x = (rng.random(number) < share) * 1.0
        found = judge(x, num_samples=1000, seed=seed)
        covered.append(found.low <= share <= found.high)
    assert np.mean(covered) >= 0.95


@pytest.mark.parametrize("number", [25, 50])
def test_no_gain_is_found_where_few_lose_much_and_many_gain_little(number):
    """A percentile bootstrap finds one in a third of these draws at 25 queries."""
    rng = np.random.default_rng(0)
    draws = rng.choice([-0.5, 0.1, 0.0], p=[0.04, 0.2, 0.76], size=(300, number))  # mean 0
    found = [judge(x, num_samples=1000).verdict for x in draws]
    assert found.count("better") <= 0.025 * len(found)


@pytest.mark.parametrize("number", [25, 50])
def test_the_interval_of_few_queries_is_wider_than_a_bootstraps(number):
    """As docs/evaluation.md says."""
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(30):
        x = rng.choice([-0.37, 0.37, 1.0, 0.0], p=[0.15, 0.25, 0.15, 0.45], size=number)
        found = judge(x, num_samples=2000)
        means = rng.choice(x, (2000, number)).mean(axis=1)
        shares.append((found.high - found.low) / np.ptp(np.quantile(means, [0.025, 0.975])))
    assert 1.2 < np.mean(shares) < 1.5


@pytest.mark.parametrize(("wins", "number"), [(0, 25), (3, 40), (25, 25)])
def test_shares_get_their_exact_interval(wins, number):
    x = np.repeat([1.0, 0.0], [wins, number - wins])
    high = judge(x, num_samples=200_000).high
    assert high == pytest.approx(
        beta.ppf(0.975, wins + 1, number - wins) if wins < number else 1, abs=2e-3
    )


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([1.0], "undecided"),
        ([0.0] * 250, "undecided"),
        ([0.3] * 100, "better"),
        ([-0.3] * 100, "worse"),
        ([0.3, -0.3] * 50, "undecided"),
    ],
)
def test_verdicts(differences, verdict):
    assert judge(differences).verdict == verdict


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((0.005, 0.0012, 0.0101), "+0.5 points [+0.1, +1.0]"),
        ((0.005, 0.0004, 0.0101), "+0.50 points [+0.04, +1.01]"),
        ((0.005, -0.0004, 0.0101), "+0.50 points [-0.04, +1.01]"),
        ((-0.005, -0.01, -0.00004), "-0.500 points [-1.000, -0.004]"),
        ((0.005, 0.0, 0.01), "+0.5 points [+0.0, +1.0]"),
        ((0.005, 1e-9, 0.01), "+0.5000 points [+0.0000, +1.0000]"),
    ],
)
def test_an_end_near_0_shows_its_side(ends, said):
    assert str(Difference(*ends, 100, 50)) == said


NEGATIVE, FELL = "Never-relevant documents have", "Training has brought the norms"


@pytest.mark.parametrize(
    ("d", "error", "before", "said"),
    [
        (-np.inf, np.inf, np.nan, NEGATIVE),
        (-0.2, 0.1, np.nan, NEGATIVE),  # the interval ends at -0.004
        (-0.19, 0.1, np.nan, ""),
        (0.5, 0.05, 0.71, FELL),  # a small effect, and below the interval
        (0.5, 0.05, 0.69, ""),
        (0.5, 0.15, 0.75, ""),  # more than 0.2, and within the interval, which is 0.294 wide
        (0.5, 0.15, 0.81, FELL),
        (0.5, 0.05, np.nan, ""),
        (0.5, 0.05, 0.3, ""),  # it rose
        (-0.5, 0.1, 0.5, NEGATIVE),  # both: the worse one is said
    ],
)
def test_norms_that_tell_nothing_are_warned_of(d, error, before, said):
    found = norm_warning(d, error, before)
    assert found.startswith(said)
    assert bool(found) == bool(said)


@pytest.mark.parametrize("differences", [[], [2.0], [np.nan], [[0.1]]])
def test_what_cannot_be_judged_is_refused(differences):
    with pytest.raises(ValueError, match="one number in"):
        judge(differences)

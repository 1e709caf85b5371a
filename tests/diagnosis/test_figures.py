"""Figures: what is in the axes."""

import numpy as np
import pytest
from _planted import small

from st_magnitude.diagnosis.page import paint_exponents, paint_norms
from st_magnitude.evaluation.metrics import judge


@pytest.fixture
def axis():
    plt = pytest.importorskip("matplotlib.pyplot")
    figure, axis = plt.subplots()
    yield axis
    plt.close(figure)


def test_the_band_shows_the_interval_of_the_difference(axis):
    out = small().exponent
    today = out.ndcg(1.0).mean()
    intervals = [judge(values - out.ndcg(1.0)).gain for values in out.per_query]
    paint_exponents(axis, out, intervals)
    curve = next(line for line in axis.lines if len(line.get_xdata()) == len(out.exponents))
    assert np.asarray(curve.get_ydata()) == pytest.approx(out.per_query.mean(axis=1))
    band = axis.collections[0].get_paths()[0].vertices
    ends = sorted(set(band[band[:, 0] == 0, 1]))
    assert ends == pytest.approx([today + intervals[0][1], today + intervals[0][2]])
    points = {line.get_label(): line.get_xydata()[0].tolist() for line in axis.lines}
    assert points["today"] == pytest.approx([1.0, today])
    chosen = [out.candidate, out.ndcg(out.candidate).mean()]
    assert points["chosen by one half"] == pytest.approx(chosen)


def test_histograms_are_shares_and_lose_nobody(axis):
    rng = np.random.default_rng(0)
    groups = {"a": np.append(rng.normal(size=3000), 1e6), "b": rng.normal(3, size=50)}
    paint_norms(axis, groups)
    assert axis.dataLim.x1 < 1e3  # one outlier does not squeeze the rest
    outlines = [p for p in axis.patches if not p.get_fill()]
    assert len(outlines) == 2
    for outline in outlines:
        x, y = outline.get_xy().T
        steps = [b for a, b, c, d in zip(x, y, x[1:], y[1:], strict=False) if b == d and c > a]
        assert sum(steps) == pytest.approx(1.0)

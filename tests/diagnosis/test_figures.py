"""Figures: what is in the axes."""

import numpy as np
import pytest
from _planted import small

from st_magnitude.diagnosis.page import paint_exponents, paint_norms
from st_magnitude.evaluation import CompressionCell
from st_magnitude.evaluation.compression import SERIES, paint_compression, pareto, plot_compression
from st_magnitude.evaluation.metrics import judge

CELLS = [
    CompressionCell(64, "float32", "none", 256, 0.50, 1.0),
    CompressionCell(64, "int8", "none", 64, 0.49, 0.98),
    CompressionCell(64, "rabitq", "none", 16, 0.46, 0.92),
    CompressionCell(64, "binary", "query", 8, 0.45, 0.90),
    CompressionCell(64, "binary", "norm", 10, 0.47, 0.94),
    CompressionCell(16, "float32", "none", 64, 0.40, 0.80),
    CompressionCell(64, "binary", "none", 8, 0.42, 0.84),
    CompressionCell(16, "binary", "norm", 4, 0.31, 0.62),
]


@pytest.fixture
def axis():
    plt = pytest.importorskip("matplotlib.pyplot")
    figure, axis = plt.subplots()
    yield axis
    plt.close(figure)


def test_compression(axis, tmp_path):
    paint_compression(axis, CELLS)
    lines = {line.get_label(): line for line in axis.lines}
    for kind, (label, *_) in SERIES.items():
        drawn = [(int(x), float(y)) for x, y in lines[label].get_xydata()]
        assert drawn == [
            (c.bytes_per_document, c.ndcg) for c in CELLS if (c.precision, c.rescoring) == kind
        ]
    # One label for each dimension and precision on the line, at the best of its points.
    labels = [(4, 0.31, "16"), (10, 0.47, "64"), (64, 0.49, "64"), (256, 0.5, "64")]
    assert [(*text.xy, text.get_text()) for text in axis.texts] == labels
    corners = [(c.bytes_per_document, c.ndcg) for c in pareto(CELLS)]
    best, full = lines["best at that size"], lines["64 x float32"]
    assert [tuple(point) for point in best.get_xydata()] == [*corners, (256, 0.5)]
    assert best.get_drawstyle() == "steps-post"  # between two sizes one has the smaller
    assert (set(full.get_ydata()), full.get_linestyle()) == ({0.5}, "--")
    assert {text.get_text() for text in axis.get_legend().get_texts()} == set(lines)
    plot_compression(CELLS, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_band_shows_the_interval_of_the_difference(axis):
    out = small().exponent
    intervals = [judge(values - out.ndcg(1.0)).gain for values in out.per_query]
    paint_exponents(axis, out, intervals)
    curve = next(line for line in axis.lines if len(line.get_xdata()) == len(out.exponents))
    assert np.asarray(curve.get_ydata()) == pytest.approx(out.per_query.mean(axis=1))
    band = axis.collections[0].get_paths()[0].vertices
    today = out.ndcg(1.0).mean()
    assert [today + intervals[0][1], today + intervals[0][2]] == pytest.approx(
        sorted(set(band[band[:, 0] == 0, 1]))
    )
    points = {line.get_label(): line.get_xydata()[0].tolist() for line in axis.lines}
    assert points["today"] == pytest.approx([1.0, today])
    assert points["chosen by one half"] == pytest.approx(
        [out.candidate, out.ndcg(out.candidate).mean()]
    )


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

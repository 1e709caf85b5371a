"""Recommendations: one function per change, from what was measured, with its sentences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from st_magnitude.evaluation.compression import CompressionCell, recommended
from st_magnitude.geometry import Array
from st_magnitude.judge import nothing_found
from st_magnitude.workbench.calibration import ExponentCurve, preferring
from st_magnitude.workbench.diagnosis.findings import (
    DO,
    NO_BENEFIT,
    NO_MAGNITUDE,
    NOT_ENOUGH,
    Recommendation,
)
from st_magnitude.workbench.judging.options import Options, highest_rows

VERDICTS = {"better": DO, "no better": NO_BENEFIT, "worse": NO_BENEFIT, "undecided": NOT_ENOUGH}
REASONS = {
    DO: "Four fifths of the queries chose this exponent, and the last fifth confirms it.",
    NO_BENEFIT: "The exponent that four fifths of the queries choose gains nothing on the last"
    " one.",
    NOT_ENOUGH: "The interval allows both: measure more queries.",
}


def tried_of(curve: ExponentCurve) -> Options[float]:
    """The exponent to try in place of the present one: the recommended one, or the best other."""
    exponents = curve.exponents
    rule = preferring(exponents, curve.present, curve.seed)
    others = np.flatnonzero(exponents != curve.present)

    def rule_of_others(values: Array) -> int:
        chosen = rule(values)
        if exponents[chosen] != curve.present:
            return chosen
        return int(others[highest_rows(values[others])[-1]])

    return Options.choose(curve.rankings, rule_of_others, curve.seed)


def exponent(
    curve: ExponentCurve, tried: Options[float], today: str, has_magnitude: bool, min_gain: float
) -> Recommendation:
    """Whether to score by another document exponent, which the other folds choose, instead of the
    similarity of today."""
    gamma = tried.value
    at = f"{curve.present:.2g}"
    gain = None
    verdict = NOT_ENOUGH
    reason = nothing_found(*curve.ndcg)
    if has_magnitude:
        gain = tried.held_out.minus(curve.at(curve.present), min_gain, curve.seed)
    if gain and not reason:
        verdict = VERDICTS[gain.verdict]
        why = REASONS[verdict]
        if verdict == DO and gamma != curve.best:
            verdict = NOT_ENOUGH
            why = "All queries together find no difference: measure more queries."
        reason = (
            f"nDCG@10 at the exponent that other queries choose minus nDCG@10 at {at}: {gain} on"
            f" {gain.queries:,} queries. {why}"
        )
    similarity = f"stm.Similarity(1, {gamma:.2g})" if gamma < 1 else '"cosine"'
    return Recommendation(
        name="exponent",
        action=f"Document exponent {gamma:.2g} instead of {at}",
        verdict=verdict,
        choice=f"stm.prepare(model, {similarity})" if verdict == DO else f"keep {today}",
        reason=reason or NO_MAGNITUDE,
        gain=gain,
    )


def storage(cells: Sequence[CompressionCell], tolerance: float) -> Recommendation:
    """The smallest format that keeps enough of nDCG@10, as `compress` recommends it."""
    cell, reason = recommended(cells, tolerance)
    full = cells[0]
    fits = cell.fits(tolerance * full.ndcg) if full.ndcg > 0 else None
    verdict = {True: DO, False: NO_BENEFIT, None: NOT_ENOUGH}[fits]
    return Recommendation(
        name="storage",
        action="Smaller vectors",
        verdict=verdict,
        choice=str(cell) if verdict == DO else f"keep all {full}",
        reason=reason,
        gain=cell.change,
    )

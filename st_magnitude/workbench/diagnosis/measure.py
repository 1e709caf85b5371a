"""Measurements: the norms of a model, and the exponent to try in place of the present one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from st_magnitude import geometry
from st_magnitude.geometry import Array
from st_magnitude.surgery.scoring import are_unit
from st_magnitude.workbench.calibration import ExponentCurve, preferring
from st_magnitude.workbench.diagnosis.findings import QUANTILES, Mask, NormStatistics
from st_magnitude.workbench.options import Options, highest_rows


def norm_statistics(embeddings: Tensor, texts: Sequence[str]) -> NormStatistics:
    """Statistics of the raw norms of one role: embeddings of n texts, (n, D)."""
    words = np.array([len(text.split()) for text in texts], dtype=float)
    values = geometry.norms(embeddings)
    return NormStatistics(
        values=values,
        words=words,
        mean=float(values.mean()),
        cv=geometry.coefficient_of_variation(values),
        quantiles=tuple(float(q) for q in np.quantile(values, QUANTILES)),
        # Norms of 1 differ by rounding only, and a correlation with rounding errors means nothing.
        length_spearman=math.nan if are_unit(values) else geometry.spearman(values, words),
    )


def effect_sizes(documents: NormStatistics, is_relevant: Mask) -> dict[str, float]:
    """Cohen's d of document norms by ``is_relevant`` (m,), as fields of a diagnosis."""
    if min(is_relevant.sum(), (~is_relevant).sum()) < 2:
        return {"cohens_d": math.nan, "adjusted_cohens_d": math.nan}
    norms = documents.values
    log_words = np.log(np.maximum(documents.words, 1))
    return {
        "cohens_d": geometry.cohens_d(norms[is_relevant], norms[~is_relevant]),
        "adjusted_cohens_d": geometry.adjusted_cohens_d(norms, log_words, is_relevant),
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

"""Geometry of a set of embeddings: pure functions of arrays with one row for each embedding.

Arrays, tensors (on any device, of any float type) and nested lists go in; numbers come out, computed in float64. An
array of the wrong shape, or with too few rows or values, raises a ValueError, and so does a parameter outside its
range. Evaluators, callbacks and reports measure with these functions and nothing else.
"""

from st_magnitude.geometry.direction import alignment, mean_cosine, uniformity
from st_magnitude.geometry.magnitude import adjusted_cohens_d, coefficient_of_variation, cohens_d, norms
from st_magnitude.geometry.spectrum import (
    effective_rank,
    epps_pulley,
    explained_variance,
    intrinsic_dimension,
    isoscore,
    isoscore_ceiling,
)
from st_magnitude.geometry.statistics import auroc, paired_bootstrap, risk_coverage, spearman, symmetry_gap

__all__ = [
    "adjusted_cohens_d",
    "alignment",
    "auroc",
    "coefficient_of_variation",
    "cohens_d",
    "effective_rank",
    "epps_pulley",
    "explained_variance",
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

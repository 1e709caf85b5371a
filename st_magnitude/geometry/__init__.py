"""Geometry of a set of embeddings: pure functions of arrays with one row for each embedding.

Arrays, tensors (on any device, of any float type) and nested lists go in; numbers come out,
computed in float64. An array of the wrong shape, or with too few rows or values, raises a
ValueError. Evaluators, callbacks and reports measure with these functions and nothing else.
"""

from st_magnitude.geometry.embeddings import (
    intrinsic_dimension,
    isoscore,
    isoscore_ceiling,
    mean_cosine,
    norms,
)
from st_magnitude.geometry.statistics import (
    adjusted_cohens_d,
    coefficient_of_variation,
    cohens_d,
    cohens_d_error,
    norm_warning,
    spearman,
)

__all__ = [
    "adjusted_cohens_d",
    "coefficient_of_variation",
    "cohens_d",
    "cohens_d_error",
    "intrinsic_dimension",
    "isoscore",
    "isoscore_ceiling",
    "mean_cosine",
    "norm_warning",
    "norms",
    "spearman",
]

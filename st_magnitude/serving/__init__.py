"""Whether a server, a client or an index returns what the model computes, and how to fix it.

Every similarity of this package is an inner product of vectors that were divided by a power of
their norm. A database with the metric **inner product** stores ``similarity.document(x)`` and gets
``similarity.query(x)``, and its product is the score. A server or an index that normalises loses
the norms, and reports no error.
"""

from st_magnitude.serving.check import ServingCheck, check_serving
from st_magnitude.serving.fixes import Finding
from st_magnitude.serving.index import with_prior, with_prior_queries

__all__ = ["Finding", "ServingCheck", "check_serving", "with_prior", "with_prior_queries"]

"""Vectors that reach production as the model makes them.

Every similarity here is an inner product of vectors that were divided by a power of their norm. A database with the
metric **inner product** stores ``similarity.document(x).numpy()`` and gets ``similarity.query(x).numpy()``, and its
product is the score. For an index that has cosine or L2 only, `augment` gives all documents the same norm by one more
dimension and leaves every inner product as it is. Use the inner product where an index has it: its HNSW graph found far
more (docs/serving.md).

`check_serving` asks a server or an index whether it keeps what the model computes.
"""

from st_magnitude.serving.check import check_serving
from st_magnitude.serving.result import Finding, ServingCheck
from st_magnitude.serving.vectors import augment, augment_queries

__all__ = ["Finding", "ServingCheck", "augment", "augment_queries", "check_serving"]

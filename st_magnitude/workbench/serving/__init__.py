"""Checks that a server or a client returns what the model computes, and says how to fix it.

A database with the metric **inner product** stores ``similarity.document(x)`` and gets
``similarity.query(x)``. If a server or an index normalises, norms are lost without an error.
"""

from st_magnitude.workbench.serving.check import ServingCheck, check_serving
from st_magnitude.workbench.serving.explain import Finding

__all__ = ["Finding", "ServingCheck", "check_serving"]

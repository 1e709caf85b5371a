"""The diagnosis that most tests of this folder look at."""

from __future__ import annotations

import pytest
from _planted import planted, quick

from st_magnitude import Diagnosis


@pytest.fixture(scope="session")
def found() -> Diagnosis:
    """A small task where norms are relevance, of a model that normalizes, with a baseline."""
    model, *task = planted(0, "relevance", num_queries=60, normalize=True)
    return quick(model, *task, baseline=planted(0, "noise", 60, similarity="dot")[0], title="a title")

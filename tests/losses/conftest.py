from __future__ import annotations

import pytest


@pytest.fixture
def in_float64(model):
    """Two ways to the same number can then be told from two numbers."""
    model.double()

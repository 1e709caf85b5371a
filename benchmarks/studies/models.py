"""The models of the studies, and how trainers are kept quiet."""

from __future__ import annotations

from typing import Any

from benchmarks.data.docstrings import bundled_minilm
from sentence_transformers import SentenceTransformer

import st_magnitude as stm

QUIET: dict[str, Any] = {  # arguments of a trainer that saves and says nothing
    "dataloader_drop_last": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "report_to": [],
}


def static_model() -> SentenceTransformer:
    """wordllama's table of 32,000 x 256 token vectors, from PyPI."""
    return stm.load("wordllama", device="cpu")


def minilm() -> SentenceTransformer:
    model = SentenceTransformer(bundled_minilm())
    model.max_seq_length = 32
    return model

"""The cost to serve a model, on the machine at hand."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from sentence_transformers import SentenceTransformer

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.surgery.raw import encode_raw, output_width

__all__ = ["Cost"]

QUERIES = 5  # are encoded one at a time
DOCUMENTS = 64  # are encoded at once


@dataclass(frozen=True)
class Cost:
    """The cost to serve a model.

    Attributes:
        query: Milliseconds to encode a query alone, the median of a sample.
        documents: Documents that are encoded in a second.
        megabytes: Of the weights, and of the embeddings of the corpus in float32.
    """

    query: float
    documents: float
    megabytes: float

    @classmethod
    def of(cls, model: SentenceTransformer, data: RetrievalData, seed: int = 0) -> Cost:
        """The cost by a sample of the queries and documents."""
        rng = np.random.default_rng(seed)
        asked, told = list(data.queries.values()), list(data.corpus.values())
        queries = [asked[i] for i in rng.permutation(len(asked))[:QUERIES]]
        documents = [told[i] for i in rng.permutation(len(told))[:DOCUMENTS]]
        _seconds(model, queries[:1], "query")  # the first of all takes longer
        of_queries = [_seconds(model, [query], "query") for query in queries]
        rate = len(documents) / _seconds(model, documents, "document")
        weights = sum(x.numel() * x.element_size() for x in model.parameters())
        index = 4 * (output_width(model) or 0) * len(told)
        return cls(1000 * float(np.median(of_queries)), rate, (weights + index) / 1e6)

    @property
    def cells(self) -> list[str]:
        """Milliseconds, documents a second and megabytes, in two digits."""
        return [_two_digits(x) for x in (self.query, self.documents, self.megabytes)]


def _seconds(model: SentenceTransformer, texts: list[str], role: str) -> float:
    began = time.perf_counter()
    encode_raw(model, texts, role, show_progress_bar=False)
    return max(1e-6, time.perf_counter() - began)


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,g}"

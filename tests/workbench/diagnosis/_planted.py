"""Models with planted embeddings, whose norms are relevance or noise."""

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module, Normalize

from st_magnitude import diagnose
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.workbench.diagnosis.findings import Diagnosis

DIM = 16
Task = tuple[SentenceTransformer, dict[str, str], dict[str, str], dict[str, set[str]]]


class Planted(Module):
    """Gives every text the embedding that was written down for it."""

    def __init__(self, table: dict[str, np.ndarray]) -> None:
        super().__init__()
        self.table = {text: torch.tensor(x, dtype=torch.float32) for text, x in table.items()}
        self.encoded = 0

    def preprocess(self, inputs, **_):
        self.encoded += len(inputs)
        return {"planted": torch.stack([self.table[text] for text in inputs])}

    def forward(self, features, **_):
        return features | {"sentence_embedding": features["planted"]}

    def get_embedding_dimension(self):
        return len(next(iter(self.table.values())))

    def save(self, *_, **__):
        raise NotImplementedError


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def planted(
    seed: int,
    norms: str,
    num_queries: int = 160,
    similarity: str = "cosine",
    normalize: bool = False,
) -> Task:
    """A search task: each query has one answer near it, and four distractors as near.

    Norms are drawn by what a text is ("relevance": answers about twice as large as others) or from
    one distribution for all ("noise"). Documents have more words than queries.
    """
    rng = np.random.default_rng(seed)
    queries, corpus, relevant, table = {}, {}, {}, {}
    for i in range(num_queries):
        centre = unit(rng.normal(size=DIM))
        queries[f"q{i}"] = f"query {i}"
        table[f"query {i}"] = centre * rng.uniform(0.5, 2)
        relevant[f"q{i}"] = {f"d{i}-0"}
        for j in range(5):
            text = f"document {i} number {j}" + " word" * int(rng.integers(0, 6))
            corpus[f"d{i}-{j}"] = text
            norm = rng.lognormal(0.7 if norms == "relevance" and j == 0 else 0.0, 0.2)
            table[text] = unit(centre + 0.9 * unit(rng.normal(size=DIM))) * norm
    return model_of(table, similarity, normalize), queries, corpus, relevant


def model_of(
    table: Mapping[str, np.ndarray], similarity: str = "cosine", normalize: bool = False
) -> SentenceTransformer:
    modules = [Planted(table), *([Normalize()] if normalize else [])]
    return SentenceTransformer(modules=modules, similarity_fn_name=similarity, device="cpu")


def table_of(model: SentenceTransformer) -> dict[str, np.ndarray]:
    return {text: x.numpy() for text, x in model[0].table.items()}


def quick(model: SentenceTransformer, *task: Mapping, **options: object) -> Diagnosis:
    return diagnose(model, RetrievalData(*task), batch_size=1000, **options)


@cache
def found_in(seed: int, norms: str, **options: object) -> Diagnosis:
    """The diagnosis of a planted task; each is made once."""
    return quick(*planted(seed, norms, **options), seed=seed)

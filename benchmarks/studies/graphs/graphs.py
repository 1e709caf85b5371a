"""Does a graph index find the largest inner products, and does one more dimension help?

    python benchmarks/studies/graphs/graphs.py [--norms runs/norms]

Recall@10 of the exact inner product by HNSW in FAISS and usearch (16 links, 128 candidates while
building, float32, one thread), for documents as they are (metric: inner product) and after
`augment` (same metric), with M the largest norm. Next to it are the distances that were computed
for a query.

Data: 6000 definitions of WordNet's nouns under wordllama's static table, 300 other nouns are the
queries; the same directions with synthetic norms, lognormal with sigma .5 and 1; with --norms, the
data of a run of examples/norms.py with its model ``qnorm``. What was expected is on the page,
docs/research/graphs.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import faiss
import numpy as np
from benchmarks.data.debian import fetch
from benchmarks.data.lexicons import synsets
from benchmarks.studies.estimates import markdown
from benchmarks.studies.models import static_model
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from usearch.index import Index

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData

Array = NDArray[np.float32]
K, LINKS, BUILD = 10, 16, 128
EFS = (10, 20, 40, 80, 160, 320)


def static() -> tuple[Array, Array]:
    file = fetch("wordnet-base") / "usr/share/wordnet/data.noun"
    entries = list(synsets(file.read_text(encoding="utf-8").splitlines()))
    np.random.default_rng(0).shuffle(entries)  # type: ignore[arg-type]
    model = static_model()
    queries = model.encode([entry.names[0] for entry in entries[-300:]])
    return queries, model.encode([entry.text for entry in entries[:6000]])


def trained(folder: Path) -> tuple[Array, Array]:
    data = RetrievalData.from_beir(folder / "data", "test")
    model = stm.strip_normalize(SentenceTransformer(str(folder / "qnorm"), device="cpu"))
    model.max_seq_length = 128
    queries = model.encode_query(list(data.queries.values())[:200])
    return queries, model.encode_document(list(data.corpus.values()))


def unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def of_faiss(documents: Array, queries: Array) -> Iterator[tuple[int, Array, float]]:
    index = faiss.IndexHNSWFlat(documents.shape[1], LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = BUILD
    index.add(documents)
    for ef in EFS:
        index.hnsw.efSearch = ef
        faiss.cvar.hnsw_stats.reset()
        found = index.search(queries, K)[1]
        yield ef, found, faiss.cvar.hnsw_stats.ndis / len(queries)


def of_usearch(documents: Array, queries: Array) -> Iterator[tuple[int, Array, float]]:
    index = Index(
        ndim=documents.shape[1], metric="ip", dtype="f32", connectivity=LINKS, expansion_add=BUILD
    )  # dtype: the default is bf16 on some processors
    index.add(np.arange(len(documents)), documents, threads=1)
    for ef in EFS:
        index.expansion_search = ef
        found = index.search(queries, K, threads=1)
        yield ef, found.keys, found.computed_distances / len(queries)


ENGINES: dict[str, Callable[[Array, Array], Iterator[tuple[int, Array, float]]]] = {
    "FAISS": of_faiss,
    "usearch": of_usearch,
}


def augment(documents: Array, norm: float) -> Array:
    """Documents of one norm M, (x, sqrt(M² - |x|²)), which cosine ranks as the inner product does
    x.

    Source: Bachrach et al., Speeding Up the Xbox Recommender System Using a Euclidean
        Transformation
    for Inner-Product Spaces, 2014, Theorem 1.
    """
    rest = norm**2 - (documents.astype(np.float64) ** 2).sum(axis=1)
    return np.column_stack([documents, np.sqrt(np.clip(rest, 0, None))]).astype(np.float32)


def measure(name: str, queries: Array, documents: Array) -> None:
    queries, documents = unit(queries), np.ascontiguousarray(documents, dtype=np.float32)  # QNorm
    norms = np.linalg.norm(documents, axis=1)
    spread, largest = norms.std() / norms.mean(), float(norms.max())
    best = np.argsort(-(queries.astype(float) @ documents.T.astype(float)), axis=1)[:, :K]
    longer = np.pad(queries, ((0, 0), (0, 1)))
    forms = {"raw": (documents, queries), "augmented": (augment(documents, largest), longer)}
    rows = []
    for engine, search in ENGINES.items():
        for form, (stored, sent) in forms.items():
            cells = []
            for _, found, cost in search(stored, sent):
                pairs = zip(found.tolist(), best.tolist(), strict=True)
                recall = np.mean([len({*a} & {*b}) / K for a, b in pairs])
                cells.append(f"{recall:.3f} ({cost:.0f})")
            rows.append([name, f"{spread:.2f}", engine, form, *cells])
    head = ["norms", "their CV", "index", "stored", *(f"ef {ef}" for ef in EFS)]
    print("\n".join([*markdown(head, rows, "lrll"), ""]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--norms", type=Path, help="the output of examples/norms.py")
    arguments = parser.parse_args()
    faiss.omp_set_num_threads(1)
    queries, documents = static()
    print("In each cell recall@10 (distances computed a query)\n")
    measure("static, its own norms", queries, documents)
    for sigma in (0.5, 1.0):
        norms = np.random.default_rng(1).lognormal(sigma=sigma, size=(len(documents), 1))
        made = unit(documents) * norms
        measure(f"lognormal norms, sigma {sigma}", queries, made)
    if arguments.norms:
        measure("trained with QNorm", *trained(arguments.norms))


if __name__ == "__main__":
    main()

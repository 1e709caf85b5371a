"""Does a graph index find the documents with the largest inner products, and does one more dimension help?

    python benchmarks/serving.py [--quick] [--demo runs/demo] [--output runs/serving]

Recall@10 of the exact inner product by HNSW in FAISS and usearch (16 links, 128 candidates while building, float32, one
thread), for documents as they are (metric: inner product) and after `augment` (same metric), with
M the largest norm, and once twice that, which leaves room for documents that come later. Next to it are the distances
that were computed for a query, which is the cost of a search on any machine.

Data, no download:
- 6000 definitions of WordNet's nouns (see lexicons.py), embedded by wordllama's static table (256 dimensions, norms as
  they happen to be), in random order; 300 other nouns are the queries;
- the same directions with synthetic norms, lognormal with sigma .5 and 1, independent of them;
- the same at sigma .5, with documents added in ascending order of norms: a corpus whose norms drift upwards;
- with ``--demo``, the data of a run of ``st-magnitude demo`` with its model ``qnorm``, whose norms QNorm has trained to
  carry information: 2248 chunks of docstrings, 200 queries.

Expected before measuring: with the norms of the models (coefficients of variation of .05 to .3) no difference above .01
at equal cost. At sigma .5 and 1 both get worse, the raw graph because of its hubs, which hide documents with small
norms, the augmented graph because such documents crowd at its pole, far from all queries. Morozov and Babenko
(Non-metric Similarity Graphs for Maximum Inner Product Search, 2018) found raw graphs better than the reduction, so raw
is expected ahead there at equal cost. Ascending order costs both something; twice the norm costs the augmented form
more."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from lexicons import fetch, synsets
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from temperature import static_model
from usearch.index import Index

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData

Array = NDArray[np.float32]
K, LINKS, BUILD = 10, 16, 128
EFS = (10, 20, 40, 80, 160, 320)


def static(quick: bool) -> tuple[Array, Array]:
    lines = (fetch("wordnet-base") / "usr/share/wordnet/data.noun").read_text(encoding="utf-8").splitlines()
    entries = list(synsets(lines))
    np.random.default_rng(0).shuffle(entries)  # type: ignore[arg-type]
    texts = [entry.text for entry in entries[: 1900 if quick else 6000]]
    return static_model().encode([entry.names[0] for entry in entries[-300:]]), static_model().encode(texts)


def demo(folder: Path) -> tuple[Array, Array]:
    data = RetrievalData.from_beir(folder / "data")
    model = stm.strip_normalize(SentenceTransformer(str(folder / "qnorm"), device="cpu"))
    model.max_seq_length = 128
    return model.encode_query(list(data.queries.values())[:200]), model.encode_document(list(data.corpus.values()))


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
    """Documents of one norm M, (x, sqrt(M² - |x|²)), which cosine and L2 rank as the inner product ranks x.

    Source: Bachrach et al., Speeding Up the Xbox Recommender System Using a Euclidean Transformation for Inner-Product
    Spaces, 2014, Theorem 1.
    """
    rest = norm**2 - (documents.astype(np.float64) ** 2).sum(axis=1)
    return np.column_stack([documents, np.sqrt(np.clip(rest, 0, None))]).astype(np.float32)


def measure(name: str, queries: Array, documents: Array, room: bool = False) -> list[dict[str, Any]]:
    queries, documents = unit(queries), np.ascontiguousarray(documents, dtype=np.float32)  # QNorm
    norms = np.linalg.norm(documents, axis=1)
    spread, largest = norms.std() / norms.mean(), float(norms.max())
    best = np.argsort(-(queries.astype(float) @ documents.T.astype(float)), axis=1)[:, :K]
    print(
        f"\n### {name}: coefficient of variation of norms {spread:.2f}, largest / median "
        f"{largest / np.median(norms):.1f}, {len(np.unique(best))} of {len(documents)} documents are in some top 10\n"
    )
    print("| index | stored | " + " | ".join(f"ef {ef}" for ef in EFS) + " |")
    print("| --- | --- |" + " ---: |" * len(EFS))
    forms = {
        "raw": (documents, queries),
        "augmented": (augment(documents, largest), np.pad(queries, ((0, 0), (0, 1)))),
    }
    if room:
        forms["augmented, M x 2"] = (augment(documents, 2 * largest), np.pad(queries, ((0, 0), (0, 1))))
    rows = []
    for engine, search in ENGINES.items():
        for form, (stored, sent) in forms.items():
            cells = []
            for ef, found, cost in search(stored, sent):
                recall = float(
                    np.mean([len({*a} & {*b}) / K for a, b in zip(found.tolist(), best.tolist(), strict=True)])
                )
                cells.append(f"{recall:.3f} ({cost:.0f})")
                rows.append({"data": name, "index": engine, "stored": form, "ef": ef, "recall": recall, "cost": cost})
            print(f"| {engine} | {form} | " + " | ".join(cells) + " |", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1900 documents")
    parser.add_argument("--demo", type=Path, help="the output of st-magnitude demo")
    parser.add_argument("--output", type=Path, default=Path("runs/serving"))
    arguments = parser.parse_args()
    faiss.omp_set_num_threads(1)

    queries, documents = static(arguments.quick)
    print(f"{len(queries)} queries, {len(documents)} documents; in each cell recall@10 (distances computed a query)")
    rows = measure("static, its own norms", queries, documents, room=True)
    for sigma in (0.5, 1.0):
        norms = np.random.default_rng(1).lognormal(sigma=sigma, size=(len(documents), 1))
        rows += measure(f"static, lognormal norms, sigma {sigma}", queries, unit(documents) * norms)
        if sigma == 0.5:
            order = np.argsort(norms[:, 0])
            rows += measure("the same, added in ascending order", queries, (unit(documents) * norms)[order])
    if arguments.demo:
        rows += measure("trained with QNorm", *demo(arguments.demo))

    arguments.output.mkdir(parents=True, exist_ok=True)
    record = arguments.output / ("quick.json" if arguments.quick else "results.json")
    record.write_text(json.dumps(rows, indent=1))
    print(f"\n{record}")


if __name__ == "__main__":
    main()

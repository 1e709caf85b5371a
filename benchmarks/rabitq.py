"""RaBitQ against bits with a stored norm: nDCG@10, bytes, search and build time at one bit a dimension.

    python benchmarks/rabitq.py [--cache FOLDER] [--output runs/rabitq]

RaBitQ (Gao and Long, 2024, arXiv 2405.12497; FAISS's IndexRaBitQ by inner product) stores the signs of r = d - c, where
c is the mean of the documents, and two numbers; m = |r|^2 / |r|_1 makes the estimate of <q - c, r> unbiased:

    q . d  is about  q . c + c . r + m <sign(r), q - c>

The package's own codes (CompressionEvaluator) are the signs of d. A search compares bits with the bits of the query,
takes the best 100 and scores these again by q . sign(d), times the stored norm where the similarity keeps one.

Models and tasks, no download: all-MiniLM-L6-v2 as published (cosine) on WordNet, FOLDOC and docstrings; the same after
40 steps of 64 of QNorm TempAggMRL on docstrings, whose boilerplate training shows as negatives, at the document
exponent that is best on dev. Both at full width and at a quarter. ``--models static-qnorm`` adds wordllama's table on
WordNet. Times: one thread, 82,115 definitions of nouns under that table (256 dimensions), 50 queries in one call.

Expected before measuring: RaBitQ with a float query beats the bits without rescoring by 3 points or more, and the
rescored bits by 1 point or more at full width and 2 at a quarter, because it ranks all documents and knows the mean
and the size of each error; for QNorm it beats the bits with a norm by as much. A random rotation changes less than a
point. Of its best 100, more of the exact top 10 are there than of the 100 by bits. 8 bytes a document are the price.
The search by bits is 5 times faster than RaBitQ with a float query and as fast as RaBitQ with a query of 4 bits; no
index takes a second to build.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from docstrings import build_docstring_task
from lexicons import build, default_cache, fetch, synsets
from numpy.typing import NDArray
from search_tasks import shrink
from temperature import CONDITIONS, MODELS, train
from torch import Tensor

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask, encode_texts
from st_magnitude.evaluation.compression import search_compressed

Array = NDArray[np.float32]
CANDIDATES = 100
Figures = dict[str, Any]


# --- embeddings -------------------------------------------------------------------------------------------------------


def tasks_of(base: str, cache: Path | None) -> tuple[dict[str, RetrievalData], RetrievalData, Any]:
    """Test tasks, the dev task that chooses the exponent, and rows to train on."""
    words = build(cache=cache, seed=0, **MODELS[base].sizes)
    if base == "static":
        return {"WordNet": words.test}, words.dev, words.train
    calls = build_docstring_task(
        test_queries=300, seed=0, workers=1, cache=default_cache(cache) / "docstrings", progress=False
    )
    tests = {"WordNet": words.test, "FOLDOC": words.foldoc, "docstrings": shrink(calls.test, 300, 2000, 0)}
    return tests, calls.dev, calls.train.triplets(1, 0)


def encoded(base: str, loss: str, cache: Path | None) -> Figures:
    """Embeddings of all tasks, and the exponent of the documents; kept in the cache folder."""
    kept = default_cache(cache) / "rabitq" / f"{base}-{loss}.pt"
    if not kept.is_file():
        tests, dev, rows = tasks_of(base, cache)
        torch.manual_seed(0)
        model, exponent = MODELS[base].load(), 1.0
        if loss != "published":
            train(model, CONDITIONS["QNorm TempAggMRL"](model), rows, 0, **MODELS[base].how)
            curve = stm.calibrate_exponent(model, dev, np.linspace(0, 1, 5), encode={"batch_size": 128})
            exponent = curve.highest
        found: Figures = {"exponent": exponent}
        for name, task in tests.items():
            judged = {query: text for query, text in task.queries.items() if task.relevant.get(query)}
            x = encode_texts(model, judged, task.corpus, before_normalize=True, batch_size=128)
            column = {document: i for i, document in enumerate(sorted(task.corpus))}
            relevant = [sorted(column[d] for d in task.relevant[q]) for q in judged]
            found[name] = (x.queries, x.documents, relevant)
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, kept)
    return torch.load(kept, weights_only=True)


# --- engines ----------------------------------------------------------------------------------------------------------


def rabitq(d: Array, bits: int = 1, query_bits: int = 0, rotate: bool = False) -> Any:
    """A flat RaBitQ index; 0 bits for the query mean a float query."""
    index = faiss.IndexRaBitQ(d.shape[1], faiss.METRIC_INNER_PRODUCT, bits)
    index.qb = query_bits
    if rotate:
        index = faiss.IndexPreTransform(faiss.RandomRotationMatrix(d.shape[1], d.shape[1]), index)
    index.train(d)
    index.add(d)
    return index


def fast_scan(d: Array) -> Any:
    index = faiss.IndexRaBitQFastScan(d.shape[1], faiss.METRIC_INNER_PRODUCT)
    index.train(d)
    index.add(d)
    return index


def cells(q: Tensor, d: Tensor, similarity: stm.Similarity) -> Iterator[tuple[str, int, Tensor, Tensor | None]]:
    """Name, bytes, best 10, and the best 100 of a first stage, of every engine."""
    width = d.shape[1]
    exact = EncodedTask(q, d).top(stm.DOT, CANDIDATES)
    yield "float32", 4 * width, exact[:, :10], exact
    signs, sizes = (d > 0).float() * 2 - 1, d.norm(dim=1, keepdim=True)
    ours = search_compressed(q, d, "binary", CANDIDATES, similarity)
    by_bits = EncodedTask((q > 0).float() * 2 - 1, signs).top(stm.DOT, CANDIDATES)
    yield "bits", width // 8, ours["none"], by_bits
    yield "bits, rescored", width // 8, ours["query"], by_bits
    if "norm" in ours:
        yield "bits, rescored with norm", width // 8 + 2, ours["norm"], by_bits
    scan = EncodedTask(q, signs * sizes).top(stm.DOT, CANDIDATES)
    yield "bits x norm, float query, all documents", width // 8 + 2, scan[:, :10], scan
    queries, documents = q.numpy(), np.ascontiguousarray(d.numpy())
    for name, options in {
        "RaBitQ": {},
        "RaBitQ, rotated": {"rotate": True},
        "RaBitQ, query of 4 bits": {"query_bits": 4},
        "RaBitQ, 2 bits": {"bits": 2},
        "RaBitQ, 4 bits": {"bits": 4},
    }.items():
        index = rabitq(documents, **options)
        size = index.sa_code_size()
        found = torch.from_numpy(index.search(queries, CANDIDATES)[1])
        yield name, size, found[:, :10], found
    if "norm" in ours:
        directions, norms = documents / sizes.numpy(), sizes[:, 0]
        index = rabitq(directions)
        scores, found = map(torch.from_numpy, index.search(queries, CANDIDATES))
        order = (scores * norms[found]).argsort(dim=1, descending=True)
        yield (
            "RaBitQ of directions, 100 rescored with norm",
            index.sa_code_size() + 2,
            found.gather(1, order)[:, :10],
            found,
        )
    int8 = search_compressed(q, d, "int8", CANDIDATES, similarity)["none"]
    yield "int8", width, int8, None


def measure(name: str, x: EncodedTask, exponent: float) -> list[Figures]:
    rows = []
    similarity = stm.Similarity(1.0, exponent)
    for width in (x.queries.shape[1], x.queries.shape[1] // 4):
        part = x.prefix(width)
        q, d = similarity.query(part.queries.float()), similarity.document(part.documents.float())
        top, full = None, None
        for engine, size, best, candidates in cells(q, d, similarity):
            top = best if top is None else top
            ndcg = float(x.ndcg(best).mean())
            full = ndcg if full is None else full
            found = (
                np.nan
                if candidates is None
                else float(
                    np.mean([len({*a} & {*b}) / 10 for a, b in zip(top.tolist(), candidates.tolist(), strict=True)])
                )
            )
            rows.append(
                {
                    "data": name,
                    "width": width,
                    "engine": engine,
                    "bytes": size,
                    "ndcg": ndcg,
                    "retention": ndcg / full,
                    "found": found,
                }
            )
    return rows


# --- time -------------------------------------------------------------------------------------------------------------


def nouns(cache: Path | None) -> tuple[Array, Array]:
    lines = (fetch("wordnet-base", cache) / "usr/share/wordnet/data.noun").read_text(encoding="utf-8").splitlines()
    entries = list(synsets(lines))
    model = MODELS["static"].load()
    documents = model.encode([entry.text for entry in entries], batch_size=256)
    return model.encode([entry.names[0] for entry in entries[:: len(entries) // 50][:50]]), documents


def clocked(call: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Seconds of the fastest call, and what it returns."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        value = call()
        times.append(time.perf_counter() - began)
    return min(times), value


def binary(d: Array) -> Any:
    index = faiss.IndexBinaryFlat(d.shape[1])
    index.add(np.packbits(d > 0, axis=1))
    return index


def rescored(index: Any, signs: NDArray[np.int8], norms: Array, q: Array) -> Any:
    """The best 100 by bits, scored again by the float query and the norm."""
    found = index.search(np.packbits(q > 0, axis=1), CANDIDATES)[1]
    scores = np.einsum("nd,nkd->nk", q, signs[found], dtype=np.float32) * norms[found]
    return np.take_along_axis(found, np.argsort(-scores, axis=1)[:, :10], axis=1)


def flat(d: Array) -> Any:
    index = faiss.IndexFlatIP(d.shape[1])
    index.add(d)
    return index


def cells_of(d: Array, lists: int = 256, probes: int = 16) -> Any:
    index = faiss.index_factory(d.shape[1], f"IVF{lists},RaBitQ", faiss.METRIC_INNER_PRODUCT)
    index.train(d)
    index.add(d)
    index.nprobe = probes
    return index


def times(q: Array, d: Array) -> list[Figures]:
    signs, norms = np.where(d > 0, 1, -1).astype(np.int8), np.linalg.norm(d, axis=1)
    best = np.argsort(-(q @ d.T), axis=1)[:, :10]
    rows = []
    bits = np.packbits
    engines: dict[str, tuple[Callable[[Array], Any], Callable[[Any], Any]]] = {
        "float32": (flat, lambda index: index.search(q, 10)[1]),
        "bits": (binary, lambda index: index.search(bits(q > 0, axis=1), 10)[1]),
        "bits, rescored with norm": (binary, lambda index: rescored(index, signs, norms, q)),
        **{
            name: (make, lambda index: index.search(q, 10)[1])
            for name, make in {
                "RaBitQ": rabitq,
                "RaBitQ, query of 8 bits": partial(rabitq, query_bits=8),
                "RaBitQ, query of 4 bits": partial(rabitq, query_bits=4),
                "RaBitQ, fast scan": fast_scan,
                "RaBitQ, 4 bits": partial(rabitq, bits=4),
                "RaBitQ in 256 cells, 16 probed": cells_of,
            }.items()
        },
    }
    for name, (make, search) in engines.items():
        building, index = clocked(partial(make, d), 1 if "cells" in name else 2)
        seconds, found = clocked(partial(search, index), 2)
        recall = float(np.mean([len({*a} & {*b}) / 10 for a, b in zip(found.tolist(), best.tolist(), strict=True)]))
        rows.append({"engine": name, "build": building, "query": seconds / len(q), "recall": recall})
        print(f"| {name} | {building:.2f} | {1e3 * seconds / len(q):.3f} | {recall:.3f} |", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--models", default="MiniLM-published,MiniLM-qnorm", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("runs/rabitq"))
    arguments = parser.parse_args()
    faiss.omp_set_num_threads(1)
    rows: list[Figures] = []
    for base, loss in (name.split("-") for name in arguments.models.split(",") if name):
        found = encoded(base, loss, arguments.cache)
        exponent = found.pop("exponent")
        for task, (queries, documents, relevant) in found.items():
            name = f"{base}, {loss}, {task}, exponent {exponent:g}"
            rows += measure(name, EncodedTask(queries, documents, relevant), exponent)
            print(f"\n### {name}\n\n| dim | engine | bytes | nDCG@10 | retention | of the top 10 in the best 100 |")
            print("| ---: | --- | ---: | ---: | ---: | ---: |")
            for row in (row for row in rows if row["data"] == name):
                print(
                    f"| {row['width']} | {row['engine']} | {row['bytes']} | {100 * row['ndcg']:.1f} | "
                    f"{100 * row['retention']:.1f} | {100 * row['found']:.1f} |",
                    flush=True,
                )
    print("\n| engine | build, s | a query, ms | recall@10 |\n| --- | ---: | ---: | ---: |")
    clock = times(*nouns(arguments.cache))
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "results.json").write_text(json.dumps({"quality": rows, "times": clock}, indent=1))


if __name__ == "__main__":
    main()

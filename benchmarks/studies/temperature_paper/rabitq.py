"""RaBitQ against bits with a stored norm: nDCG@10 and bytes.

    python benchmarks/studies/temperature_paper/rabitq.py [--cache FOLDER]

RaBitQ (Gao and Long, 2024, arXiv 2405.12497; FAISS's IndexRaBitQ by inner product) stores the signs
of r = d - c, where c is the mean of the documents, and two numbers; m = |r|^2 / |r|_1 makes the
estimate of <q - c, r> unbiased:

    q . d  is about  q . c + c . r + m <sign(r), q - c>

The package's own codes (CompressionEvaluator) are the signs of d. A search compares bits with the
bits of the query, takes the best 100 and scores these again by q . sign(d), times the stored norm
where the similarity keeps one. Models: all-MiniLM-L6-v2 as published (cosine), and after 40 steps
of QNorm TempAggMRL on docstrings, at the document exponent that is best on dev. Both at full width
and at a quarter.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from benchmarks.data.docstrings import build_docstring_task
from benchmarks.data.lexicons import build, default_cache
from benchmarks.data.search_tasks import shrink
from benchmarks.studies.estimates import markdown
from benchmarks.studies.models import minilm, train
from benchmarks.studies.temperature_paper.temperature_paper import MODELS
from numpy.typing import NDArray
from torch import Tensor

import st_magnitude as stm
from st_magnitude.data.task import EncodedTask, encode_texts
from st_magnitude.evaluation.compression import search_compressed

Array = NDArray[np.float32]
CANDIDATES = 100


# --- embeddings -----------------------------------------------------------------------------------


def encoded(is_published: bool, cache: Path | None) -> tuple[float, dict[str, EncodedTask]]:
    """The exponent of the documents, and the embeddings of all tasks."""
    words = build(cache=cache, seed=0, **MODELS["MiniLM"].sizes)
    folder = default_cache(cache) / "docstrings"
    calls = build_docstring_task(test_queries=300, seed=0, workers=1, cache=folder, progress=False)
    docstrings = shrink(calls.test, 300, 2000, 0)
    tests = {"WordNet": words.test, "FOLDOC": words.foldoc, "docstrings": docstrings}
    torch.manual_seed(0)
    model, exponent = minilm(), 1.0
    if not is_published:
        rows = calls.train.triplets(1, 0)
        loss = stm.TempAggMRLLoss(stm.prepare(model, "qnorm"), similarity="qnorm")
        train(model, loss, rows, 0, **MODELS["MiniLM"].how)
        exponents = np.linspace(0, 1, 5)
        exponent = stm.calibrate_exponent(model, calls.dev, exponents).highest
    found = {}
    for name, task in tests.items():
        asked = {query: text for query, text in task.queries.items() if task.relevant.get(query)}
        x = encode_texts(model, asked, task.corpus, before_normalize=True, batch_size=128)
        column = {document: i for i, document in enumerate(sorted(task.corpus))}
        relevant = [sorted(column[d] for d in task.relevant[q]) for q in asked]
        found[name] = EncodedTask(x.queries, x.documents, relevant)
    return exponent, found


# --- engines --------------------------------------------------------------------------------------


def rabitq(d: Array, bits: int = 1) -> Any:
    """A flat RaBitQ index that reads float queries."""
    index = faiss.IndexRaBitQ(d.shape[1], faiss.METRIC_INNER_PRODUCT, bits)
    index.qb = 0
    index.train(d)
    index.add(d)
    return index


def cells(
    q: Tensor, d: Tensor, similarity: stm.Similarity
) -> Iterator[tuple[str, int, Tensor, Tensor | None]]:
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
    queries, documents = q.numpy(), np.ascontiguousarray(d.numpy())
    for bits in (1, 2, 4):
        index = rabitq(documents, bits)
        size = index.sa_code_size()
        found = torch.from_numpy(index.search(queries, CANDIDATES)[1])
        yield f"RaBitQ, {bits} bits", size, found[:, :10], found
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


def shared(best: Any, found: Any) -> float:
    """Share of the best 10 that are among what was found."""
    pairs = zip(best.tolist(), found.tolist(), strict=True)
    return float(np.mean([len({*a} & {*b}) / 10 for a, b in pairs]))


def measure(x: EncodedTask, exponent: float) -> list[list[Any]]:
    rows = []
    similarity = stm.Similarity(1.0, exponent)
    for width in (x.queries.shape[1], x.queries.shape[1] // 4):
        part = x.prefix(width)
        q, d = similarity.query(part.queries.float()), similarity.document(part.documents.float())
        top = None
        for engine, size, best, candidates in cells(q, d, similarity):
            top = best if top is None else top
            found = "" if candidates is None else f"{100 * shared(top, candidates):.1f}"
            rows.append([width, engine, size, f"{100 * x.ndcg(best).mean():.1f}", found])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path)
    cache = parser.parse_args().cache
    faiss.omp_set_num_threads(1)
    for is_published in (True, False):
        exponent, found = encoded(is_published, cache)
        for task, x in found.items():
            head = ["dim", "engine", "bytes", "nDCG@10", "of the top 10 in the best 100"]
            lines = markdown(head, measure(x, exponent), "rl")
            how = "published" if is_published else "QNorm"
            print("\n".join(["", f"### {how}, {task}, exponent {exponent:g}", "", *lines]))


if __name__ == "__main__":
    main()

"""Costs of a large corpus: bytes and search time of ten million vectors by format, and hours of
encoding.

    python benchmarks/speed/index.py [--vectors 10000000]
    python benchmarks/speed/index.py --encode  # tokens a second of two encoders
    python benchmarks/speed/index.py --tables  # the tables of stored figures

Vectors: 96 dimensions, random directions, norms log-normal (sigma .3), by inner product, FAISS, one
thread. Each format is a process of its own, and its memory is measured apart. Recall is the
share of the exact top 10 among the first 10. Random directions are the worst case for it.

- float32: ``IndexFlatIP``, exact.
- int8: ``IndexScalarQuantizer(QT_8bit)``, one range for each dimension.
- rabitq: ``IndexRaBitQFastScan`` (Gao and Long, SIGMOD 2024): signs and two float32 a vector.
- ivf-rabitq: ``IndexIVFRaBitQFastScan``, 1,024 lists, 32 of them visited.

Encoders have random weights and read full texts of 256 tokens, in float32 on one CPU thread: the
shape of MiniLM-L6 (384 dimensions) and that of BERT-large (1024 dimensions). Times are CPU times.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from benchmarks.speed.memory import in_a_process
from benchmarks.studies.estimates import markdown
from numpy.typing import NDArray

DIM, QUERIES, BLOCK = 96, 100, 500_000
FORMATS = ("float32", "int8", "rabitq", "ivf-rabitq")
RESULTS = Path(__file__).with_suffix(".json")
TOKENS = 256  # of a document
# layers, dimensions, size of the feed-forward layer
ENCODERS = {"384, MiniLM-L6": (6, 384, 1536), "1024, BERT-large": (24, 1024, 4096)}


def vectors(number: int, seed: int) -> Iterator[NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    for begin in range(0, number, BLOCK):
        x = rng.standard_normal((min(BLOCK, number - begin), DIM), dtype=np.float32)
        norms = rng.lognormal(0, 0.3, len(x)).astype(np.float32)
        yield x * (norms / np.linalg.norm(x, axis=1))[:, None]


def measure(name: str, number: int, exact: Path) -> dict[str, Any]:
    """Bytes, memory, time and recall of one format; float32 writes the exact top 10, and the others
    read it."""
    import faiss

    faiss.omp_set_num_threads(1)
    queries = next(vectors(QUERIES, seed=1))
    before = psutil.Process().memory_info().rss
    began = time.process_time()
    inner = faiss.METRIC_INNER_PRODUCT
    quantizer = faiss.IndexFlatIP(DIM)
    make = {
        "float32": lambda: faiss.IndexFlatIP(DIM),
        "int8": lambda: faiss.IndexScalarQuantizer(DIM, faiss.ScalarQuantizer.QT_8bit, inner),
        "rabitq": lambda: faiss.IndexRaBitQFastScan(DIM, inner),
        "ivf-rabitq": lambda: faiss.IndexIVFRaBitQFastScan(quantizer, DIM, 1024, inner),
    }
    index = make[name]()
    index.train(next(vectors(min(number, 100_000), seed=0)))
    if name == "ivf-rabitq":
        index.nprobe = 32
    for block in vectors(number, seed=0):
        index.add(block)
    built = time.process_time() - began
    memory = (psutil.Process().memory_info().rss - before) / 2**20
    index.search(queries[:2], 10)
    began = time.process_time()
    found = index.search(queries, 10)[1]
    seconds = time.process_time() - began
    if name == "float32":
        np.save(exact, found)
    truth = np.load(exact)
    recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, truth, strict=True)])
    return {
        "bytes": index.code_size + 8 * (name == "ivf-rabitq"),  # and an id
        "MiB": memory,
        "build s": built,
        "ms": 1000 * seconds / QUERIES,
        "recall": float(recall),
    }


def encode() -> dict[str, float]:
    """Tokens a second by encoder."""
    import torch
    from transformers import BertConfig, BertModel

    torch.set_num_threads(1)
    found = {}
    for name, (layers, dim, hidden) in ENCODERS.items():
        sizes = {"hidden_size": dim, "intermediate_size": hidden}
        sizes |= {"num_hidden_layers": layers, "num_attention_heads": dim // 32}
        model = BertModel(BertConfig(**sizes)).eval()
        ids = torch.randint(1000, 2000, (4, TOKENS))
        with torch.inference_mode():
            model(ids[:1])
            times = []
            for _ in range(3):
                began = time.process_time()
                model(ids)
                times.append(time.process_time() - began)
        found[name] = ids.numel() / min(times)
    return found


def tables(results: dict[str, Any]) -> None:
    rows = []
    for name in FORMATS:
        if x := results.get(name):
            alone = x["bytes"] * x["vectors"] / 2**20
            memory = [f"{x['MiB']:,.0f}", f"{alone:,.0f}"]
            speed = [f"{x['ms']:.1f}", f"{x['recall']:.2f}", f"{x['build s']:.0f}"]
            rows.append([name, x["bytes"], *memory, *speed])
    head = "format|bytes a vector|memory, MiB|bytes alone, MiB|ms a query|recall@10|build, s"
    print("\n".join(["", *markdown(head.split("|"), rows)]))
    rows = []
    for name, speed in results.get("tokens/s", {}).items():
        rows.append([name, rounded(speed), rounded(1e6 * TOKENS / speed / 3600)])
    head = ["encoder", "tokens/s", "hours for a million documents"]
    print("\n".join(["", *markdown(head, rows)]))


def rounded(number: float) -> str:
    """Two significant digits, with commas."""
    digits = 1 - math.floor(math.log10(number))
    return f"{round(number, digits):,.{max(digits, 0)}f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vectors", type=int, default=10**7)
    parser.add_argument("--encode", action="store_true")
    parser.add_argument("--tables", action="store_true")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if arguments.encode:
        results["tokens/s"] = encode()
    elif not arguments.tables:
        exact = Path(tempfile.gettempdir(), f"exact-{arguments.vectors}.npy")
        for name in FORMATS:
            measured = in_a_process(measure, name, arguments.vectors, exact)
            results[name] = {"vectors": arguments.vectors, **measured}
            print(name, results[name], flush=True)
    if not arguments.tables:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    tables(results)


if __name__ == "__main__":
    main()

"""What encode_corpus costs over a plain call of the model, what a second process brings, and the memory it takes.

    python benchmarks/encoding.py [--quick]

Texts of 5 to 60 random words, one torch thread a process, CPU. No download.

- Time of encode_corpus (fingerprint of the model, two passes over the corpus, Parquet, fsync) over that of
  ``model.encode_document``, for all-MiniLM-L6-v2 and for wordllama's static table, which is the harder test: it encodes
  thousands of texts a second. And the time of the call that finds everything done. Best of several rounds, in turn.
- Time with two processes over that with one, with and without their start.
- Peak of resident memory (Linux) beyond what the loaded static model has, for corpora (.jsonl) of several sizes, each
  in a new process.

Expected before measuring: at most 1.05 for MiniLM and 1.3 for the static table; a finished folder costs less than 5 %
of encoding for MiniLM; two processes take .55 to .7 of the time on two idle cores, start left out; memory grows by at
most 50 bytes a document once the corpus has many shards, where the texts have about 160.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from temperature import minilm, static_model

from st_magnitude.data.encode import encode_corpus

WORDS = ("a", "bee", "saw", "the", "old", "tree", "near", "our", "house", "and", "then", "it", "went", "for", "honey")


def texts(number: int) -> dict[str, str]:
    rng = np.random.default_rng(0)
    return {f"d{i}": " ".join(rng.choice(WORDS, rng.integers(5, 61))) for i in range(number)}


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def overhead(name: str, model: SentenceTransformer, number: int, rounds: int) -> None:
    corpus, shard = texts(number), number // 4
    best = {"plain": float("inf"), "shards": float("inf"), "done": float("inf")}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            calls = {
                "plain": lambda: model.encode_document(list(corpus.values()), show_progress_bar=False),
                "shards": lambda folder=folder: encode_corpus(model, corpus, folder, shard_size=shard),
            }
            calls["done"] = calls["shards"]
            best = {key: min(best[key], seconds(call)) for key, call in calls.items()}
    ratios = best["shards"] / best["plain"], best["done"] / best["plain"]
    print(f"| {name} | {number} | {best['plain']:.2f} s | {ratios[0]:.2f} | {ratios[1]:.3f} |", flush=True)


def processes(number: int) -> None:
    model, corpus = minilm(), texts(number)
    times = {}
    for devices, size in ((["cpu"], number), (["cpu", "cpu"], 2), (["cpu", "cpu"], number)):
        some = dict(list(corpus.items())[:size])
        with tempfile.TemporaryDirectory() as folder:
            options = {"devices": devices, "shard_size": number // 2}
            times[len(devices), size] = seconds(
                lambda some=some, to=folder, o=options: encode_corpus(model, some, to, **o)
            )
    one, start, two = times[1, number], times[2, 2], times[2, number]
    print(f"\n{number} texts, MiniLM: one process {one:.1f} s, two {two:.1f} s, of which {start:.1f} s are their start")
    print(f"two / one: {two / one:.2f} in all, {(two - start) / one:.2f} without the start")


def memory(number: int) -> None:
    """In a process of its own."""
    model = static_model()
    with tempfile.TemporaryDirectory() as folder:
        corpus, rng = Path(folder, "corpus.jsonl"), np.random.default_rng(0)
        lines = [" ".join(rng.choice(WORDS, rng.integers(5, 61))) for _ in range(1000)]
        with corpus.open("w") as file:
            for i in range(number):
                file.write(json.dumps({"_id": f"d{i}", "text": lines[i % 1000]}) + "\n")
        model.encode_document(lines)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
        before = resident("VmHWM")
        encode_corpus(model, corpus, Path(folder, "out"), shard_size=5000)
        print(resident("VmHWM") - before, corpus.stat().st_size / 2**20)


def resident(name: str) -> float:
    """MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the texts, one round")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes to come
    if arguments.memory:
        memory(arguments.memory)
        return
    part, rounds = (5, 1) if arguments.quick else (1, 3)
    print("| model | texts | plain | encode_corpus / plain | finished folder / plain |")
    print("| --- | ---: | ---: | ---: | ---: |")
    overhead("static", static_model(), 40_000 // part, rounds)
    overhead("MiniLM", minilm(), 2_000 // part, rounds)

    print("\n| documents | corpus.jsonl | peak beyond the model |\n| ---: | ---: | ---: |")
    for number in (20_000, 100_000, 500_000):
        command = [sys.executable, __file__, "--memory", str(number // part)]
        peak, size = map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
        print(f"| {number // part} | {size:.0f} MiB | {peak:.0f} MiB |", flush=True)
    processes(4_000 // part)


if __name__ == "__main__":
    main()

"""A soak test of `st-magnitude encode`: many short texts, kills at random, and a look at what is on the disk.

    python benchmarks/soak.py [--documents 1000000] [--kills 5] [--seed 0]

A static table (wordllama) encodes made-up texts in shards of 20,000. The command is killed (SIGKILL) after a random
time and started again, as often as asked; the last run ends by itself. Then every id must be there once, in the order
of the corpus, and a sample of the embeddings must equal those of the model. Peak memory is that of each process, from
the system (ru_maxrss of the child).

Then an exhaustive search of 1,000 queries in as many random documents of 256 dimensions, in a process of its own.

Expected for 10^6 documents of 8 words, before measuring: nothing lost, nothing doubled; a run that ends by itself takes
at most 150 MB more than one over a tenth of the documents. The search takes less than 4 GiB, of which 1 GiB are the
documents and 1 GiB their copy without norms.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from temperature import static_model

import st_magnitude as stm

SHARD = 20_000


def write_corpus(path: Path, documents: int, seed: int) -> None:
    rng = random.Random(seed)
    firsts, seconds = ("red", "sun", "tea", "oak", "sea", "ice"), ("stone", "light", "field", "bird", "town")
    words = [first + second for first in firsts for second in seconds]
    with path.open("w", encoding="utf-8") as file:
        for number in range(documents):
            text = " ".join(rng.choices(words, k=7)) + f" {number}"
            file.write(json.dumps({"_id": f"d{number}", "text": text}) + "\n")


def encode(model: Path, corpus: Path, output: Path, kill_after: float | None) -> tuple[float, float, int]:
    """Seconds, peak memory in MB and exit status of one run, which is killed after so many seconds."""
    command = ["-m", "st_magnitude", "encode", str(model), "--corpus", str(corpus), "--output", str(output), "--json"]
    command += ["--shard-size", str(SHARD), "--batch-size", "1024"]
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        seconds = time.perf_counter() - began
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return seconds, usage.ru_maxrss / 1024, process.returncode
        if kill_after is not None and seconds > kill_after:
            process.send_signal(signal.SIGKILL)
            kill_after = None
        time.sleep(0.05)


def check(model: Path, output: Path, documents: int) -> None:
    """Raises if an id is lost or doubled, or an embedding differs."""
    shards = sorted(output.glob("shard-*.parquet"))
    ids = [key for shard in shards for key in pq.read_table(shard, columns=["_id"])["_id"].to_pylist()]
    assert ids == [f"d{number}" for number in range(documents)], "ids are lost, doubled or out of order"
    leftovers = {path.name for path in output.iterdir()} - {path.name for path in shards} - {"encoding.json", ".lock"}
    assert not leftovers, f"leftovers: {sorted(leftovers)[:5]}"
    with (output.parent / "corpus.jsonl").open(encoding="utf-8") as file:
        corpus = {row["_id"]: row["text"] for row in map(json.loads, file)}
    loaded = stm.load(str(model))
    for shard in random.Random(0).sample(shards, min(5, len(shards))):
        table = pq.read_table(shard).slice(0, 64)
        found = np.stack([np.asarray(row) for row in table["embedding"].to_pylist()])
        expected = loaded.encode_document([corpus[key] for key in table["_id"].to_pylist()], show_progress_bar=False)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


SEARCH = """
import resource, sys
import torch
import st_magnitude as stm
from st_magnitude.data.task import EncodedTask
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
queries, documents = torch.randn(1000, 256), torch.randn(int(sys.argv[1]), 256)
top = EncodedTask(queries, documents).top(stm.COSINE, 10)
assert top.shape == (1000, 10)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(f"{before / 2**20:.2f} GiB before, {peak / 2**20:.2f} GiB at the peak of the search")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        static_model().save_pretrained(str(folder / "model"))
        print("| documents | run | seconds | peak MB | ended | shards |\n| ---: | --- | ---: | ---: | --- | ---: |")
        for documents, kills in ((arguments.documents // 10, 0), (arguments.documents, arguments.kills)):
            work = folder / str(documents)
            work.mkdir()
            write_corpus(work / "corpus.jsonl", documents, arguments.seed)
            output = work / "embeddings"
            for run in range(kills + 1):
                kill_after = None if run == kills else 8 + 7 * rng.random()  # it starts to encode after some seconds
                seconds, memory, status = encode(folder / "model", work / "corpus.jsonl", output, kill_after)
                ended = "by itself" if status == 0 else "killed" if status == -signal.SIGKILL else f"status {status}"
                number = len(list(output.glob("shard-*.parquet")))
                print(f"| {documents:,} | {run + 1} | {seconds:.0f} | {memory:.0f} | {ended} | {number} |", flush=True)
            check(folder / "model", output, documents)
    print("\nEvery id is there once, in order; the sampled embeddings equal the model's.")
    subprocess.run([sys.executable, "-c", SEARCH, str(arguments.documents)], check=True)


if __name__ == "__main__":
    main()

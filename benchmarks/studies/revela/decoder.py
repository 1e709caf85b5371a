"""Revela with SmolLM2-135M as the retriever and as the language model, for as many steps as a CPU
core makes in minutes.

    python benchmarks/studies/revela/decoder.py

Texts and pairs are those of revela_text.py. A step is one group of four pairs of neighbouring
chunks; both models get the paper's LoRA of rank 256 at 1e-4. The test asks with 150 section titles
for 600 chunks. InfoNCE gets the pairs of the same groups. A run is a line of decoder.jsonl; runs
that are there are not repeated.

Expected before the runs: the paper makes thousands of steps, so 30 of one group change the ranking
by less than the interval for Revela at either temperature, and InfoNCE gains a few points. At 1e-4
most rows of Sim are one-hot, as for encoders, but not all.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from benchmarks.studies.estimates import paired
from benchmarks.studies.models import QUIET, language_model, train
from benchmarks.studies.revela.texts import WORK, data, group_rows, half_rows
from benchmarks.studies.store import Figures, Store, packed, unpacked
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData

LENGTH = 64  # tokens of a text
TITLES, CHUNKS = 150, 600


@dataclass(frozen=True)
class Cell:
    """A method, "untrained", "revela" or "infonce", and its settings."""

    method: str
    temperature: float = 0.05
    read_weight: float = 1.0
    v_norm: bool = True
    steps: int = 30
    seed: int = 0


CELLS = Store(Path(__file__).with_name("decoder.jsonl"), Cell)
SETTINGS = {
    "the start, untrained": Cell("untrained", steps=0),
    "Revela, τ 1e-4": Cell("revela", 1e-4),
    "InfoNCE, τ .05": Cell("infonce"),
    "Revela, τ .05": Cell("revela"),
    "Revela, τ .05, w = .1, no V-normalisation": Cell("revela", 0.05, 0.1, False),
}


@cache
def task() -> RetrievalData:
    """Titles of the held-out pages, their chunks, and others."""
    whole = data().test
    rng = np.random.default_rng(0)
    asked = {whole.query_ids[i] for i in rng.permutation(len(whole.query_ids))[:TITLES]}
    answers = {document for query in asked for document in whole.relevant[query]}
    others = [document for document in whole.corpus if document not in answers]
    answers |= {others[i] for i in rng.permutation(len(others))[: CHUNKS - len(answers)]}
    return RetrievalData(
        {query: whole.queries[query] for query in asked},
        {document: whole.corpus[document] for document in answers},
        {query: whole.relevant[query] for query in asked},
    )


def measure(cell: Cell) -> Figures:
    torch.manual_seed(cell.seed)
    folder = language_model(WORK)
    model = stm.revela.load_retriever(folder, LENGTH)
    rows = group_rows(data().pairs, cell.seed).select(range(max(cell.steps, 1)))
    began = time.perf_counter()
    logs: list[Figures] = []
    if cell.method == "revela":
        logs = train_revela(cell, model, folder, rows)
    elif cell.method == "infonce":
        model.prompts = {"query": "Query: ", "document": "Passage: "}
        model.add_adapter(stm.revela.lora_config())
        pairs = [pair for row in rows["chunks"] for pair in zip(row[::2], row[1::2], strict=True)]
        loss = stm.CosineRankingLoss(model, temperature=cell.temperature, same_text="exclude")
        how = {"max_steps": cell.steps, "learning_rate": 1e-4, "per_device_train_batch_size": 8}
        prompts = {"anchor": "Query: ", "positive": "Passage: "}
        train(model, loss, half_rows(pairs), cell.seed, prompts=prompts, **how)
    else:
        model.prompts = {"query": "Query: ", "document": "Passage: "}
    seconds = time.perf_counter() - began
    found = stm.encode(model.eval(), task(), "cosine", batch_size=16).search().ndcg
    return {"ndcg": packed(found), "logs": logs, "seconds": round(seconds, 1)}


def train_revela(cell: Cell, model: object, folder: Path, rows: object) -> list[Figures]:
    """Trains, and returns the first and the last line of the log."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"read_weight": cell.read_weight, "v_norm": cell.v_norm, "max_length": LENGTH}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loss = stm.revela.RevelaLoss(model, lm, tokenizer, temperature=cell.temperature, **options)
    arguments = SentenceTransformerTrainingArguments(
        str(WORK / "decoder"),
        max_steps=cell.steps,
        per_device_train_batch_size=1,
        learning_rate=1e-4,
        warmup_steps=0.1,
        use_cpu=True,
        seed=cell.seed,
        **QUIET | {"logging_strategy": "steps", "logging_steps": 5},
    )
    trainer = stm.revela.RevelaTrainer(model=model, args=arguments, loss=loss, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "one_hot" in line]
    names = ("next_token", "one_hot")
    return [{name: round(line[name], 4) for name in names} for line in (lines[0], lines[-1])]


def table() -> list[str]:
    lines = ["| setting | nDCG@10 | over the start | one-hot rows | seconds a step |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    start = CELLS.load(SETTINGS["the start, untrained"])
    for name, cell in SETTINGS.items():
        if (figures := CELLS.load(cell)) is None or start is None:
            continue
        found = unpacked(figures["ndcg"])
        gain = paired([(found - unpacked(start["ndcg"]))[None]]).show() if cell.steps else ""
        hot = " -> ".join(f"{100 * x['one_hot']:.0f} %" for x in figures["logs"])
        each = f"{figures['seconds'] / cell.steps:.0f}" if cell.steps else ""
        lines.append(f"| {name} | {100 * found.mean():.1f} | {gain} | {hot} | {each} |")
    return lines


def main() -> None:
    torch.set_num_threads(1)
    CELLS.run(measure, SETTINGS.values())


if __name__ == "__main__":
    main()

"""The losses of "Beyond the Unit Hypersphere" (arXiv 2602.09229) at reachable scale.

    python benchmarks/studies/magnitude/magnitude.py [--only "static,LM table"]

Does training that keeps the norm of documents (Dot, QNorm) find more than Cosine, and does this
norm then stand for relevance (Cohen's d)? Five bases are trained on WordNet and on docstrings with
the three losses; docs/research/magnitude.md has the protocol. Tests are read once, at all
exponents: "matched" is that of training, "chosen" the one of 0, .25, ..., 1 that is best on the dev
task of the training set. Nothing is chosen on a test.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.debian import cache_folder
from benchmarks.data.search_tasks import TRAIN_SETS, Suite, build_suite
from benchmarks.studies.cells import EXPONENTS, encode, prepare_process
from benchmarks.studies.estimates import Estimate, markdown, paired, show
from benchmarks.studies.models import language_model, minilm, static_model, table_of, train
from benchmarks.studies.store import Figures, Store
from numpy.typing import NDArray
from peft import LoraConfig
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding, Transformer
from tokenizers import Tokenizer

import st_magnitude as stm
from st_magnitude._upstream import has_fast_bf16
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.geometry import adjusted_cohens_d, cohens_d, norms
from st_magnitude.losses.named import LOSSES

# loss to its name and its document exponent
NAMES = {"cosine": ("Cosine", 1.0), "dot": ("Dot", 0.0), "qnorm": ("QNorm", 0.0)}

Cells = dict[tuple[str, str, str], dict[int, Figures]]  # (base, training set, loss) to seeds


# --- bases ----------------------------------------------------------------------------------------


def random_table() -> SentenceTransformer:
    """A table as sentence-transformers initialises it, N(0, 1), at half of wordllama's width."""
    table = StaticEmbedding(static_model()[0].tokenizer, embedding_dim=128)
    return SentenceTransformer(modules=[table], device="cpu")


def lm_table() -> SentenceTransformer:
    """The token embeddings of SmolLM2-135M: learned by a language model, never contrastively."""
    folder = language_model(cache_folder())
    with safe_open(folder / "model.safetensors", "pt") as weights:
        table = weights.get_tensor("model.embed_tokens.weight").float()
    return table_of(Tokenizer.from_file(str(folder / "tokenizer.json")), table)


def decoder() -> SentenceTransformer:
    """SmolLM2-135M-Instruct with mean pooling and LoRA on queries and values."""
    # without its chat template, which would take 26 of the 32 tokens
    options = {"max_seq_length": 32, "processor_kwargs": {"chat_template": None}}
    transformer = Transformer(str(language_model(cache_folder())), **options)
    tokenizer = transformer.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    pooling = Pooling(transformer.get_embedding_dimension(), "mean")
    model = SentenceTransformer(modules=[transformer, pooling], device="cpu")
    model.add_adapter(LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
    return model


@dataclass(frozen=True)
class Base:
    load: Callable[[], SentenceTransformer]
    how: dict[str, Any]
    sizes: tuple[int, int] | None = None  # queries and documents of a test; default: all


def how(steps: int, batch: int, rate: float, bf16: bool = False) -> dict[str, Any]:
    size = {"max_steps": steps, "per_device_train_batch_size": batch}
    return {**size, "learning_rate": rate, "bf16": bf16}


BF16 = has_fast_bf16()
BASES = {
    "static": Base(static_model, how(200, 128, 3e-2)),
    "LM table": Base(lm_table, how(100, 128, 1e-2)),
    "random": Base(random_table, how(500, 128, 1e-1)),
    "MiniLM": Base(minilm, how(40, 32, 5e-5, BF16), sizes=(200, 400)),
    "decoder": Base(decoder, how(40, 24, 3e-3, BF16), sizes=(100, 300)),
}


# --- measuring ------------------------------------------------------------------------------------


def separations(encoded: EncodedTask, words: NDArray[np.float64]) -> dict[str, float]:
    """Cohen's d of the norms of documents that answer some query against the others.

    Also with the logarithm of the text length regressed out; empty if one side has under two.
    """
    magnitudes, answers = norms(encoded.documents), encoded.data.is_relevant
    if min(answers.sum(), (~answers).sum()) < 2:
        return {}
    return {
        "d": cohens_d(magnitudes[answers], magnitudes[~answers]),
        "d, length out": adjusted_cohens_d(magnitudes, np.log(words), answers),
    }


def read(model: SentenceTransformer, tasks: dict[str, RetrievalData]) -> dict[str, Figures]:
    """nDCG@10 of every query by document exponent, and d, of all tasks."""
    found = {}
    for name, task in tasks.items():
        encoded = encode(model, task)
        words = np.array([float(len(task.corpus[x].split())) for x in task.document_ids])
        ndcg = {str(x): ranking.ndcg for x, ranking in encoded.sweep(EXPONENTS).items()}
        per_query = {x: [round(float(v), 5) for v in values] for x, values in ndcg.items()}
        found[name] = {"per query": per_query, **separations(encoded, words)}
    return found


def measure(base: Base, loss: str, rows: str, seed: int, suite: Suite) -> Figures:
    """All figures of one model, or of one before training."""
    torch.manual_seed(seed)
    model = stm.strip_normalize(base.load())
    if rows != "none":
        objective = LOSSES[loss].load()(model, same_text="exclude")
        train(model, objective, suite.train[rows], seed, **base.how)
    model.eval()
    slow = base.load is decoder and base.how["bf16"]
    with torch.autocast("cpu", torch.bfloat16, enabled=slow):
        figures: Figures = {"tasks": read(model, suite.tests)}
        if rows != "none":
            by_exponent = read(model, {"dev": suite.dev[rows]})["dev"]["per query"]
            figures["chosen"] = max((np.mean(by_exponent[str(x)]), x) for x in EXPONENTS)[1]
    return figures


@dataclass(frozen=True)
class Cell:
    """A model; of rows "none", one before training."""

    base: str
    rows: str
    loss: str
    seed: int


CELLS = Store(Path(__file__).with_name("cells.jsonl"), Cell)


def plan(names: Iterable[str]) -> list[Cell]:
    cells = []
    for name in names:
        for seed in range(3):
            cells += [Cell(name, rows, loss, seed) for rows, loss in product(TRAIN_SETS, NAMES)]
            if seed == 0 or name == "random":
                cells.append(Cell(name, "none", "cosine", seed))
    return cells


def run_missing(names: Iterable[str]) -> Cells:
    """All cells; measures those that are not stored yet."""
    full = cache(build_suite)

    def measured(cell: Cell) -> Figures:
        base = BASES[cell.base]
        suite = full().shrunk(*base.sizes) if base.sizes else full()
        return measure(base, cell.loss, cell.rows, cell.seed, suite)

    CELLS.run(measured, plan(names))
    found: Cells = {}
    for x in plan(names):
        found.setdefault((x.base, x.rows, x.loss), {})[x.seed] = CELLS.found[x]
    return found


# --- tables ---------------------------------------------------------------------------------------


def per_query(
    runs: dict[int, Figures], tasks: Iterable[str], exponent: float | None
) -> dict[int, list[NDArray[np.float64]]]:
    """nDCG@10 of every query by seed, one array a task; at the chosen exponent without one."""
    found = {}
    for seed, x in runs.items():
        key = str(x["chosen"] if exponent is None else exponent)
        found[seed] = [np.array(x["tasks"][task]["per query"][key]) for task in tasks]
    return found


def gain(cells: Cells, base: str, rows: str, loss: str, where: str, scoring: str) -> Estimate:
    """nDCG@10 over Cosine in the domain of training or in the others."""
    runs, plain = (cells[base, rows, name] for name in (loss, "cosine"))
    tasks = [task for task in runs[0]["tasks"] if (task == rows) == (where == "in domain")]
    after = per_query(runs, tasks, NAMES[loss][1] if scoring == "matched" else None)
    before = per_query(plain, tasks, 1.0)
    seeds = sorted(after.keys() & before.keys())
    differences = [
        np.array([after[seed][i] - before[seed][i] for seed in seeds]) for i in range(len(tasks))
    ]
    return paired(differences)


def gain_table(cells: Cells, names: Iterable[str]) -> list[str]:
    """Gains over Cosine in points."""
    columns = list(product(("dot", "qnorm"), ("matched", "chosen")))
    lines = []
    for base, rows, where in product(names, TRAIN_SETS, ("in domain", "out")):
        gains = [gain(cells, base, rows, loss, where, scoring) for loss, scoring in columns]
        lines.append([f"{base}, {rows}", where, *map(show, gains)])
    head = [f"{NAMES[loss][0]}, {scoring}" for loss, scoring in columns]
    return markdown(["base, trained on", "tasks", *head], lines, "ll")


def boilerplate_table(cells: Cells, names: Iterable[str]) -> list[str]:
    """d of norms on docstrings, answers against boilerplate, and with text length out."""
    lines = []
    for base, rows in product(names, TRAIN_SETS):
        row = [f"{base}, {rows}"]
        for of, loss in (("none", "cosine"), *((rows, loss) for loss in NAMES)):
            figures = [x["tasks"]["docstrings"] for x in cells[base, of, loss].values()]
            plain, less = (np.mean([x[key] for x in figures]) for key in ("d", "d, length out"))
            row.append(f"{plain:+.2f} ({less:+.2f})")
        lines.append(row)
    return markdown(["base, trained on", "PT", *(name for name, _ in NAMES.values())], lines)


def decoder_table() -> list[str]:
    """The gains of the base whose cells are in the repository."""
    return gain_table(run_missing(["decoder"]), ["decoder"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(BASES), help="bases; default: %(default)s")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := set(names) - set(BASES):
        parser.error(f"--only does not know {', '.join(sorted(unknown))}.")
    prepare_process()
    cells = run_missing(names)
    print("\n".join([*gain_table(cells, names), "", *boilerplate_table(cells, names)]))


if __name__ == "__main__":
    main()

"""The magnitude study: the tables of "Beyond the Unit Hypersphere" (arXiv 2602.09229) at reachable scale.

    python benchmarks/magnitude.py [--quick] [--only "static,LM table"] [--output FOLDER]
    python benchmarks/magnitude.py --tables      prints what is stored, and what is missing
    python benchmarks/magnitude.py --choose      the small grid that the settings below come from; with --loss qnorm
                                                 what another loss makes of it

Question: does training that keeps the norm (Dot, QNorm, DNorm, Learnable) find more than Cosine, does document norm
then stand for relevance (Cohen's d), and do gains follow d, as the paper says of BERT retrievers on MS MARCO?

Protocol. Five bases, each trained on WordNet and on docstrings (search_tasks.py) with the five losses:

- static: wordllama's table of token vectors, trained contrastively by its authors; LM table: the input embeddings of
  SmolLM2-135M, pretrained but never contrastively, as the paper's RetroMAE; random: a table as sentence-transformers
  initialises it, the case of the paper's Table 2; 3 seeds each;
- MiniLM: all-MiniLM-L6-v2 with its Normalize stripped, the case of the paper's E5; 3 seeds;
- decoder: SmolLM2-135M, mean pooling, LoRA; 1 seed, fewer and smaller tests.

Learning rates were chosen once, under Cosine, on the dev tasks (--choose), and are the same for all losses; steps and
batches are what can be afforded. A seed is an order of the rows (for random also the initialisation); the data and the
queries are the same for every seed. Tests are read once, at all exponents; "matched" is the exponent of training, "at
the exponent of dev" the one of 0, .25, ..., 1 that is best on the dev task of the training set. Nothing is chosen on a
test task.

Statistics. Gains over Cosine are paired by query and seed. [low, high] is the wider of two 95 % intervals: a bootstrap
over the queries of each task (of the mean over seeds), and t over seeds where there are three. Means of d, which is one
number a data set, have t intervals over data sets. A sign agrees or disagrees with the paper's where the interval
excludes 0, and is open where it does not.

Expected before measuring: within the domain all losses are near Cosine; scored as trained, losses with norms lose out
of domain where the base was pretrained with Normalize or not at all, and recover at the exponent of dev; d is positive
on docstrings after training on docstrings, whose explicit negatives are never relevant, and nowhere else; so gains
follow d there only. One-sided similarities fail on scored pairs at the scale .01, not at a measured one.

Left out: Table 4, the end-to-end reading, which needs a reader model; Table 6 (CLIP) is clip.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lexicons import default_cache
from magnitude_tables import Cell, Cells, at, pictures, report, write_csv
from norms import regression
from numpy.typing import NDArray
from safetensors import safe_open
from search_tasks import SEED, TRAIN_SETS, Suite, build_suite, shrink
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding, Transformer
from sklearn.cluster import MiniBatchKMeans
from sklearn.metrics import v_measure_score
from temperature import minilm, static_model, train
from tokenizers import Tokenizer
from torch import Tensor
from transformers import TrainerCallback

import st_magnitude as stm
from st_magnitude.data.beir import DataError
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.finetune.run import LOSSES
from st_magnitude.geometry import (
    adjusted_cohens_d,
    coefficient_of_variation,
    cohens_d,
    norms,
    spearman,
)
from st_magnitude.losses import LearnableNormLoss
from st_magnitude.revela.trainer import add_lora, lora_config
from st_magnitude.surgery.raw import encode_raw
from st_magnitude.training.run_folder import has_fast_bf16

EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
MATCHED = {"cosine": 1.0, "dot": 0.0, "qnorm": 0.0, "dnorm": 1.0, "pretrained": 1.0}  # document exponent


# --- bases ------------------------------------------------------------------------------------------------------------


def random_table(_cache: Path) -> SentenceTransformer:
    """A table as sentence-transformers initialises it, N(0, 1), for wordllama's tokens, at half of its width."""
    tokenizer = static_model()[0].tokenizer
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=128)], device="cpu")


def lm_table(cache: Path) -> SentenceTransformer:
    """The token embeddings of SmolLM2-135M: learned by a language model, never contrastively."""
    from revela import language_model

    folder = language_model(cache)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        table = weights.get_tensor("model.embed_tokens.weight").float()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=table)], device="cpu")


def decoder(cache: Path) -> SentenceTransformer:
    """SmolLM2-135M-Instruct with mean pooling and LoRA on queries and values."""
    from revela import language_model

    transformer = Transformer(str(language_model(cache)), max_seq_length=32)
    transformer.tokenizer.pad_token = transformer.tokenizer.pad_token or transformer.tokenizer.eos_token
    model = SentenceTransformer(
        modules=[transformer, Pooling(transformer.get_embedding_dimension(), "mean")], device="cpu"
    )
    add_lora(model, lora_config(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]))
    return model


@dataclass(frozen=True)
class Base:
    load: Callable[[Path], SentenceTransformer]
    how: dict[str, Any]
    seeds: int
    rates: tuple[float, ...]  # the grid of --choose
    sizes: tuple[int, int] | None = None  # queries and documents of a test; default: all
    slow: bool = False  # evaluated under bf16 autocast where the hardware has it, and watched less


def how(steps: int, batch: int, rate: float, bf16: bool = False) -> dict[str, Any]:
    return {"max_steps": steps, "per_device_train_batch_size": batch, "learning_rate": rate, "bf16": bf16}


BF16 = has_fast_bf16()
BASES = {
    "static": Base(lambda _: static_model(), how(200, 128, 3e-2), 3, (1e-3, 3e-3, 1e-2, 3e-2)),
    "LM table": Base(lm_table, how(100, 128, 1e-2), 3, (1e-3, 3e-3, 1e-2, 3e-2)),
    "random": Base(random_table, how(500, 128, 1e-1), 3, (1e-2, 3e-2, 1e-1, 3e-1)),
    "MiniLM": Base(lambda _: minilm(), how(40, 32, 5e-5, BF16), 3, (2e-5, 5e-5, 1e-4), (200, 400)),
    "decoder": Base(decoder, how(40, 24, 3e-3, BF16), 1, (3e-4, 1e-3, 3e-3, 1e-2), (100, 300), True),
}


# --- measuring --------------------------------------------------------------------------------------------------------


def embed(model: SentenceTransformer, texts: Iterable[str], role: str) -> dict[str, Tensor]:
    """Raw embedding of every text."""
    unique = list(dict.fromkeys(texts))
    return dict(
        zip(
            unique,
            encode_raw(model, unique, role, keep_normalize=True, batch_size=64, show_progress_bar=False),
            strict=True,
        )
    )


def ranked(encoded: EncodedTask, exponent: float) -> dict[str, NDArray[np.float64]]:
    """nDCG@10, Recall@100 and MRR@10 of every query."""
    top = encoded.top(stm.Similarity(1.0, exponent), 100)
    hits = encoded.hits(top)
    return {
        "ndcg@10": encoded.ndcg(top),
        "recall@100": hits.sum(axis=1) / [len(columns) for columns in encoded.columns],
        "mrr@10": hits[:, :10].any(axis=1) / (hits[:, :10].argmax(axis=1) + 1),
    }


def separations(encoded: EncodedTask, words: NDArray[np.float64]) -> dict[str, float | None]:
    """Cohen's d of document norms by pairing, and with the logarithm of the text length regressed out.

    "corpus": relevant to some query against never relevant; "hard": the relevant documents of each query against its
    ten nearest other documents by cosine; "pairs": over all pairs, if documents answer different numbers of queries.
    """
    magnitudes, degrees = norms(encoded.documents), encoded.degrees
    top = encoded.top(stm.COSINE, 10 + max(len(columns) for columns in encoded.columns)).numpy()
    others = np.argsort(encoded.hits(torch.from_numpy(top)), axis=1, kind="stable")[:, :10]
    near = np.bincount(np.take_along_axis(top, others, axis=1).ravel(), minlength=len(magnitudes))
    counts = {"corpus": (degrees > 0, degrees == 0), "hard": (degrees, near)}
    if np.ptp(degrees):
        counts["pairs"] = (degrees, len(encoded.queries) - degrees)
    found: dict[str, float | None] = dict.fromkeys(("corpus", "hard", "pairs"))
    for pairing, (relevant, irrelevant) in counts.items():
        if min(relevant.sum(), irrelevant.sum()) < 2:
            continue
        a, b = (np.repeat(np.arange(len(magnitudes)), number) for number in (relevant, irrelevant))
        rows, is_relevant = np.append(a, b), np.arange(len(a) + len(b)) < len(a)
        found[pairing] = cohens_d(magnitudes[a], magnitudes[b])
        found[f"{pairing}, length out"] = adjusted_cohens_d(magnitudes[rows], np.log(words[rows]), is_relevant)
    return found


def read(model: SentenceTransformer, tasks: dict[str, RetrievalData], exponents: Sequence[float]) -> dict[str, Cell]:
    """All figures of all tasks from one encoding."""
    q = embed(model, (text for task in tasks.values() for text in task.queries.values()), "query")
    d = embed(model, (text for task in tasks.values() for text in task.corpus.values()), "document")
    found = {}
    for name, task in tasks.items():
        judged = task
        encoded = EncodedTask(
            torch.stack([q[task.queries[query]] for query in judged.query_ids]),
            torch.stack([d[task.corpus[document]] for document in judged.document_ids]),
            judged.columns,
        )
        words = np.array([len(task.corpus[document].split()) for document in judged.document_ids], dtype=np.float64)
        by_exponent = [ranked(encoded, exponent) for exponent in exponents]
        magnitudes = {"query": norms(encoded.queries), "document": norms(encoded.documents)}
        found[name] = {
            "exponents": list(exponents),
            "per query": [[round(float(v), 5) for v in metrics["ndcg@10"]] for metrics in by_exponent],
            **{metric: [float(m[metric].mean()) for m in by_exponent] for metric in by_exponent[0]},
            "d": separations(encoded, words),
            **{f"{role} cv": coefficient_of_variation(values) for role, values in magnitudes.items()},
            **{f"{role} norm": float(values.mean()) for role, values in magnitudes.items()},
            "length spearman": spearman(magnitudes["document"], words),
        }
    return found


def v_measures(model: SentenceTransformer, texts: list[str], labels: list[str]) -> dict[str, float]:
    """k-means of directions and of raw embeddings against the labels, mean of three runs."""
    embedded = embed(model, texts, "document")
    raw = torch.stack([embedded[text] for text in texts])
    points = {"directions": stm.COSINE.document(raw).numpy(), "raw": raw.numpy()}
    found = {}
    for name, x in points.items():
        guesses = [MiniBatchKMeans(len(set(labels)), random_state=i, n_init=1).fit_predict(x) for i in range(3)]
        found[f"v-measure, {name}"] = float(np.mean([v_measure_score(labels, guess) for guess in guesses]))
    return found


class Watch(TrainerCallback):
    """Dot and cosine nDCG@10 of a small dev task at a few steps, the exponents at every one."""

    def __init__(self, model: SentenceTransformer, task: RetrievalData, steps: Sequence[int]) -> None:
        self.model, self.task, self.at = model, task, set(steps)
        self.gaps: list[Cell] = []
        self.gammas: list[tuple[float, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        closing = self.model[-1]
        if hasattr(closing, "gamma_query"):
            self.gammas.append((closing.gamma_query, closing.gamma_document))
        if state.global_step in self.at:
            dot, cosine = read(self.model, {"dev": self.task}, (0.0, 1.0))["dev"]["ndcg@10"]
            self.gaps.append({"step": state.global_step, "dot": dot, "cosine": cosine})
            self.model.train()


def trained(base: Base, loss: str, rows: Any, seed: int, cache: Path, watched: RetrievalData | None) -> Any:
    """A fresh model, trained, and what was seen on the way."""
    torch.manual_seed(seed)
    model = stm.strip_normalize(base.load(cache))
    settings = dict(base.how)
    shares = (0, 0.5, 1) if base.slow else (0, 0.25, 0.5, 0.75, 1)
    steps = [round(share * settings["max_steps"]) for share in shares]
    watch = [] if watched is None else [Watch(model, watched, steps)]
    if loss != "pretrained":
        objective = LOSSES[loss](model)
        if loss == "learnable":
            settings["learning_rate_mapping"] = LearnableNormLoss.learning_rate_mapping()
        train(model, objective, rows, seed, watch, **settings)
    return model.eval(), watch


def measure(base: Base, loss: str, train_set: str, seed: int, suite: Suite, cache: Path) -> Cell:
    """All figures of one trained model; of a pretrained one with the dev tasks of both training sets."""
    began = time.perf_counter()
    sets = TRAIN_SETS if loss == "pretrained" else (train_set,)
    size = (40, 100) if base.slow else (80, 240)
    watched = None if loss == "pretrained" else shrink(suite.dev[train_set], *size, SEED)
    model, watch = trained(base, loss, suite.train.get(train_set), seed, cache, watched)
    middle = time.perf_counter()
    matched = model[-1].gamma_document if loss == "learnable" else MATCHED[loss]
    exponents = sorted({*EXPONENTS, matched})
    with torch.autocast("cpu", torch.bfloat16, enabled=base.slow and base.how["bf16"]):
        dev = read(model, {name: suite.dev[name] for name in sets}, EXPONENTS)
        tasks = read(model, suite.tests, exponents)
        clusters = v_measures(model, *suite.clustering)
    return {
        "matched": matched,
        "chosen": {name: max(zip(x["ndcg@10"], EXPONENTS, strict=True))[1] for name, x in dev.items()},
        "dev": {name: x["ndcg@10"] for name, x in dev.items()},
        "tasks": tasks,
        "clustering": clusters,
        "gaps": [gap for w in watch for gap in w.gaps],
        "gammas": [gammas for w in watch for gammas in w.gammas],
        "seconds": {"training": middle - began, "evaluation": time.perf_counter() - middle},
    }


# --- what is stored ---------------------------------------------------------------------------------------------------


def plan(bases: Iterable[str], quick: bool) -> list[tuple[str, str, str, int]]:
    """(base, training set, loss, seed) of all cells, one seed after the other."""
    cells = []
    for base in bases:
        for seed in range(BASES[base].seeds if not quick else 2 if base == "static" else 1):
            if seed == 0 or base == "random":
                cells.append((base, "none", "pretrained", seed))
            cells += [(base, rows, loss, seed) for rows in TRAIN_SETS for loss in LOSSES]
    return cells


def path_of(folder: Path, base: str, rows: str, loss: str, seed: int) -> Path:
    return folder / "cells" / f"{base}-{rows}-{loss}-{seed}.json"


def settings_of(base: Base) -> Cell:
    """What a stored cell must agree with; a change of the hardware's bf16 does not make it stale."""
    return json.loads(json.dumps({**{k: v for k, v in base.how.items() if k != "bf16"}, "sizes": base.sizes}))


def store(path: Path, value: Any) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def stored(path: Path, base: Base) -> Cell | None:
    """The stored cell, or None if it is missing or was measured with other settings."""
    if not path.is_file():
        return None
    cell: Cell = json.loads(path.read_text(encoding="utf-8"))
    return cell if cell["settings"] == settings_of(base) else None


def run(cells: list[tuple[str, str, str, int]], folder: Path, cache: Path, bases: dict[str, Base]) -> None:
    """Measure what is not there yet."""
    todo = [cell for cell in cells if stored(path_of(folder, *cell), bases[cell[0]]) is None]
    if not todo:
        return
    began = time.perf_counter()
    full = build_suite(cache)
    for i, (name, rows, loss, seed) in enumerate(todo, 1):
        base = bases[name]
        suite = full.shrunk(*base.sizes) if base.sizes else full
        cell = measure(base, loss, rows, seed, suite, cache)
        key = {"base": name, "train": rows, "loss": loss, "seed": seed, "settings": settings_of(base)}
        store(path_of(folder, name, rows, loss, seed), key | cell)
        means = ", ".join(f"{task} {at(x, cell['matched']):.3f}" for task, x in cell["tasks"].items())
        spent = " + ".join(f"{seconds:.0f}" for seconds in cell["seconds"].values())
        elapsed = time.perf_counter() - began
        print(f"[{elapsed:5.0f} s, {i}/{len(todo)}] {name}, {rows}, {loss}, {seed} ({spent} s): {means}", flush=True)


def load_cells(folder: Path, cells: list[tuple[str, str, str, int]], bases: dict[str, Base]) -> tuple[Cells, list[str]]:
    """What is there, and the names of what is missing."""
    found: Cells = defaultdict(list)
    missing = []
    for name, rows, loss, seed in cells:
        cell = stored(path_of(folder, name, rows, loss, seed), bases[name])
        if cell is None:
            missing.append(f"{name}/{rows}/{loss}/{seed}")
        else:
            found[name, rows, loss].append(cell)
    return dict(found), missing


def symmetric(folder: Path, quick: bool, cache: Path) -> None:
    """Table 5: scored pairs at two scales (norms.py), and what clustering the same models allow."""
    if (path := folder / "symmetric.json").is_file():
        return
    texts, labels = build_suite(cache).clustering
    found = regression(quick, lambda model: v_measures(model, texts, labels))
    store(path, found)


# --- settings ---------------------------------------------------------------------------------------------------------


def choose(names: Iterable[str], loss: str, cache: Path) -> None:
    """nDCG@10 on the dev tasks by learning rate, matched and by cosine. The settings rest on that of Cosine alone."""
    suite = build_suite(cache)
    columns = [f"dev {rows}, {how}" for rows in TRAIN_SETS for how in ("matched", "by cosine")]
    print(f"| base, {loss} | learning rate | " + " | ".join(columns) + " | mean, matched | |")
    print("| --- | ---: |" + " ---: |" * (len(columns) + 2))
    for name in names:
        for rate in BASES[name].rates:
            base = replace(BASES[name], how=BASES[name].how | {"learning_rate": rate})
            small = suite.shrunk(*base.sizes) if base.sizes else suite
            found, began = [], time.perf_counter()
            for rows in TRAIN_SETS:
                model, _ = trained(base, loss, suite.train[rows], 0, cache, None)
                found += read(model, {"dev": small.dev[rows]}, (MATCHED[loss], 1.0))["dev"]["ndcg@10"]
            shown = " | ".join(f"{value:.3f}" for value in (*found, np.mean(found[::2])))
            print(f"| {name} | {rate:g} | {shown} | {time.perf_counter() - began:.0f} s |", flush=True)


def brief(base: Base) -> Base:
    """For --quick: a quarter of the steps, small tests."""
    steps = max(4, base.how["max_steps"] // 4)
    return replace(base, how=base.how | {"max_steps": steps}, sizes=(base.sizes and (30, 100)) or (100, 300))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of everything, without the decoder unless named")
    parser.add_argument("--only", help=f"of {','.join([*BASES, 'symmetric'])}; default: all")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    parser.add_argument("--choose", action="store_true", help="print the grid of learning rates, and nothing else")
    parser.add_argument("--loss", default="cosine", choices=("cosine", "dot", "qnorm", "dnorm"), help="of --choose")
    parser.add_argument("--output", type=Path, default=Path("runs/magnitude"), help="where the figures are kept")
    parser.add_argument("--cache", type=Path, default=None, help="where the data is unpacked")
    arguments = parser.parse_args()
    parts = [*BASES, "symmetric"]
    if arguments.quick:
        parts.remove("decoder")
    parts = arguments.only.split(",") if arguments.only else parts
    if unknown := set(parts) - {*BASES, "symmetric"}:
        parser.error(f"--only knows {', '.join([*BASES, 'symmetric'])}, not {', '.join(sorted(unknown))}.")
    for name in ("st_magnitude", "sentence_transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)  # one-sided similarities and collapse are here on purpose
    cache, names = default_cache(arguments.cache), [part for part in parts if part in BASES]
    folder = arguments.output / "quick" if arguments.quick else arguments.output
    bases = {name: brief(base) for name, base in BASES.items()} if arguments.quick else BASES
    cells = plan(names, arguments.quick)
    try:
        if arguments.choose:
            choose(names, arguments.loss, cache)
            return
        if not arguments.tables:
            run(cells, folder, cache, bases)
            if "symmetric" in parts:
                symmetric(folder, arguments.quick, cache)
    except DataError as error:
        parser.exit(1, f"{error}\n")
    found, missing = load_cells(folder, cells, bases)
    scored = folder / "symmetric.json"
    if "symmetric" in parts and not scored.is_file():
        missing.append("symmetric")
    text = report(found, json.loads(scored.read_text()) if scored.is_file() else None, missing)
    print(text)
    if found:
        (folder / "tables.md").write_text(text + "\n", encoding="utf-8")
        write_csv(found, folder / "results.csv")
        pictures(found, folder)


if __name__ == "__main__":
    main()

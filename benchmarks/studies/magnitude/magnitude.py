"""The tables of "Beyond the Unit Hypersphere" (arXiv 2602.09229) at reachable scale.

    python benchmarks/studies/magnitude/magnitude.py [--only "static,LM table"] [--output FOLDER]
    python benchmarks/studies/magnitude/magnitude.py --tables    prints what is stored
    python benchmarks/studies/magnitude/magnitude.py --choose    the grid of learning rates

Does training that keeps the norm (Dot, QNorm, DNorm, Learnable) find more than Cosine, does the
document norm then stand for relevance (Cohen's d), and do gains follow d, as the paper says of BERT
retrievers on MS MARCO? Five bases are trained on WordNet and on docstrings with the five losses;
docs/research/magnitude.md has the protocol. Tests are read once, at all exponents: "matched" is
that of training, "chosen" the one of 0, .25, ..., 1 that is best on the dev task of the training
set. Nothing is chosen on a test. --choose --loss qnorm prints what another loss makes of the grid.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.lexicons import default_cache
from benchmarks.data.search_tasks import SEED, TRAIN_SETS, Suite, build_suite, shrink
from benchmarks.studies.cells import prepare_process, store
from benchmarks.studies.cells import read as read_json
from benchmarks.studies.magnitude.report import Cell, Cells, picture, report
from benchmarks.studies.models import language_model, minilm, static_model, table_of, train
from benchmarks.studies.norms.scored_pairs import regression
from numpy.typing import NDArray
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding, Transformer
from sklearn.cluster import MiniBatchKMeans
from sklearn.metrics import v_measure_score
from tokenizers import Tokenizer
from torch import Tensor

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.finetune.run import LOSSES
from st_magnitude.geometry import adjusted_cohens_d, coefficient_of_variation, cohens_d, norms
from st_magnitude.losses import LearnableNormLoss
from st_magnitude.revela.trainer import add_lora, lora_config
from st_magnitude.surgery.raw import encode_raw
from st_magnitude.training.run_folder import has_fast_bf16

EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
# document exponent
MATCHED = {"cosine": 1.0, "dot": 0.0, "qnorm": 0.0, "dnorm": 1.0, "pretrained": 1.0}


# --- bases ----------------------------------------------------------------------------------------


def random_table(cache: Path) -> SentenceTransformer:
    """A table as sentence-transformers initialises it, N(0, 1), at half of wordllama's width."""
    table = StaticEmbedding(static_model()[0].tokenizer, embedding_dim=128)
    return SentenceTransformer(modules=[table], device="cpu")


def lm_table(cache: Path) -> SentenceTransformer:
    """The token embeddings of SmolLM2-135M: learned by a language model, never contrastively."""
    folder = language_model(cache)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        table = weights.get_tensor("model.embed_tokens.weight").float()
    return table_of(Tokenizer.from_file(str(folder / "tokenizer.json")), table)


def decoder(cache: Path) -> SentenceTransformer:
    """SmolLM2-135M-Instruct with mean pooling and LoRA on queries and values."""
    transformer = Transformer(str(language_model(cache)), max_seq_length=32)
    tokenizer = transformer.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    pooling = Pooling(transformer.get_embedding_dimension(), "mean")
    model = SentenceTransformer(modules=[transformer, pooling], device="cpu")
    targets = ["q_proj", "v_proj"]
    add_lora(model, lora_config(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=targets))
    return model


@dataclass(frozen=True)
class Base:
    load: Callable[[Path], SentenceTransformer]
    how: dict[str, Any]
    seeds: int
    rates: tuple[float, ...]  # the grid of --choose
    sizes: tuple[int, int] | None = None  # queries and documents of a test; default: all
    slow: bool = False  # evaluated under bf16 autocast where the hardware has it


def how(steps: int, batch: int, rate: float, bf16: bool = False) -> dict[str, Any]:
    size = {"max_steps": steps, "per_device_train_batch_size": batch}
    return {**size, "learning_rate": rate, "bf16": bf16}


BF16 = has_fast_bf16()
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
BASES = {
    "static": Base(lambda _: static_model(), how(200, 128, 3e-2), 3, RATES),
    "LM table": Base(lm_table, how(100, 128, 1e-2), 3, RATES),
    "random": Base(random_table, how(500, 128, 1e-1), 3, (1e-2, 3e-2, 1e-1, 3e-1)),
    "MiniLM": Base(lambda _: minilm(), how(40, 32, 5e-5, BF16), 3, (2e-5, 5e-5, 1e-4), (200, 400)),
    "decoder": Base(
        decoder, how(40, 24, 3e-3, BF16), 1, (3e-4, 1e-3, 3e-3, 1e-2), (100, 300), slow=True
    ),
}


# --- measuring ------------------------------------------------------------------------------------


def embed(model: SentenceTransformer, texts: Iterable[str], role: str) -> dict[str, Tensor]:
    """Raw embedding of every text."""
    unique = list(dict.fromkeys(texts))
    options: Any = {"keep_normalize": True, "batch_size": 64, "show_progress_bar": False}
    return dict(zip(unique, encode_raw(model, unique, role, **options), strict=True))


def separations(encoded: EncodedTask, words: NDArray[np.float64]) -> dict[str, float]:
    """Cohen's d of the norms of documents that answer some query against the others.

    Also with the logarithm of the text length regressed out; empty if one side has under two.
    """
    magnitudes, answers = norms(encoded.documents), encoded.degrees > 0
    if min(answers.sum(), (~answers).sum()) < 2:
        return {}
    return {
        "d": cohens_d(magnitudes[answers], magnitudes[~answers]),
        "d, length out": adjusted_cohens_d(magnitudes, np.log(words), answers),
    }


def read(
    model: SentenceTransformer, tasks: dict[str, RetrievalData], exponents: Sequence[float]
) -> dict[str, Cell]:
    """All figures of all tasks from one encoding."""
    q = embed(model, (text for task in tasks.values() for text in task.queries.values()), "query")
    d = embed(model, (text for task in tasks.values() for text in task.corpus.values()), "document")
    found = {}
    for name, task in tasks.items():
        encoded = EncodedTask(
            torch.stack([q[task.queries[query]] for query in task.query_ids]),
            torch.stack([d[task.corpus[document]] for document in task.document_ids]),
            task.columns,
        )
        words = np.array([float(len(task.corpus[x].split())) for x in task.document_ids])
        tops = encoded.tops([stm.Similarity(1.0, exponent) for exponent in exponents])
        ndcg = [encoded.ndcg(top) for top in tops]
        found[name] = {
            "exponents": list(exponents),
            "per query": [[round(float(v), 5) for v in values] for values in ndcg],
            "ndcg@10": [float(values.mean()) for values in ndcg],
            "query cv": coefficient_of_variation(norms(encoded.queries)),
            **separations(encoded, words),
        }
    return found


def v_measures(model: SentenceTransformer, texts: list[str], labels: list[str]) -> dict[str, float]:
    """k-means of directions and of raw embeddings against the labels, mean of three runs."""
    embedded = embed(model, texts, "document")
    raw = torch.stack([embedded[text] for text in texts])
    found = {}
    for name, x in {"directions": stm.COSINE.document(raw), "raw": raw}.items():
        means = [MiniBatchKMeans(len(set(labels)), random_state=i, n_init=1) for i in range(3)]
        scores = [v_measure_score(labels, mean.fit_predict(x.numpy())) for mean in means]
        found[f"v-measure, {name}"] = float(np.mean(scores))
    return found


def trained(base: Base, loss: str, rows: Any, seed: int, cache: Path) -> SentenceTransformer:
    torch.manual_seed(seed)
    model = stm.strip_normalize(base.load(cache))
    settings = dict(base.how)
    if loss != "pretrained":
        objective = LOSSES[loss](model)
        if loss == "learnable":
            settings["learning_rate_mapping"] = LearnableNormLoss.learning_rate_mapping()
        train(model, objective, rows, seed, **settings)
    return model.eval()


def measure(base: Base, loss: str, rows: str, seed: int, suite: Suite, cache: Path) -> Cell:
    """All figures of one model; of a pretrained one with the dev tasks of both training sets."""
    began = time.perf_counter()
    is_trained = loss != "pretrained"
    model = trained(base, loss, suite.train.get(rows), seed, cache)
    gammas = (model[-1].gamma_query, model[-1].gamma_document) if loss == "learnable" else None
    matched = gammas[1] if gammas else MATCHED[loss]
    sets = (rows,) if is_trained else TRAIN_SETS
    gap = None
    if is_trained:
        watched = shrink(suite.dev[rows], *((40, 100) if base.slow else (80, 240)), SEED)
        by_dot, by_cosine = read(model, {"dev": watched}, (0.0, 1.0))["dev"]["ndcg@10"]
        gap = by_dot - by_cosine
    with torch.autocast("cpu", torch.bfloat16, enabled=base.slow and base.how["bf16"]):
        dev = read(model, {name: suite.dev[name] for name in sets}, EXPONENTS)
        tasks = read(model, suite.tests, sorted({*EXPONENTS, matched}))
    scores = {name: zip(x["ndcg@10"], EXPONENTS, strict=True) for name, x in dev.items()}
    return {
        "matched": matched,
        "chosen": {name: max(pairs)[1] for name, pairs in scores.items()},
        "tasks": tasks,
        "gap": gap,
        "gammas": gammas,
        "seconds": time.perf_counter() - began,
    }


# --- what is stored -------------------------------------------------------------------------------


def plan(bases: Iterable[str]) -> list[tuple[str, str, str, int]]:
    """(base, training set, loss, seed) of all cells, one seed after the other."""
    cells = []
    for base in bases:
        for seed in range(BASES[base].seeds):
            if seed == 0 or base == "random":
                cells.append((base, "none", "pretrained", seed))
            cells += [(base, rows, loss, seed) for rows in TRAIN_SETS for loss in LOSSES]
    return cells


def path_of(folder: Path, base: str, rows: str, loss: str, seed: int) -> Path:
    return folder / "cells" / f"{base}-{rows}-{loss}-{seed}.json"


def run(cells: list[tuple[str, str, str, int]], folder: Path, cache: Path) -> None:
    """Measures what is not there yet."""
    todo = [cell for cell in cells if not path_of(folder, *cell).is_file()]
    full = build_suite(cache) if todo else None
    for i, (name, rows, loss, seed) in enumerate(todo, 1):
        base = BASES[name]
        suite = full.shrunk(*base.sizes) if base.sizes else full
        cell = {"seed": seed} | measure(base, loss, rows, seed, suite, cache)
        store(path_of(folder, name, rows, loss, seed), cell)
        spent = f"{cell['seconds']:.0f} s"
        print(f"[{i}/{len(todo)}] {name}, {rows}, {loss}, {seed}: {spent}", flush=True)


def load_cells(folder: Path, cells: list[tuple[str, str, str, int]]) -> Cells:
    found: Cells = defaultdict(list)
    for name, rows, loss, seed in cells:
        if cell := read_json(path_of(folder, name, rows, loss, seed)):
            found[name, rows, loss].append(cell)
    return dict(found)


def symmetric(folder: Path, cache: Path) -> None:
    """Table 5: scored pairs at two scales, and what clustering the same models allow."""
    if not (path := folder / "symmetric.json").is_file():
        texts, labels = build_suite(cache).clustering
        store(path, regression(lambda model: v_measures(model, texts, labels)))


def choose(names: Iterable[str], loss: str, cache: Path) -> None:
    """nDCG@10 on the dev tasks by learning rate, matched and by cosine."""
    suite = build_suite(cache)
    columns = [f"dev {rows}, {how}" for rows in TRAIN_SETS for how in ("matched", "by cosine")]
    print(f"| base, {loss} | learning rate | " + " | ".join(columns) + " | mean, matched |")
    print("| --- | ---: |" + " ---: |" * (len(columns) + 1))
    for name in names:
        for rate in BASES[name].rates:
            base = replace(BASES[name], how=BASES[name].how | {"learning_rate": rate})
            small = suite.shrunk(*base.sizes) if base.sizes else suite
            found = []
            for rows in TRAIN_SETS:
                model = trained(base, loss, suite.train[rows], 0, cache)
                dev = read(model, {"dev": small.dev[rows]}, (MATCHED[loss], 1.0))
                found += dev["dev"]["ndcg@10"]
            shown = " | ".join(f"{value:.3f}" for value in (*found, np.mean(found[::2])))
            print(f"| {name} | {rate:g} | {shown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = [*BASES, "symmetric"]
    parser.add_argument("--only", help=f"of {','.join(parts)}; default: all")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    parser.add_argument("--choose", action="store_true", help="only the grid of learning rates")
    parser.add_argument("--loss", default="cosine", choices=sorted({*MATCHED} - {"pretrained"}))
    parser.add_argument("--output", type=Path, default=Path("runs/magnitude"))
    parser.add_argument("--cache", type=Path, default=None, help="where the data is unpacked")
    arguments = parser.parse_args()
    parts = arguments.only.split(",") if arguments.only else parts
    if unknown := set(parts) - {*BASES, "symmetric"}:
        parser.error(f"--only does not know {', '.join(sorted(unknown))}.")
    prepare_process()
    cache, names = default_cache(arguments.cache), [part for part in parts if part in BASES]
    folder = arguments.output
    if arguments.choose:
        choose(names, arguments.loss, cache)
        return
    cells = plan(names)
    if not arguments.tables:
        run(cells, folder, cache)
        if "symmetric" in parts:
            symmetric(folder, cache)
    found = load_cells(folder, cells)
    print(report(found, read_json(folder / "symmetric.json")))
    if found:
        picture(found, folder / "exponents.png")


if __name__ == "__main__":
    main()

"""Late interaction: is the norm of a token its importance? Pruning by norm against clustering.

    python benchmarks/studies/late_interaction/late_interaction.py [SETTING ...] [--seeds 3]

A late-interaction model stores a vector for each token, and a score is the mean over the query's
tokens of the largest similarity to a token of the document. Dot keeps the norms of document tokens
in training, so that an index can drop the tokens with small norms: one threshold for the whole
index, at least one token a document. The control is a model trained under cosine with
sentence-transformers' own loss, whose tokens are clustered by its HierarchicalTokenPooling (Ward),
with the pool factor that leaves as many vectors.

The base is all-MiniLM-L6-v2 with a projection to 96 dimensions; all weights are trained. For each
share of the vectors dev chooses, with seed 0: the temperature, and the document exponent of
"calibrated". The test is read once.

A cell has nDCG@10 with 100, 50, 25, 15, 10 and 5 % of the vectors, chosen by the norm (scored by
cosine, or at the calibrated exponent) and by the norm down to twice the share with clustering after
it; under Cosine also by clustering alone; and the CPU seconds of one thread that pruning and
clustering to 25 % need for 1,000 documents.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.debian import cache_folder, package_descriptions
from benchmarks.data.docstrings import build_docstring_task
from benchmarks.data.search_tasks import answers_only
from benchmarks.data.texts import different
from benchmarks.studies.cells import (
    DATA,
    DEVICE,
    SEED,
    Cell,
    Data,
    Figures,
    Store,
    asked,
    data,
    how_of,
    packed,
    seconds_of,
    seeds_of,
    unpacked,
)
from benchmarks.studies.estimates import Gain, gain_of, in_points, markdown, show
from benchmarks.studies.models import QUIET, minilm
from datasets import Dataset
from numpy.typing import NDArray
from sentence_transformers import (
    MultiVectorEncoder,
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
)
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.base.sampler import BatchSamplers
from sentence_transformers.multi_vector_encoder import maxsim
from sentence_transformers.multi_vector_encoder.losses import (
    MultiVectorMultipleNegativesRankingLoss,
)
from sentence_transformers.multi_vector_encoder.modules import (
    HierarchicalTokenPooling,
    MultiVectorMask,
)
from sentence_transformers.multi_vector_encoder.scoring import mean_colbert_scores
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import PrinterCallback

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import ndcg

WIDTH = 96
LENGTH = 192  # tokens of a text
SHARES = (1.0, 0.5, 0.25, 0.15, 0.1, 0.05)
EXPONENTS = (0.0, 0.5, 0.75)  # of documents; 1, which removes the norm, is a rule of its own
TAUS = (0.02, 0.05)
LOSSES = {"cosine": "Cosine", "dot": "Dot"}
WAYS = {  # how vectors are chosen, to the rules of which dev takes the better
    "clustered": ("pooling",),
    "pruned": ("norm, cosine", "norm, calibrated"),
    "both": ("norm, pooling",),
}
CELLS = Store(Path(__file__).parent / "cells")
PERCENT = {f"{share:g}": f"{100 * share:g} %" for share in SHARES}


# --- data -----------------------------------------------------------------------------------------


def pairs(task: RetrievalData) -> Dataset:
    found = [(q, d) for q, documents in task.relevant.items() for d in sorted(documents)]
    anchors, positives = [task.queries[q] for q, _ in found], [task.corpus[d] for _, d in found]
    return Dataset.from_dict({"anchor": anchors, "positive": positives})


def chunks() -> Data:
    """Docstrings, without the chunks that are never relevant."""
    sizes: dict[str, Any] = {"test_queries": 600, "dev_queries": 300, "seed": SEED}
    task = build_docstring_task(cache=cache_folder() / "docstrings-late", **sizes)
    return Data(pairs(task.train), answers_only(task.dev), {"docstrings": answers_only(task.test)})


def long_descriptions(least: int = 80, most: int = 120) -> Data:
    """Debian's long descriptions of so many words, cut at the greater number."""
    entries = [(short, long.split()) for short, long in different(package_descriptions())]
    texts = [(short, " ".join(words[:most])) for short, words in entries if len(words) >= least]
    corpus = {f"d{i}": long for i, (_, long) in enumerate(texts)}
    queries = {f"q{i}": short for i, (short, _) in enumerate(texts)}

    def part(begin: int, end: int, asked: int) -> RetrievalData:
        shuffled = np.random.default_rng(SEED).permutation(len(texts))[begin:end]
        asks = {f"q{i}": {f"d{i}"} for i in shuffled[:asked]}
        return RetrievalData(
            {q: queries[q] for q in asks}, {f"d{i}": corpus[f"d{i}"] for i in shuffled}, asks
        )

    train = part(1200, 1200 + 2500, 2500)
    return Data(pairs(train), part(800, 1200, 300), {"descriptions": part(0, 800, 400)})


DATA |= {"late docstrings": chunks, "late descriptions": long_descriptions}

BASE = "MiniLM, projection"
SETTINGS = {  # Cosine at .05 with seed 0
    f"{name}, {BASE}": Cell(BASE, f"late {name}", "cosine", 0, 150, 32, 1e-4, bf16=True)
    for name in ("docstrings", "descriptions")
}


# --- one training ---------------------------------------------------------------------------------


def late(cell: Cell) -> MultiVectorEncoder:
    """Unit vectors of 96 dimensions for the tokens of the base."""
    torch.manual_seed(cell.seed)
    encoder: Any = minilm()[0]
    encoder.max_seq_length = LENGTH
    width, tokens = encoder.get_embedding_dimension(), {"module_input_name": "token_embeddings"}
    project = Dense(width, WIDTH, bias=False, activation_function=nn.Identity(), **tokens)
    modules = [encoder, project, MultiVectorMask(), Normalize(**tokens)]
    return MultiVectorEncoder(modules=modules, device=DEVICE)


def objective(model: MultiVectorEncoder, cell: Cell) -> nn.Module:
    tau = float(cell.temperature)
    if cell.loss == "cosine":
        return MultiVectorMultipleNegativesRankingLoss(
            model, scale=1 / tau, similarity_fct=mean_colbert_scores
        )
    return stm.LateInteractionLoss(model, similarity=cell.loss, temperature=tau)


def train(cell: Cell) -> MultiVectorEncoder:
    """The model after training."""
    model = late(cell)
    if cell.loss != "cosine":
        model = stm.prepare(model, cell.loss)
    arguments = MultiVectorEncoderTrainingArguments(
        output_dir=tempfile.mkdtemp(),
        warmup_steps=0.1,
        bf16=cell.bf16,
        use_cpu=DEVICE == "cpu",
        batch_sampler=BatchSamplers.NO_DUPLICATES,
        seed=cell.seed,
        **how_of(cell),
        **QUIET,
    )
    trainer = MultiVectorEncoderTrainer(
        model=model, args=arguments, train_dataset=data(cell.data).rows, loss=objective(model, cell)
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return model.eval()


# --- what remains of an index ---------------------------------------------------------------------


def unit(tokens: Tensor) -> Tensor:
    return normalize(tokens, dim=-1)


@dataclass
class Tokens:
    """A task as vectors of tokens, before any normalisation; documents from short to long, which
    saves padding.

    Attributes:
        queries: (L, D) for each query.
        documents: (L, D) for each document.
        relevant: Relevant documents of each query, by their place.
    """

    queries: list[Tensor]
    documents: list[Tensor]
    relevant: list[set[int]]

    @classmethod
    def of(cls, model: MultiVectorEncoder, task: RetrievalData) -> Tokens:
        end = 1 + next(i for i, module in enumerate(model) if isinstance(module, MultiVectorMask))
        # what follows divides by norms
        raw = MultiVectorEncoder(modules=list(model)[:end], device=str(model.device))
        corpus = dict(sorted(task.corpus.items(), key=lambda item: len(item[1])))
        texts = list(corpus.values())
        queries = raw.encode_query(list(task.queries.values()), show_progress_bar=False)
        documents = raw.encode_document(texts, show_progress_bar=False)
        place = {document: i for i, document in enumerate(corpus)}
        relevant = [
            {place[document] for document in task.relevant[query]} for query in task.queries
        ]
        return cls(
            [x.float().cpu() for x in queries], [x.float().cpu() for x in documents], relevant
        )

    @cached_property
    def norms(self) -> list[Tensor]:
        return [torch.linalg.vector_norm(x, dim=1) for x in self.documents]

    def ndcg(self, queries: list[Tensor], documents: list[Tensor]) -> NDArray[np.float64]:
        tops = maxsim(queries, documents).topk(10).indices.tolist()
        gains = [
            [document in wanted for document in top]
            for top, wanted in zip(tops, self.relevant, strict=True)
        ]
        return ndcg(gains, [[1] * len(wanted) for wanted in self.relevant])


def largest(values: Sequence[Tensor], number: int) -> list[Tensor]:
    """Which tokens have the largest values over the whole index, with at least one of each
    document.

    Example:
        >>> values = [torch.tensor([3.0, 9.0, 8.0]), torch.tensor([1.0, 2.0])]
        >>> [x.tolist() for x in largest(values, number=3)]
        [[False, True, True], [False, True]]
    """
    flat, sizes = torch.cat(list(values)), [len(x) for x in values]
    starts = [0, *np.cumsum(sizes)[:-1].tolist()]
    flat[[start + int(x.argmax()) for start, x in zip(starts, values, strict=True)]] = torch.inf
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[flat.topk(max(number, len(sizes))).indices] = True
    return list(mask.split(sizes))


def pooled(documents: list[Tensor], number: int) -> list[Tensor]:
    """Unit vectors clustered by sentence-transformers' pooling, with the factor that keeps about so
    many vectors."""

    def remaining(factor: float) -> int:
        return sum(1 + max(int((len(x) - 1) // factor), 1) for x in documents if len(x) > 1)

    low, high = 1.0, float(max(map(len, documents)))
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if remaining(middle) > number else (low, middle)
    return HierarchicalTokenPooling(high).pool(list(map(unit, documents)))


def measured(tokens: Tokens, loss: str, exponents: Mapping[str, float] | None = None) -> Figures:
    """nDCG@10 of each query by rule and share, with the share that remains.

    Args:
        loss: Under cosine tokens are clustered; Dot has norms to calibrate.
        exponents: Document exponent by share; default: the best one here.
    """
    is_control = loss == "cosine"
    total = sum(map(len, tokens.documents))
    found: Figures = {}

    def add(rule: str, documents: list[Tensor], similarity: stm.Similarity = stm.COSINE) -> Figures:
        figures = {
            "vectors": round(sum(map(len, documents)) / total, 4),
            "exponent": similarity.exponents[1],
            "ndcg": tokens.ndcg(
                list(map(similarity.query, tokens.queries)),
                list(map(similarity.document, documents)),
            ),
        }
        old = found.setdefault(rule, {}).get(share)
        if old is None or figures["ndcg"].mean() > old["ndcg"].mean():
            found[rule][share] = figures
        return figures

    def left(number: int) -> list[Tensor]:
        masks = largest(tokens.norms, number)
        return [x[mask] for x, mask in zip(tokens.documents, masks, strict=True)]

    for share in map("{:g}".format, SHARES):
        number = round(float(share) * total)
        by_norm = left(number)
        add("norm, cosine", by_norm)
        tried = EXPONENTS if exponents is None else (exponents[share],)
        for exponent in () if is_control else tried:
            add("norm, calibrated", by_norm, stm.Similarity(0.0, exponent))
        if float(share) < 1:
            add("norm, pooling", pooled(left(min(2 * number, total)), number))
        if is_control and float(share) < 1:
            add("pooling", pooled(tokens.documents, number))
    return found


def seconds(tokens: Tokens, share: float = 0.25) -> dict[str, float]:
    """CPU seconds of this process for 1,000 documents, of vectors that are there already."""
    number = round(share * sum(map(len, tokens.documents)))
    threshold = float(torch.cat(tokens.norms).quantile(1 - share))
    units = list(map(unit, tokens.documents))
    pruning = stm.NormPruning(threshold)
    pooling = HierarchicalTokenPooling(len(torch.cat(units)) / number)
    found = {}
    for name, work in {
        "pruning": lambda: pruning.pool(tokens.documents),
        "pooling": lambda: pooling.pool(units),
    }.items():
        began = time.process_time()
        work()
        found[name] = round(1000 * (time.process_time() - began) / len(units), 4)
    return found


def each(found: Figures, change: Callable[[NDArray[np.float64]], Any]) -> Figures:
    """The figures with another form of nDCG@10."""
    for by_share in found.values():
        for figures in by_share.values():
            figures["ndcg"] = change(figures["ndcg"])
    return found


def measure(cell: Cell) -> Figures:
    """Trains and measures."""
    began = time.perf_counter()
    model = train(cell)
    middle = time.perf_counter()
    found = data(cell.data)
    dev = measured(Tokens.of(model, found.dev), cell.loss)
    calibrated = dev.get("norm, calibrated", {})
    exponents = {share: figures["exponent"] for share, figures in calibrated.items()}
    tests, sizes = {}, {}
    for name, task in found.tests.items():
        tokens = Tokens.of(model, task)
        tests[name] = each(measured(tokens, cell.loss, exponents), packed)
        lengths = [len(x) for x in tokens.documents]
        mean = round(float(np.mean(lengths)), 1)
        sizes[name] = {"documents": len(lengths), "tokens": mean, **seconds(tokens)}
    return {
        "settings": asdict(cell),
        "data": found.fingerprint,
        "dev": each(dev, lambda values: round(float(values.mean()), 5)),
        "tests": tests,
        "sizes": sizes,
        "seconds": seconds_of(began, middle),
    }


# --- choices on dev -------------------------------------------------------------------------------


# a cell with seed 0, and the rule by which its vectors are chosen and scored
Choice = tuple[Cell, str]


def grid(name: str) -> list[Cell]:
    """The cells with seed 0, Cosine first."""
    pairs = itertools.product(LOSSES, TAUS)
    return [replace(SETTINGS[name], loss=loss, temperature=tau) for loss, tau in pairs]


def best(name: str, way: str, share: str) -> Choice | None:
    """The stored cell and the rule that are best on dev for a share of the vectors, with seed 0."""
    is_control = way == "clustered"
    # all vectors: there is no rule
    rules = ("norm, cosine",) if share == "1" and is_control else WAYS[way]
    tried = {}
    for cell in grid(name):
        found = CELLS.load(cell) if (cell.loss == "cosine") == is_control else None
        for rule in rules if found else ():
            if share in (by_share := found["dev"].get(rule, {})):
                tried[cell, rule] = by_share[share]["ndcg"]
    return max(tried, key=lambda choice: tried[choice]) if tried else None


def of_seeds(choice: Choice | None, test: str, share: str) -> dict[int, NDArray[np.float64]]:
    """nDCG@10 of each query by seed."""
    if choice is None:
        return {}
    cell, rule = choice
    found = {seed: x["tests"][test][rule][share] for seed, x in CELLS.of_seeds(cell).items()}
    return {seed: unpacked(figures["ndcg"]) for seed, figures in found.items()}


def gain(after: Choice | None, before: Choice | None, test: str, share: str) -> Gain | None:
    return gain_of(of_seeds(after, test, share), of_seeds(before, test, share))


# --- tables ---------------------------------------------------------------------------------------


def shown(choice: Choice | None, test: str, share: str) -> str:
    """The mean over seeds, and what dev has chosen."""
    if choice is None or not (found := of_seeds(choice, test, share)):
        return ""
    cell, rule = choice
    exponent = (CELLS.load(cell) or {})["dev"][rule][share]["exponent"]
    how = f", exponent {exponent:g}" if exponent != 1 else ""
    mean = in_points([values.mean() for values in found.values()])
    return f"{mean} ({LOSSES[cell.loss]} {cell.temperature:g}{how})"


def table(name: str, test: str) -> list[str]:
    """For each share what dev chooses, its nDCG@10, and what pruning gains over clustering."""
    rows = []
    for share, percent in PERCENT.items():
        choices = {way: best(name, way, share) for way in WAYS}
        control, *others = choices.values()
        gains = [gain(x, control, test, share) for x in others]
        if gains[0] is not None:
            cells = [shown(choice, test, share) for choice in choices.values()]
            rows.append([percent, *cells, *map(show, gains), gains[0][1]])
    head = "vectors|Cosine, clustered|by norm|norm, clustered|norm - clustered|both - clustered"
    return markdown(f"{head}|seeds".split("|"), rows, "rlll")


def time_table() -> list[str]:
    """CPU seconds of one thread for 1,000 documents, means over the stored cells."""
    rows = []
    for name, setting in SETTINGS.items():
        test = setting.data.removeprefix("late ")
        if found := [x["sizes"][test] for cell in grid(name) if (x := CELLS.load(cell))]:
            pruning = np.mean([x["pruning"] for x in found])
            clustering = np.mean([x["pooling"] for x in found])
            times = [f"{pruning:.3f}", f"{clustering:.2f}", f"{clustering / pruning:.0f}"]
            rows.append([test, f"{found[0]['tokens']:g}", *times])
    return markdown(["documents", "tokens", "pruning", "clustering", "ratio"], rows)


TABLES: dict[str, Callable[[], list[str]]] = {
    "late, times": time_table,
    **{f"late, {name}": partial(table, name, name.partition(",")[0]) for name in SETTINGS},
}

if __name__ == "__main__":
    arguments = asked(__doc__, SETTINGS)
    for name in arguments.names:
        CELLS.run(measure, grid(name))
        choices = [best(name, *pair) for pair in itertools.product(WAYS, PERCENT)]
        chosen = [choice[0] for choice in choices if choice]
        CELLS.run(measure, [x for cell in chosen for x in seeds_of(cell, arguments.seeds)])

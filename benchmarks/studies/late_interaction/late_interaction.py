"""Late interaction: is the norm of a token its importance? Pruning by norm against clustering.

    python benchmarks/studies/late_interaction/late_interaction.py [SETTING ...] [--seeds 3]

A late-interaction model stores a vector for each token, and a score is the mean over the query's
tokens of the largest similarity to a token of the document. Dot and QNorm keep the norms of
document tokens in training, so that an index can drop the tokens with small norms: one threshold
for the whole index, at least one token a document. The control is a model trained under cosine with
sentence-transformers' own loss, whose tokens are clustered by its HierarchicalTokenPooling (Ward),
with the pool factor that leaves as many vectors.

The base is paraphrase-MiniLM-L3-v2 (run data/paraphrase.py once) with a layer and a projection to
96 dimensions on top of it ("whole encoder"), or all-MiniLM-L6-v2 with the projection alone; all
weights are trained. Each model also answers the queries of the other corpus and those of FOLDOC.
For each share of the vectors dev chooses, with seed 0: the temperature, the loss (Dot or QNorm,
with norm_penalty or without) and the document exponent of "calibrated". The test is read once.

A cell has nDCG@10 with 100, 50, 25, 15, 10 and 5 % of the vectors, chosen by the norm (scored by
cosine, or at the calibrated exponent) and by the norm down to twice the share with clustering after
it; under Cosine also by clustering alone, and from 25 % by chance, by IDF and as the first tokens
of a document; and the CPU seconds of one thread that pruning and clustering to 25 % need for 1,000
documents. What was expected is on the page, docs/research/late_interaction.md.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.docstrings import build_docstring_task
from benchmarks.data.lexicons import default_cache, fetch, foldoc
from benchmarks.data.search_tasks import answers_only, shrink
from benchmarks.data.texts import different, package_descriptions
from benchmarks.studies.cells import (
    BASES,
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
from benchmarks.studies.models import QUIET
from datasets import Dataset
from numpy.typing import NDArray
from sentence_transformers import (
    MultiVectorEncoder,
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
)
from sentence_transformers.base.modules import Dense, Normalize, Transformer
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
CORPORA = ("docstrings", "descriptions")
TAUS = (0.02, 0.05)
LOSSES = {"cosine": "Cosine", "dot": "Dot", "qnorm": "QNorm", "qnorm-penalty0.3": "QNorm, penalty"}
WAYS = {  # how vectors are chosen, to the rules of which dev takes the better
    "clustered": ("pooling",),
    "pruned": ("norm, cosine", "norm, calibrated"),
    "both": ("norm, pooling",),
}
CELLS = Store(Path(__file__).parent / "cells")
PERCENT = {f"{share:g}": f"{100 * share:g} %" for share in SHARES}


# --- data -----------------------------------------------------------------------------------------


def pairs(task: RetrievalData) -> Dataset:
    found = [
        (query, document)
        for query, documents in task.relevant.items()
        for document in sorted(documents)
    ]
    anchors, positives = (
        [task.queries[query] for query, _ in found],
        [task.corpus[document] for _, document in found],
    )
    return Dataset.from_dict({"anchor": anchors, "positive": positives})


@lru_cache(maxsize=1)
def chunks() -> Data:
    """Docstrings, without the chunks that are never relevant."""
    sizes: dict[str, Any] = {
        "test_queries": 600,
        "dev_queries": 300,
        "seed": SEED,
        "workers": 1,
        "progress": False,
    }
    task = build_docstring_task(cache=default_cache() / "docstrings-late", **sizes)
    return Data(pairs(task.train), answers_only(task.dev), {"docstrings": answers_only(task.test)})


@lru_cache(maxsize=1)
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


def setting(own: str) -> Data:
    """The data of one setting; the tests of the other, smaller, and of FOLDOC are domains that it
    has not seen."""
    both = {"docstrings": chunks(), "descriptions": long_descriptions()}
    tests = {name: found.tests[name] for name, found in both.items()}
    other = next(name for name in both if name != own)
    tests[other] = shrink(tests[other], 300, 600, SEED)
    tests["foldoc"] = foldoc(fetch("dict-foldoc"), SEED, num_queries=300, corpus_size=600)
    return replace(both[own], tests=tests)


DATA |= {f"late {name}": lambda name=name: setting(name) for name in CORPORA}  # type: ignore[misc]

BARE = ", projection"
SETTINGS = {  # Cosine at .05 with seed 0
    "docstrings, whole encoder": Cell("L3", "late docstrings", "cosine", 0, 150, 32, 2e-4),
    "docstrings, MiniLM, projection": Cell(
        f"MiniLM{BARE}", "late docstrings", "cosine", 0, 150, 32, 1e-4, bf16=True
    ),
    "descriptions, MiniLM, projection": Cell(
        f"MiniLM{BARE}", "late descriptions", "cosine", 0, 150, 32, 1e-4, bf16=True
    ),
}


# --- one training ---------------------------------------------------------------------------------


def encoder_of(base: str) -> Transformer:
    encoder = BASES[base]()[0]
    encoder.max_seq_length = LENGTH
    return encoder  # type: ignore[return-value]


def late(cell: Cell) -> MultiVectorEncoder:
    """Unit vectors of 96 dimensions for the tokens of the base."""
    torch.manual_seed(cell.seed)
    encoder = encoder_of(cell.base.removesuffix(BARE))
    width, tokens = encoder.get_embedding_dimension(), {"module_input_name": "token_embeddings"}
    mix = Dense(width, width, activation_function=nn.GELU(), use_residual=True, **tokens)
    mixed = [] if cell.base.endswith(BARE) else [mix]
    project = Dense(width, WIDTH, bias=False, activation_function=nn.Identity(), **tokens)
    modules = [encoder, *mixed, project, MultiVectorMask(), Normalize(**tokens)]
    model = MultiVectorEncoder(modules=modules, device=DEVICE)
    return model


def objective(model: MultiVectorEncoder, cell: Cell) -> nn.Module:
    tau = float(cell.temperature)
    name, _, variant = cell.loss.partition("-")
    if name == "cosine":
        return MultiVectorMultipleNegativesRankingLoss(
            model, scale=1 / tau, similarity_fct=mean_colbert_scores
        )
    penalty = float(variant.removeprefix("penalty")) if variant.startswith("penalty") else 0.0
    return stm.LateInteractionLoss(model, similarity=name, temperature=tau, norm_penalty=penalty)


def train(cell: Cell) -> MultiVectorEncoder:
    """The model after training."""
    model = late(cell)
    name = cell.loss.partition("-")[0]
    if name != "cosine":
        model = stm.prepare(model, name)
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
        ids: Token ids of each document, (L,).
        relevant: Relevant documents of each query, by their place.
    """

    queries: list[Tensor]
    documents: list[Tensor]
    ids: list[list[int]]
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
        ids = model.tokenizer(texts, truncation=True, max_length=LENGTH)["input_ids"]
        place = {document: i for i, document in enumerate(corpus)}
        relevant = [
            {place[document] for document in task.relevant[query]} for query in task.queries
        ]
        return cls(
            [x.float().cpu() for x in queries], [x.float().cpu() for x in documents], ids, relevant
        )

    @cached_property
    def units(self) -> list[Tensor]:
        return [unit(query) for query in self.queries]

    @cached_property
    def values(self) -> dict[str, list[Tensor]]:
        """By rule, a number for each token of a document: those with the largest ones stay."""
        times = Counter(token for found in self.ids for token in set(found))
        generator = torch.Generator().manual_seed(SEED)
        sizes = [len(x) for x in self.documents]
        return {
            "norm": [torch.linalg.vector_norm(x, dim=1) for x in self.documents],
            "random": [torch.rand(size, generator=generator) for size in sizes],
            "first": [-torch.arange(size) / size for size in sizes],
            "IDF": [
                torch.tensor([-math.log(times[token] / len(sizes)) for token in found])
                for found in self.ids
            ],
        }

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
        loss: Under cosine tokens are clustered, and chosen by simple rules; other losses have norms
            to calibrate.
        exponents: Document exponent by share; default: the best one here.
    """
    is_control, query_exponent = loss == "cosine", float(not loss.startswith("dot"))
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

    def left(rule: str, number: int) -> list[Tensor]:
        return [
            x[mask]
            for x, mask in zip(tokens.documents, largest(tokens.values[rule], number), strict=True)
        ]

    for share in map("{:g}".format, SHARES):
        number = round(float(share) * total)
        by_norm = left("norm", number)
        add("norm, cosine", by_norm)
        for exponent in (
            () if is_control else EXPONENTS if exponents is None else (exponents[share],)
        ):
            add("norm, calibrated", by_norm, stm.Similarity(query_exponent, exponent))
        if float(share) < 1:
            add("norm, pooling", pooled(left("norm", min(2 * number, total)), number))
        if is_control and float(share) < 1:
            add("pooling", pooled(tokens.documents, number))
            for rule in ("random", "first", "IDF") if float(share) < 0.5 else ():
                add(rule, left(rule, number))
    return found


def seconds(tokens: Tokens, share: float = 0.25) -> dict[str, float]:
    """CPU seconds of this process for 1,000 documents, of vectors that are there already."""
    number = round(share * sum(map(len, tokens.documents)))
    threshold = float(torch.cat(tokens.values["norm"]).quantile(1 - share))
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


def rule_table(name: str, test: str) -> list[str]:
    """Other choices of tokens in the control, as nDCG@10, next to the learned norm."""
    labels = {"norm, cosine": "norm of Cosine", "random": "chance", "first": "first tokens"}
    labels["IDF"] = "IDF"
    shares = [share for share in PERCENT if float(share) < 0.5]
    controls = {share: best(name, "clustered", share) for share in shares}
    learned = {share: best(name, "pruned", share) for share in shares}
    rows = []
    if all(controls.values()) and all(learned.values()):
        for rule, label in labels.items():
            cells = [shown((x[0], rule), test, share) for share, x in controls.items() if x]
            rows.append([label, *cells])
        rows.append(["learned norm", *(shown(x, test, share) for share, x in learned.items())])
    return markdown(["tokens kept by", *(PERCENT[share] for share in shares)], rows)


def time_table() -> list[str]:
    """CPU seconds of one thread for 1,000 documents, means over the stored cells."""
    rows = []
    for name, test in itertools.product(SETTINGS, (*CORPORA, "foldoc")):
        if found := [x["sizes"][test] for cell in grid(name) if (x := CELLS.load(cell))]:
            pruning = np.mean([x["pruning"] for x in found])
            clustering = np.mean([x["pooling"] for x in found])
            times = [f"{pruning:.3f}", f"{clustering:.2f}", f"{clustering / pruning:.0f}"]
            rows.append([f"{test}, {name}", f"{found[0]['tokens']:g}", *times])
    return markdown(["documents", "tokens", "pruning", "clustering", "ratio"], rows)


TABLES: dict[str, Callable[[], list[str]]] = {
    "late, times": time_table,
}
for name in SETTINGS:
    TABLES[f"late, rules, {name}"] = partial(rule_table, name, name.partition(",")[0])
    for test in (*CORPORA, "foldoc"):
        TABLES[f"late, {name}, {test}"] = partial(table, name, test)

if __name__ == "__main__":
    arguments = asked(__doc__, SETTINGS)
    for name in arguments.names:
        CELLS.run(measure, grid(name))
        choices = [best(name, *pair) for pair in itertools.product(WAYS, PERCENT)]
        chosen = [choice[0] for choice in choices if choice]
        CELLS.run(measure, [x for cell in chosen for x in seeds_of(cell, arguments.seeds)])

"""Late interaction: is the norm of a token its importance? Pruning by norm against clustering.

    python benchmarks/studies/late_interaction/late_interaction.py [--seeds 3]

A score is the mean over the query's tokens of the largest similarity to a token of the document.
Dot keeps the norms of document tokens in training, so that an index can drop the tokens with small
norms: one threshold for the whole index, at least one token a document. The control is a model
trained under cosine with sentence-transformers' own loss, whose tokens are clustered by its
HierarchicalTokenPooling, with the factor that leaves as many vectors.

For each share of the vectors dev chooses, with seed 0: the temperature, and the document exponent
of "calibrated". The test is read once. "norm, pooling" clusters what twice the share by norm keeps.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.debian import cache_folder
from benchmarks.data.docstrings import build_docstring_task
from benchmarks.data.search_tasks import answers_only
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
from benchmarks.studies.estimates import gain_of, in_points, markdown, show
from benchmarks.studies.models import QUIET, minilm
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

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import ndcg

SHARES = {f"{share:g}": share for share in (1.0, 0.5, 0.25, 0.15, 0.1, 0.05)}
EXPONENTS = [0.0, 0.5, 0.75]  # of documents; 1, which removes the norm, is a rule of its own
LOSSES = {"cosine": "Cosine", "dot": "Dot"}
WAYS = {  # how vectors are chosen, to the rules of which dev takes the better
    "clustered": ["pooling"],
    "pruned": ["norm, cosine", "norm, calibrated"],
    "both": ["norm, pooling"],
}
TEST = "docstrings"
CELLS = Store(Path(__file__).parent / "cells")
CELL = Cell("MiniLM, projection", "late docstrings", "cosine", 0, 150, 32, 1e-4, bf16=True)
GRID = [replace(CELL, loss=loss, temperature=tau) for loss in LOSSES for tau in (0.02, 0.05)]


def chunks() -> Data:
    """Docstrings, without the chunks that are never relevant."""
    sizes: dict[str, Any] = {"test_queries": 600, "dev_queries": 300, "seed": SEED}
    task = build_docstring_task(cache=cache_folder() / "docstrings-late", **sizes)
    dev, test = answers_only(task.dev), answers_only(task.test)
    return Data(task.train.triplets(0, SEED), dev, {TEST: test})


DATA["late docstrings"] = chunks


# --- one training ---------------------------------------------------------------------------------


def late(cell: Cell) -> MultiVectorEncoder:
    """all-MiniLM-L6-v2 with unit vectors of 96 dimensions for its tokens."""
    torch.manual_seed(cell.seed)
    encoder: Any = minilm()[0]
    encoder.max_seq_length = 192
    width, tokens = encoder.get_embedding_dimension(), {"module_input_name": "token_embeddings"}
    project = Dense(width, 96, bias=False, activation_function=nn.Identity(), **tokens)
    modules = [encoder, project, MultiVectorMask(), Normalize(**tokens)]
    return MultiVectorEncoder(modules=modules, device=DEVICE)


def train(cell: Cell) -> MultiVectorEncoder:
    """The model after training."""
    model = late(cell)
    tau = float(cell.temperature)
    loss: nn.Module
    if cell.loss == "cosine":
        loss = MultiVectorMultipleNegativesRankingLoss(
            model, scale=1 / tau, similarity_fct=mean_colbert_scores
        )
    else:
        model = stm.prepare(model, cell.loss)
        loss = stm.LateInteractionLoss(model, similarity=cell.loss, temperature=tau)
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
        model=model, args=arguments, train_dataset=data(cell.data).rows, loss=loss
    )
    trainer.train()
    return model.eval()


# --- what remains of an index ---------------------------------------------------------------------


@dataclass
class Tokens:
    """A task as vectors of tokens."""

    queries: list[Tensor]  # (L, D) each
    documents: list[Tensor]  # (L, D) each
    relevant: Sequence[Collection[int]]  # places of the relevant documents of each query

    @classmethod
    def of(cls, model: MultiVectorEncoder, task: RetrievalData) -> Tokens:
        """The vectors that a model gives, with the norms that it keeps."""
        queries = model.encode_query(list(task.asked.values()))
        documents = model.encode_document([task.corpus[d] for d in task.document_ids])
        return cls(queries, documents, task.columns)

    def ndcg(self, documents: list[Tensor], similarity: stm.Similarity) -> NDArray[np.float64]:
        """nDCG@10 of each query with what is left of the documents."""
        queries = list(map(similarity.query, self.queries))
        stored = list(map(similarity.document, documents))
        tops = maxsim(queries, stored).topk(10).indices.tolist()
        found = zip(tops, self.relevant, strict=True)
        gains = [[document in wanted for document in top] for top, wanted in found]
        return ndcg(gains, [[1] * len(wanted) for wanted in self.relevant])


def largest(documents: list[Tensor], number: int) -> list[Tensor]:
    """The tokens with the largest norms in the index, with at least one of each document.

    Example:
        >>> documents = [torch.tensor([[3.0], [9.0], [8.0]]), torch.tensor([[1.0], [2.0]])]
        >>> [x.flatten().tolist() for x in largest(documents, number=3)]
        [[9.0, 8.0], [2.0]]
    """
    norms = [torch.linalg.vector_norm(x, dim=1) for x in documents]
    norms = [x.index_fill(0, x.argmax(), torch.inf) for x in norms]
    number = min(max(number, len(norms)), sum(map(len, norms)))
    threshold = torch.cat(norms).topk(number).values[-1]
    return [x[norm >= threshold] for x, norm in zip(documents, norms, strict=True)]


def pooled(documents: list[Tensor], number: int) -> list[Tensor]:
    """Unit vectors, clustered with the factor that leaves about so many of them."""

    def remaining(factor: float) -> int:
        return sum(1 + max(int((len(x) - 1) // factor), 1) for x in documents if len(x) > 1)

    low, high = 1.0, float(max(map(len, documents)))
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if remaining(middle) > number else (low, middle)
    factor = low if remaining(low) <= number else high
    return HierarchicalTokenPooling(factor).pool(list(map(stm.COSINE.document, documents)))


def measured(
    tokens: Tokens,
    loss: str,
    stored: Callable[[NDArray[np.float64]], Any],
    exponents: Mapping[str, float] | None = None,
) -> Figures:
    """nDCG@10 of each query in its stored form, and the document exponent, by rule and share; that
    of "calibrated" is given, or else the best one here."""
    total = sum(map(len, tokens.documents))
    found: Figures = {}
    for share, value in SHARES.items():
        number = round(value * total)
        if loss == "cosine":
            left = {"pooling": (pooled(tokens.documents, number), [1.0])}
        else:
            by_norm = largest(tokens.documents, number)
            gammas = EXPONENTS if exponents is None else [exponents[share]]
            twice = largest(tokens.documents, 2 * number)
            left = {
                "norm, cosine": (by_norm, [1.0]),
                "norm, calibrated": (by_norm, gammas),
                "norm, pooling": (pooled(twice, number), [1.0]),
            }
        for rule, (documents, tried) in left.items():
            values = [tokens.ndcg(documents, stm.Similarity(0.0, gamma)) for gamma in tried]
            best = max(range(len(tried)), key=lambda i: values[i].mean())
            figures = {"exponent": tried[best], "ndcg": stored(values[best])}
            found.setdefault(rule, {})[share] = figures
    return found


def measure(cell: Cell) -> Figures:
    """Trains and measures."""
    began = time.perf_counter()
    model = train(cell)
    middle = time.perf_counter()
    found = data(cell.data)
    dev = measured(Tokens.of(model, found.dev), cell.loss, lambda x: round(float(x.mean()), 5))
    exponents = {share: x["exponent"] for share, x in dev.get("norm, calibrated", {}).items()}
    test = measured(Tokens.of(model, found.tests[TEST]), cell.loss, packed, exponents)
    return {
        "settings": asdict(cell),
        "data": found.fingerprint,
        "dev": dev,
        "tests": {TEST: test},
        "seconds": seconds_of(began, middle),
    }


# --- choices on dev, and the table ----------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The stored cell with seed 0 and the rule that are best on dev for a share of the vectors."""

    cell: Cell
    rule: str
    share: str
    dev: Figures

    @property
    def by_seed(self) -> dict[int, NDArray[np.float64]]:
        """nDCG@10 of each query on the test."""
        found = CELLS.of_seeds(self.cell).items()
        return {s: unpacked(x["tests"][TEST][self.rule][self.share]["ndcg"]) for s, x in found}

    def __str__(self) -> str:
        exponent = self.dev["exponent"]
        how = f", exponent {exponent:g}" if exponent != 1 else ""
        mean = in_points([values.mean() for values in self.by_seed.values()])
        return f"{mean} ({LOSSES[self.cell.loss]} {self.cell.temperature:g}{how})"


def best(way: str, share: str) -> Choice | None:
    """The choice, or None where no stored cell has a rule for the share."""
    choices = []
    for cell in filter(CELLS.load, GRID):
        dev = CELLS.load(cell)["dev"]
        rules = [rule for rule in WAYS[way] if share in dev.get(rule, {})]
        choices += [Choice(cell, rule, share, dev[rule][share]) for rule in rules]
    return max(choices, key=lambda choice: choice.dev["ndcg"], default=None)


def table() -> list[str]:
    """For each share what dev chooses, its nDCG@10, and what pruning gains over clustering."""
    rows = []
    for share, value in SHARES.items():
        choices = [best(way, share) for way in WAYS]
        control, *others = (choice.by_seed if choice else {} for choice in choices)
        gains = [gain_of(figures, control) for figures in others]
        seeds = gains[0][1] if gains[0] else 0
        cells = [str(choice or "") for choice in choices]
        rows.append([f"{100 * value:g} %", *cells, *map(show, gains), seeds])
    head = "vectors|Cosine, clustered|by norm|norm, clustered|norm - clustered|both - clustered"
    return markdown(f"{head}|seeds".split("|"), rows, "rlll")


TABLES: dict[str, Callable[[], list[str]]] = {"late": table}

if __name__ == "__main__":
    arguments = asked(__doc__)
    CELLS.run(measure, GRID)
    chosen = [choice.cell for way in WAYS for share in SHARES if (choice := best(way, share))]
    CELLS.run(measure, [x for cell in chosen for x in seeds_of(cell, arguments.seeds)])

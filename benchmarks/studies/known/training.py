"""The trainings of known.py: a cell is the settings of one, and measuring it gives its figures."""

from __future__ import annotations

import base64
import time
import zlib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data import banking77, clinc150, xquad
from benchmarks.data.intents import (
    find_name,
    find_questions,
    name_pairs,
    question_pairs,
    split_off,
)
from benchmarks.studies.models import minilm, static_model
from benchmarks.studies.store import Figures
from datasets import Dataset
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.sampler import NoDuplicatesBatchSampler
from sentence_transformers.sentence_transformer.losses import (
    GISTEmbedLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Transformer
from torch import nn

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask

INTENTS = ("banking names", "clinc names", "banking questions", "clinc questions")
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the document, among which dev chooses
KEEP_NORMS: dict[str, Any] = {
    "Dot": stm.DotRankingLoss,
    "QNorm": stm.QNormRankingLoss,
    "DNorm": stm.DNormRankingLoss,
    "Learnable": stm.LearnableNormLoss,
}


@dataclass(frozen=True)
class Cell:
    """The settings of a training.

    Several temperatures are terms of equal weights. A scale of 20 is the paper's, at a temperature
    of .05: logits are 20 · s. ``hardness`` is the strength of the weights of negatives.
    """

    data: str
    loss: str
    temperatures: tuple[float, ...]
    base: str = "table"
    steps: int = 300
    batch: int = 64
    rate: float = 0.03
    seed: int = 0
    elsewhere: bool = False  # whether other domains and merging with the base are measured
    scale: float | str = "auto"
    hardness: float = 0.0


# --- data ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    rows: Dataset
    dev: RetrievalData
    test: RetrievalData


@cache
def data(name: str, folder: Path | None) -> Data:
    """Questions of Banking77 or CLINC150, with names of intents or other questions as documents."""
    source, documents = name.split()
    if folder is None:
        raise SystemExit("Give the folder of Banking77 and CLINC150 with --data FOLDER.")
    if source == "banking":
        train, dev = split_off(banking77.read(folder, "train"), 1500)
        _, test = split_off(banking77.read(folder, "test"), 2000)
    else:
        file = folder / "clinc150_full.json"
        train = clinc150.read(file, "train")
        _, dev = split_off(clinc150.read(file, "val"), 1500)
        _, test = split_off(clinc150.read(file, "test"), 2000)
    if documents == "questions":
        dev, test = dev[:500], test[:1000]  # the corpus is large
        return Data(question_pairs(train), find_questions(dev, train), find_questions(test, train))
    names = sorted({intent for _, intent in train})
    return Data(name_pairs(train), find_name(dev, names), find_name(test, names))


# --- one training -------------------------------------------------------------------------------


class InBfloat16(Transformer):
    """An encoder that multiplies in bfloat16, alone: losses and scores see float32."""

    def forward(self, features: dict[str, Any], **options: Any) -> dict[str, Any]:
        with torch.autocast("cpu", torch.bfloat16):
            found = super().forward(features, **options)
        found["token_embeddings"] = found["token_embeddings"].float()
        return found


def base_model(name: str) -> SentenceTransformer:
    """The base as published, in bfloat16 if it is an encoder."""
    if name == "table":
        return static_model()
    model = minilm()
    if name == "MiniLM at 64":  # in float32, which is faster where bfloat16 is emulated
        model.max_seq_length = 64
    else:
        model[0].__class__ = InBfloat16
    return model


def objective(model: SentenceTransformer, cell: Cell) -> nn.Module:
    tau = cell.temperatures[0]
    if cell.loss.startswith("MNRL"):
        return MultipleNegativesRankingLoss(model, scale=1 / tau)
    if cell.loss == "GIST":
        return GISTEmbedLoss(model, base_model(cell.base), temperature=tau)
    share = 1 / len(cell.temperatures)
    terms = [stm.Term(temperature=t, weight=share) for t in cell.temperatures]
    if keeps_norms := KEEP_NORMS.get(cell.loss):
        return keeps_norms(model, terms=terms, scale=cell.scale, same_text="exclude")
    options: dict[str, Any] = {"hardness_strength": cell.hardness, "same_text": "exclude"}
    if cell.loss == "Cosine, classes":
        options["labels"] = "classes"
    elif cell.loss == "SIGReg":
        options["regularizers"] = [(stm.SIGReg(1024), 0.05)]
    return stm.CosineRankingLoss(model, terms=terms, **options)


def batches(rows: Dataset, size: int, seed: int, no_duplicates: bool) -> Iterator[list[int]]:
    """Row numbers of one step after another, epoch after epoch."""
    generator = torch.Generator().manual_seed(seed)
    sampler = None
    if no_duplicates:
        options = {"generator": generator, "seed": seed, "precompute_hashes": True}
        sampler = NoDuplicatesBatchSampler(rows, size, drop_last=True, **options)
    epoch = 0
    while True:
        if sampler is not None:
            sampler.set_epoch(epoch)
            yield from sampler
        else:
            order = torch.randperm(len(rows), generator=generator).split(size)
            yield from (part.tolist() for part in order if len(part) == size)
        epoch += 1


def trained(cell: Cell, rows: Dataset) -> tuple[SentenceTransformer, float]:
    """The model after training, and its document exponent."""
    torch.manual_seed(cell.seed)
    model = stm.strip_normalize(base_model(cell.base)).train()
    texts = [name for name in rows.column_names if name != "label"]
    columns = [rows[name][:] for name in texts]
    loss = objective(model, cell)
    labels = torch.tensor(rows["label"][:]) if cell.loss == "Cosine, classes" else None
    with stm.trimmed_vocabulary(model, chain(*columns)):
        named = rows if cell.loss == "MNRL, other classes" else rows.select_columns(texts)
        no_duplicates = cell.loss in ("MNRL, NO_DUPLICATES", "MNRL, other classes")
        order = batches(named, cell.batch, cell.seed, no_duplicates)
        fit(cell, loss, columns, order, labels)
    learned = getattr(model[-1], "gamma_document", None)
    own = 0.0 if cell.loss in ("QNorm", "Dot") else 1.0 if learned is None else float(learned)
    return model.eval(), own


def fit(
    cell: Cell,
    loss: nn.Module,
    columns: list[list[str]],
    order: Iterator[list[int]],
    labels: torch.Tensor | None,
) -> None:
    """AdamW without weight decay, a tenth of the steps for warm-up, then down to 0."""
    exponents = [p for name, p in loss.named_parameters() if "gamma" in name]
    others = [p for name, p in loss.named_parameters() if "gamma" not in name]
    groups = [{"params": others}, {"params": exponents, "lr": 1e-2}]
    optimizer = torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=cell.rate, weight_decay=0.0, fused=True
    )
    warmup = max(1, cell.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warmup, (cell.steps - i) / (cell.steps - warmup))
    )
    for _, batch in zip(range(cell.steps), order, strict=False):
        inputs = [loss.model.preprocess([texts[i] for i in batch]) for texts in columns]
        found = loss(inputs, None if labels is None else labels[batch])
        optimizer.zero_grad()
        (sum(found.values()) if isinstance(found, dict) else found).backward()
        nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def measure(cell: Cell, folder: Path | None) -> Figures:
    """The scores on dev and, packed, those of every test query.

    Dev chooses the document exponent, among that of the training and others.
    """
    found = data(cell.data, folder)
    began = time.perf_counter()
    model, own = trained(cell, found.rows)
    seconds = time.perf_counter() - began
    dev = stm.encode(model, found.dev, batch_size=256)
    exponents = [own] if own == 1 else [own, *EXPONENTS]
    sweep = dev.sweep(exponents)
    chosen = max(sweep, key=lambda exponent: sweep[exponent].mean)
    test = stm.encode(model, found.test, batch_size=256)
    figures: Figures = {
        "exponents": {"trained": own, "chosen": chosen},
        "dev": {size: round(float(x.mean()), 5) for size, x in sizes(dev, chosen).items()},
        "test": {size: packed(x) for size, x in sizes(test, chosen).items()},
        "as trained": packed(sizes(test, own)["full"]),
        "CV": {name: spread(getattr(test, name)) for name in ("queries", "documents")},
        "seconds": round(seconds, 1),
    }
    return figures | forgetting(model, cell, chosen, folder) if cell.elsewhere else figures


def spread(embeddings: torch.Tensor) -> float:
    """The coefficient of variation of the norms of (n, D)."""
    lengths = stm.geometry.norms(embeddings)
    return round(float(lengths.std() / lengths.mean()), 4)


def forgetting(
    model: SentenceTransformer, cell: Cell, exponent: float, folder: Path | None
) -> Figures:
    """The scores in other domains, and all of these half of the way to the base."""
    elsewhere = others(cell, folder)
    figures: Figures = {"others": of_tasks(model, elsewhere, stm.Similarity(1.0, exponent))}
    if cell.loss != "Cosine" or len(cell.temperatures) > 1:
        return figures
    found = data(cell.data, folder)
    elsewhere["in domain"] = found.test
    start, end, dev = base_model(cell.base).state_dict(), deepcopy(model.state_dict()), {}
    for weight in (0.25, 0.5, 0.75, 1.0):
        model.load_state_dict({name: torch.lerp(start[name], end[name], weight) for name in end})
        per_query = of_tasks(model, {"dev": found.dev}, stm.COSINE)["dev"]
        dev[weight] = float(unpacked(per_query).mean())
        if weight == 0.5:
            figures["half"] = of_tasks(model, elsewhere, stm.COSINE)
    return figures | {"merged, weight": max(dev, key=dev.__getitem__)}


def others(cell: Cell, folder: Path | None) -> dict[str, RetrievalData]:
    """Names of the other source's intents, and XQuAD."""
    other = "clinc names" if cell.data.startswith("banking") else "banking names"
    return {
        other: data(other, folder).test,
        "XQuAD": xquad.find_paragraph(Path(folder or ".") / "xquad_en.json"),
    }


def of_tasks(
    model: SentenceTransformer, tasks: dict[str, RetrievalData], similarity: stm.Similarity
) -> dict[str, str]:
    """nDCG@10 of every query, packed."""
    found = {}
    for name, task in tasks.items():
        if isinstance(model[0], Transformer):
            model.max_seq_length = 256 if name == "XQuAD" else 32  # its documents are paragraphs
        found[name] = packed(stm.encode(model, task, similarity, batch_size=64).search(10).ndcg)
    return found


def sizes(encoded: EncodedTask, exponent: float) -> dict[str, NDArray[np.float64]]:
    """nDCG@10 of every query in full and at a quarter of the dimensions."""
    parts = {"full": encoded, "quarter": encoded.prefix(encoded.queries.shape[1] // 4)}
    return {name: part.sweep([exponent])[exponent].ndcg for name, part in parts.items()}


def packed(values: NDArray[np.float64]) -> str:
    """Numbers from 0 to 1, to the nearest 1/200, as text."""
    return base64.b64encode(
        zlib.compress(np.rint(200 * values).astype(np.uint8).tobytes(), 9)
    ).decode()


def unpacked(text: str) -> NDArray[np.float64]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8) / 200

"""A teacher whose scores hold more than an embedding, for the static table.

Four teachers. "XQuAD": w · BM25(q, d) / BM25(q, q) + (1 - w) · cosine of all-MiniLM-L6-v2,
question -> paragraph. "trained": the same with MiniLM trained on Banking77, question -> questions
of the intent. Dev chooses w. "classes": 1 for the same intent and 0 for others. "graded classes":
the same plus the cosine of MiniLM as published, so that positives have grades. Every pair has
seven documents more, drawn from the first hundred of its teacher, for both of the last two by
grades.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.studies.known.training import (
    Cell,
    Data,
    base_model,
    batches,
    data,
    fit,
    scored,
    static_model,
    trained,
)
from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss, MarginMSELoss
from sentence_transformers.util import pairwise_cos_sim
from sklearn.feature_extraction.text import CountVectorizer
from torch import Tensor, nn

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask

ENCODER = Cell("banking questions", "Cosine, classes", (0.05,), base="MiniLM", steps=100, rate=2e-4)
TEACHERS = ("XQuAD", "trained", "graded classes", "classes")
LOSSES = {  # name: (which scores the targets have, share of the teacher)
    "teacher, own": ("own", 1.0),
    "half, own": ("own", 0.5),
    "teacher, all": ("all", 1.0),
    "half, all": ("all", 0.5),
}


def cells(teacher: str) -> dict[str, list[Cell]]:
    """The rows of the table: each with the temperatures among which dev chooses."""
    one = Cell(f"graded, {teacher}", "", (0.05,))
    name, tried = "banking questions", (0.05, 0.1)
    if teacher == "XQuAD":  # 584 pairs
        name, tried = "XQuAD", (0.02, 0.05)
        one = replace(one, steps=100, rate=0.01)
    taus = [replace(one, temperatures=(tau,)) for tau in tried]
    both = [replace(cell, teacher=tau) for cell in taus for tau in (0.03, 0.1)]
    control = [replace(cell, data=name) for cell in taus]
    rows = {"Cosine": control, "Cosine, mined": taus, "MarginMSE": [one]}
    if teacher != "XQuAD":
        rows["Cosine, classes"] = control
    rows |= dict.fromkeys([*LOSSES, "DistillKL"], both)
    if teacher == "classes":
        rows = {"Cosine": control} | dict.fromkeys([*LOSSES][::2], both)
    return {loss: [replace(cell, loss=loss) for cell in found] for loss, found in rows.items()}


@dataclass(frozen=True)
class Teacher:
    """Inner products of these embeddings, (n, T), are its scores."""

    place: dict[str, int]  # row of a text
    queries: Tensor
    documents: Tensor

    def task(self, given: RetrievalData) -> EncodedTask:
        rows = [self.place[text] for text in given.asked.values()]
        columns = [self.place[given.corpus[key]] for key in given.document_ids]
        return EncodedTask(self.queries[rows], self.documents[columns], given.columns)


def ndcg(task: EncodedTask) -> float:
    return float(task.ndcg(task.top(stm.DOT)).mean())


@cache
def teacher_of(name: str, folder: Path | None) -> tuple[Teacher, Data, dict[str, float]]:
    """The teacher, the rows with its documents, and its figures."""
    found = data("XQuAD" if name == "XQuAD" else "banking questions", folder)
    corpus = list(dict.fromkeys(found.test.corpus.values()))
    asked = [*found.rows["anchor"], *found.dev.queries.values(), *found.test.queries.values()]
    texts = list(dict.fromkeys([*corpus, *asked]))
    model = trained(ENCODER, found.rows)[0] if name == "trained" else base_model("MiniLM")
    model.max_seq_length = 256
    dense = model.encode(texts, batch_size=64, convert_to_tensor=True, normalize_embeddings=True)

    counts = CountVectorizer(token_pattern=r"\w+").fit(corpus).transform(texts).toarray()
    known = counts[: len(corpus)]
    number = (known > 0).sum(axis=0)  # of documents with a word
    idf = np.log(1 + (len(corpus) - number + 0.5) / (number + 0.5))
    lengths = counts.sum(axis=1, keepdims=True) / known.sum(axis=1).mean()
    lexical = torch.from_numpy(idf * counts / (counts + 1.5 * (0.25 + 0.75 * lengths))).float()
    words = torch.from_numpy(counts).float()
    words /= (words * lexical).sum(dim=1, keepdim=True).clamp(min=1e-6)

    place = {text: i for i, text in enumerate(texts)}
    fused = {}
    for weight in (0.0, 0.25, 0.5, 0.75, 1.0):
        queries = torch.cat([(1 - weight) * dense, weight * words], dim=1)
        fused[weight] = Teacher(place, queries, torch.cat([dense, lexical], dim=1))
    on_dev = {weight: ndcg(x.task(found.dev)) for weight, x in fused.items()}
    weight = max(on_dev, key=lambda w: on_dev[w])
    teacher = fused[weight]
    figures = {"weight": weight, "dev": on_dev, "test": ndcg(teacher.task(found.test))}
    if name.endswith("classes"):
        intents = torch.zeros(len(texts), 77)
        numbers = torch.tensor([place[text] for text in found.rows["anchor"]])
        intents[numbers, torch.tensor(found.rows["label"][:])] = 1.0
        both = (torch.cat([x, intents], dim=1) for x in (teacher.queries, teacher.documents))
        teacher, figures = Teacher(place, *both), {}

    rng = np.random.default_rng(0)
    anchors = found.rows["anchor"][:]
    mined = []
    for part in torch.tensor([place[text] for text in anchors]).split(1024):
        scores = teacher.queries[part] @ teacher.documents[: len(corpus)].T
        if name != "XQuAD":
            scores[torch.arange(len(part)), part] = -torch.inf  # the question itself
        mined += [rng.choice(row, 7, replace=False) for row in scores.topk(100).indices.numpy()]
    rows = found.rows
    for column, numbers in enumerate(zip(*mined, strict=True), start=1):
        rows = rows.add_column(f"negative_{column}", [texts[i] for i in numbers])
    if name == "classes":  # the same documents, without grades
        teacher = Teacher(place, intents, intents)
    return teacher, replace(found, rows=rows), figures


def objective(model: Any, cell: Cell) -> nn.Module:
    tau = cell.temperatures[0]
    if cell.loss == "MarginMSE":
        return MarginMSELoss(model, similarity_fct=pairwise_cos_sim)
    if cell.loss == "DistillKL":
        return DistillKLDivLoss(
            model, pairwise_cos_sim, student_temperature=tau, teacher_temperature=cell.teacher
        )
    if cell.loss not in LOSSES:
        return stm.CosineRankingLoss(model, temperature=tau)
    return stm.CosineRankingLoss(
        model,
        temperature=tau,
        labels="teacher",
        teacher_temperature=cell.teacher,
        teacher_weight=LOSSES[cell.loss][1],
    )


def measure(cell: Cell, folder: Path | None) -> dict[str, Any]:
    """As training.measure, with the teacher's own figures."""
    teacher, found, of_teacher = teacher_of(cell.data.removeprefix("graded, "), folder)
    kind = LOSSES.get(cell.loss, ("own", 0.0))[0]
    torch.manual_seed(cell.seed)
    model = stm.strip_normalize(static_model()).train()
    names = [name for name in found.rows.column_names if name != "label"]
    columns = [found.rows[name][:] for name in names]
    places = torch.tensor([[teacher.place[text] for text in texts] for texts in columns])

    def labels(batch: list[int]) -> Tensor:
        queries = teacher.queries[places[0, batch]]  # (B, T)
        documents = teacher.documents[places[1:, batch]].transpose(0, 1)  # (B, n, T)
        if kind == "own":
            return (documents @ queries[:, :, None])[:, :, 0]
        return torch.cat([queries[:, None], documents], dim=1)

    began = time.perf_counter()
    takes = (lambda _: None) if cell.loss == "Cosine, mined" else labels
    fit(cell, objective(model, cell), columns, batches(found.rows, cell), takes)
    seconds = round(time.perf_counter() - began, 1)
    figures = scored(model.eval(), 1.0, found)
    return asdict(cell) | figures | {"teacher scores": of_teacher, "seconds": seconds}

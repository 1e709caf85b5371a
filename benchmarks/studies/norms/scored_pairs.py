"""Scored pairs at two scales, as in Table 5 of arXiv 2602.09229.

    python benchmarks/studies/norms/scored_pairs.py [--stsb FOLDER]

Pairs of sentences from Python's own documentation, half of them neighbours, are scored by the
cosine of all-MiniLM-L6-v2 between 0 and 1; the student is wordllama's static table. That is
distillation of a cosine, which favours cosine: what can be compared is the scale, within a
similarity. With --stsb it learns one epoch of STS-B, stsb_en_train.csv of a folder, for
stsb_en_test.csv: rows of two sentences and a score from 0 to 5, without a header.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from benchmarks.data.docstrings import bundled_minilm
from benchmarks.studies.cells import prepare_process
from benchmarks.studies.estimates import margin, markdown
from benchmarks.studies.models import static_model
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

import st_magnitude as stm
from st_magnitude import geometry

# Spearman of Contriever, Table 5
PAPER = {"cosine": "78.8", "dot": "78.4", "qnorm": "41.3", "dnorm": "37.1"}
SETTINGS = [("cosine", "auto")]
SETTINGS += [(name, scale) for name in ("dot", "qnorm", "dnorm") for scale in ("auto", 0.01)]
COMPARED = (
    *((f"{name} auto", f"{name} 0.01") for name in ("dot", "qnorm", "dnorm")),
    *((f"{name} auto", "dot auto") for name in ("cosine", "qnorm", "dnorm")),
)
STEPS = 600

Pairs = tuple[list[str], list[str], NDArray[np.float64]]


def sentences() -> list[str]:
    """Sentences of Python's documentation of its language, which is installed with it."""
    text = re.sub(r"[*`_|+=-]+", " ", " ".join(topics.values()))
    found = (re.sub(r"\s+", " ", s).strip() for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text))
    return list(dict.fromkeys(s for s in found if 6 <= len(s.split()) <= 30))


def scored_pairs() -> Pairs:
    texts = sentences()[:3000]
    teacher = SentenceTransformer(bundled_minilm(), device="cpu")
    teacher.max_seq_length = 48
    x = teacher.encode(texts, convert_to_tensor=True, batch_size=32)
    generator = torch.Generator().manual_seed(0)
    cosines = (x @ x.T).fill_diagonal_(-1)
    near = cosines.topk(8, dim=1).indices[:, 2::2]  # (n, 3): the 3rd, 5th and 7th neighbour
    far = torch.randint(len(x), near.shape, generator=generator)
    first = torch.arange(len(x)).repeat_interleave(6)
    second = torch.cat([near, far], dim=1).flatten()
    keep = first != second
    scores = (x[first] * x[second]).sum(dim=1).clamp(0, 1)[keep].numpy()
    return [texts[i] for i in first[keep]], [texts[i] for i in second[keep]], scores


def learn(loss: stm.SimilarityMSELoss, pairs: Pairs, batches: Iterable[NDArray[np.int64]]) -> None:
    """A step for each batch of rows."""
    a, b, scores = pairs
    optimizer = torch.optim.Adam(loss.model.parameters(), lr=1e-2)
    for rows in batches:
        columns = [dict(loss.model.preprocess([side[i] for i in rows])) for side in (a, b)]
        optimizer.zero_grad()
        loss(columns, torch.tensor(scores[rows])).backward()
        optimizer.step()


def student(name: str, scale: Any, seed: int, pairs: Pairs) -> dict[str, float]:
    """Metrics of a static table that learned four fifths of the texts, on the others."""
    a, b, scores = pairs
    texts = sorted(set(a))
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(texts), len(texts) // 5, replace=False)
    held_out = {texts[i] for i in chosen.tolist()}
    sides = [{x in held_out, y in held_out} for x, y in zip(a, b, strict=True)]
    train, test = ([i for i, found in enumerate(sides) if found == {x}] for x in (False, True))
    torch.manual_seed(seed)
    model = static_model()
    loss = stm.SimilarityMSELoss(model, name, scale=scale)
    learn(loss, pairs, [rng.choice(train, 64) for _ in range(STEPS)])
    x, y = (model.encode([side[i] for i in test]) for side in (a, b))
    similarity = stm.Similarity.named(name)
    predicted = similarity.pairwise(x, y)
    # mean |s(a, b) - s(b, a)| over the deviation of s: Beyond the Unit Hypersphere, Cor. 6.1
    difference = (predicted - similarity.pairwise(y, x)).abs().mean()
    gap = float(difference / predicted.std(correction=0))
    spearman = geometry.spearman(predicted, scores[test])
    return {"matched_spearman": spearman, "symmetry_gap": gap}


def regression() -> dict[str, list[dict[str, float]]]:
    """Spearman and symmetry gap of three seeds by similarity and scale."""
    pairs = scored_pairs()
    return {
        f"{name} {scale}": [student(name, scale, seed, pairs) for seed in range(3)]
        for name, scale in SETTINGS
    }


def tables() -> list[str]:
    found, rows = regression(), []
    spearman = {key: 100 * np.array([x["matched_spearman"] for x in y]) for key, y in found.items()}
    for key, values in spearman.items():
        gap = np.mean([run["symmetry_gap"] for run in found[key]])
        paper = "" if key.endswith("auto") and key[0] != "c" else PAPER[key.split()[0]]
        rows.append([key, f"{values.mean():.1f} ± {margin(values):.1f}", f"{gap:.3f}", paper])
    lines = markdown(["similarity, scale", "Spearman", "symmetry gap", "paper, .01"], rows)
    for first, second in COMPARED:
        gain = spearman[first] - spearman[second]
        lines.append(f"{first} less {second}: {gain.mean():+.1f} ± {margin(gain):.1f}")
    return lines


def stsb_pairs(path: Path) -> Pairs:
    with path.open(encoding="utf-8", newline="") as file:
        a, b, scores = zip(*csv.reader(file), strict=True)
    return list(a), list(b), np.array(scores, dtype=float) / 5


def stsb(folder: Path) -> list[str]:
    """Spearman on the test of STS-B after an epoch, mean of three seeds, in points."""
    train, (a, b, scores) = (stsb_pairs(folder / f"stsb_en_{x}.csv") for x in ("train", "test"))
    rows = []
    for name in ("cosine", "dot", "qnorm", "dnorm"):
        similarity, found = stm.Similarity.named(name), []
        for seed in range(3):
            model = static_model()
            before = similarity.pairwise(model.encode(a), model.encode(b))
            order = np.random.default_rng(seed).permutation(len(train[0]))
            learn(
                stm.SimilarityMSELoss(model, name), train, np.array_split(order, len(order) // 32)
            )
            after = similarity.pairwise(model.encode(a), model.encode(b))
            found.append(100 * geometry.spearman(after, scores))
        untrained = f"{100 * geometry.spearman(before, scores):.1f}"
        rows.append([name, untrained, f"{np.mean(found):.1f} ± {margin(np.array(found)):.1f}"])
    return markdown(["similarity", "untrained", "trained"], rows)


if __name__ == "__main__":
    prepare_process()
    parser = argparse.ArgumentParser()
    parser.add_argument("--stsb", type=Path, metavar="FOLDER")
    folder = parser.parse_args().stsb
    print("\n".join(tables() if folder is None else stsb(folder)))

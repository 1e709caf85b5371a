"""The embedding-norm effect and the interventions against it, next to the papers' figures.

    python benchmarks/norms.py [--quick] [--output runs/norms]

Six parts, all on one core, no download. ± is half a 95 % t interval over seeds:

1. Simulations of *On the Importance of Embedding Norms in Self-Supervised Learning* (Draganov et al.), App. B.1: steps
   to a mean cosine of .999 against norm and angle, with GradScale at powers 1 and 2 and with weight decay (Table 1);
   how often, and by how much, the bound of Theorem 3.4 is exceeded, for acute and obtuse angles.
2. App. B.2: latent classes, supervised InfoNCE, a two-layer network: norm against density, norm against frequency.
3. SimCLR on scikit-learn's digits (8 x 8 images; views by shift, noise and dropped pixels), balanced and with n_i
   proportional to 1.5^-i, SGD and AdamW: default, cut-init at c = 3 (of all weights, and of the last layer only),
   GradScale at power 1 (SGD: learning rate / 6, as in the paper). kNN accuracy of the encoder's output on held-out
   digits, mean norm of the projector's output. The paper has ResNet-50 on CIFAR: agreement in sign is all that can be
   asked. Then norms as confidence.
4. Scored pairs at two scales (Table 5 of arXiv 2602.09229). STS-B cannot be reached offline. In its place stand pairs
   of sentences from Python's own documentation, half of them neighbours, scored by the cosine of all-MiniLM-L6-v2
   between 0 and 1; the student is wordllama's static table. That is distillation of a cosine, which favours cosine:
   what can be compared is the scale, within a similarity.
5. The share of a training step of all-MiniLM-L6-v2 (batches of 32 pairs) that NormMonitor takes.
6. What cut-init does to all-MiniLM-L6-v2, at the output and everywhere.

Expected before measuring: steps grow with the square of the norm, with its first power under GradScale at power 1, not
at all at power 2; weight decay does not keep the square, because it shrinks norms exponentially; Theorem 3.4 fails for
obtuse angles; density and frequency raise norms; interventions help more on imbalanced data; lambda = 0.01 costs
one-sided similarities most; the monitor takes less than 2 %.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from docstrings import bundled_minilm
from scipy import stats
from scipy.stats import mode
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sklearn.datasets import load_digits
from sklearn.neighbors import NearestNeighbors
from surface import auroc
from temperature import static_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import PrinterCallback

import st_magnitude as stm
from st_magnitude import geometry
from st_magnitude.surgery.normalize import PROBE


def margin(values: Any) -> float:
    """Half a 95 % t interval of the mean; nan for one value."""
    n = len(values)
    return float(stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / n**0.5) if n > 1 else float("nan")


# --- 1. pairs of points ---------------------------------------------------------------------------------------------


def pairs(n: int = 500, dim: int = 20) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (normalize(torch.randn(n, dim, generator=generator, dtype=torch.float64)) for _ in range(2))
    return x, y


def steps_to_converge(
    norm: float, angle: float = 0.0, power: float = 0.0, decay: float = 0.0, lr: float = 0.1, limit: int = 20_000
) -> str:
    """App. B.1: one side is fixed, the other climbs the cosine by gradient descent; z loses decay · |z|²."""
    fixed, z = pairs()
    z = norm * (z * (1 - abs(angle)) + fixed * angle)
    z = z * norm / z.norm(dim=1, keepdim=True)
    for step in range(limit):
        norm = z.norm(dim=1, keepdim=True)
        unit = z / norm
        cosine = (unit * fixed).sum(dim=1, keepdim=True)
        if cosine.mean() > 0.999:
            return str(step)
        if not torch.isfinite(norm).all() or norm.mean() > 1e6 or norm.mean() < 1e-6:
            return "divergence"
        z = z + lr * (norm**power * (fixed - cosine * unit) / norm - 2 * decay * z)
    return f"> {limit}"


def theorem(norm: float = 4.0, lr: float = 0.5) -> str:
    """Share of pairs whose change of cosine exceeds 2 lr sin² / norm², and the largest excess."""
    x, y = pairs(100_000, 4)
    cosine = (x * y).sum(dim=1, keepdim=True)
    a, b = norm * x + lr / norm * (y - cosine * x), norm * y + lr / norm * (x - cosine * y)
    gained = nn.functional.cosine_similarity(a, b)[:, None] - cosine
    over = gained / (2 * lr * (1 - cosine**2) / norm**2)  # 1: at the bound
    acute, obtuse = ((over[side] >= 1).double().mean() for side in (cosine >= 0, cosine < 0))
    return f"{acute:.1%} of acute pairs, {obtuse:.1%} of obtuse ones, by {over.max() - 1:.1%} at most"


def simulations(_quick: bool) -> dict[str, Any]:
    norms = (1, 2, 4, 8)
    found: dict[str, Any] = {
        "GradScale power": {p: [int(steps_to_converge(n, power=p)) for n in norms] for p in (0, 1, 2)},
        "angle": {a: [int(steps_to_converge(n, a)) for n in (1, 4)] for a in (-0.9, -0.5, 0.0, 0.5)},
        "decay": {d: [steps_to_converge(n, decay=d, lr=0.02) for n in (1, 4, 7)] for d in TABLE_1},
        "rate 10": {d: [steps_to_converge(n, decay=d, lr=10) for n in (1, 4, 7)] for d in (0, 0.5, 1)},
    }
    print("## Steps to a mean cosine of .999, learning rate .1, starting at norm 1, 2, 4, 8\n")
    for power, steps in found["GradScale power"].items():
        slope = np.polyfit(np.log(norms), np.log(steps), 1)[0]
        expected = {0: "2 (Theorem 3.4)", 1: "1", 2: "0"}[power]
        print(f"- power {power}: {steps}; exponent of the norm {slope:.2f}, expected {expected}")
    print("\nStarting at norm 1 and 4, by angle (alpha = -.9: nearly opposite):\n")
    for angle, steps in found["angle"].items():
        print(f"- alpha {angle:+.1f}: {steps}")
    print("\nWith weight decay, norms 1, 4, 7, learning rate .02, which is App. B.1's rate of 10 if its loss is the")
    print("mean of its 500 pairs (the paper's Table 1 behind the bar; ratio of 7 to 1 in brackets):\n")
    for decay, steps in found["decay"].items():
        paper = TABLE_1[decay]
        print(f"- {decay:4.1f}: {', '.join(steps)}{ratio(steps)} | {', '.join(paper)}{ratio(paper)}")
    rates = "; ".join(f"decay {decay}: {', '.join(steps)}" for decay, steps in found["rate 10"].items())
    print(f"\nThe same with a rate of 10 for each pair: {rates}")
    found["theorem"] = theorem()
    print("\nThe bound of Theorem 3.4, norm 4, learning rate .5, random pairs in four dimensions, is exceeded by")
    print(f"{found['theorem']}\n")
    return found


TABLE_1 = {
    0.5: ["64", "526", "1080"],
    1.0: ["49", "318", "610"],
    10.0: ["divergence"] * 3,
}


def ratio(steps: list[str]) -> str:
    return f" ({int(steps[2]) / int(steps[0]):.1f})" if all(s.isdigit() for s in steps) else ""


# --- 2. latent classes ----------------------------------------------------------------------------------------------


def latent(imbalanced: bool, epochs: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings before and after training, and classes: App. B.2."""
    torch.manual_seed(seed)
    counts = [2000, 1000, 500, 500] if imbalanced else [1000] * 4
    centers = normalize(torch.randn(4, 11))
    classes = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    points = normalize(centers[classes] + 0.1**0.5 * torch.randn(len(classes), 11)) @ torch.randn(11, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 11))
    before = model(points).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    members = [torch.where(classes == c)[0] for c in range(4)]
    for _ in range(epochs):
        for rows in torch.randperm(len(points)).split(128):
            other = torch.stack([members[c][torch.randint(len(members[c]), ())] for c in classes[rows].tolist()])
            loss = stm.infonce(model(points[rows]), model(points[other]), [stm.Term(temperature=0.5)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return before, model(points).detach(), classes


def latent_classes(quick: bool) -> dict[str, Any]:
    epochs, seeds = (10, 2) if quick else (50, 5)
    density, frequency = [], []
    for seed in range(seeds):
        for when in (0, 1):
            x = latent(False, epochs, seed)[when]
            unit = normalize(x)
            tenth = (unit @ unit.T).topk(11, dim=1).values[:, -1]  # cosine of the 10th neighbour: high is dense
            density.append(stm.geometry.spearman(stm.geometry.norms(x), tenth))
        first, last, classes = latent(True, epochs, seed)
        frequency.append([[x[classes == c].norm(dim=1).mean().item() for c in range(4)] for x in (first, last)])
    means = np.mean(frequency, axis=0)
    changes = np.subtract(density[1::2], density[::2])
    after = np.array(frequency)[:, 1]
    excess = after[:, 0] - after[:, 2:].mean(axis=1)  # the frequent class over the two rare ones
    print(f"## Latent classes, {epochs} epochs, {seeds} seeds\n")
    print(
        f"- Spearman of norm and density: {np.mean(density[::2]):+.2f} before training, {np.mean(density[1::2]):+.2f} "
        f"after, change {changes.mean():+.2f} ± {margin(changes):.2f}; the paper shows a rising cloud, no number"
    )
    print(
        "- mean norm of classes with share 1/2, 1/4, 1/8, 1/8: "
        + ", ".join(f"{m:.2f}" for m in means[1])
        + f"; first less mean of the last two {excess.mean():+.1f} ± {margin(excess):.1f}"
    )
    print("  before training: " + ", ".join(f"{m:.2f}" for m in means[0]) + "; the paper: frequent classes higher\n")
    return {"density": density, "frequency": np.asarray(frequency).tolist()}


# --- 3. SimCLR on digits --------------------------------------------------------------------------------------------


class SimCLR(nn.Module):
    """Encoder and projector with BatchNorm, as in the paper's networks: the norm comes from the last layers."""

    def __init__(self) -> None:
        super().__init__()

        def block(a: int, b: int) -> list[nn.Module]:
            return [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()]

        self.encoder = nn.Sequential(*block(64, 256), *block(256, 256))
        self.projector = nn.Sequential(*block(256, 128), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.projector(self.encoder(x))  # (B, 64)


def view(x: Tensor) -> Tensor:
    """A random shift by a pixel, noise, and a tenth of the pixels dropped: (B, 64) -> (B, 64)."""
    padded = nn.functional.pad(x.view(-1, 8, 8), (1, 1, 1, 1))
    places = torch.randint(3, (len(x), 2))
    shifted = torch.stack([image[i : i + 8, j : j + 8] for image, (i, j) in zip(padded, places.tolist(), strict=True)])
    noisy = shifted.flatten(1) + 0.15 * torch.randn(len(x), 64)
    return noisy * (torch.rand_like(noisy) > 0.1)


def nt_xent(a: Tensor, b: Tensor, temperature: float = 0.5) -> Tensor:
    unit = normalize(torch.cat([a, b]))  # (2 B, D)
    logits = (unit @ unit.T / temperature).fill_diagonal_(-torch.inf)
    n = len(a)
    return cross_entropy(logits, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


def simclr(x: Tensor, optimizer: str, variant: str, epochs: int, seed: int, monitor: stm.NormMonitor | None) -> SimCLR:
    torch.manual_seed(seed)
    model, lr = SimCLR(), {"SGD": 0.1, "AdamW": 1e-3}[optimizer]
    if variant == "cut":
        stm.cut_init(model, 3.0, where="all")
    if variant == "cut output":
        stm.cut_init(model, 3.0, where=lambda name, _: name.startswith("projector.3."))
    if variant == "GradScale":
        stm.attach_grad_scale(model.projector, 1.0)
        lr /= 6 if optimizer == "SGD" else 1
    updater: torch.optim.Optimizer
    if optimizer == "SGD":
        updater = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-6)
    else:
        updater = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-2)
    size = min(256, len(x) // 2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        updater, max_lr=lr, total_steps=epochs * (len(x) // size), pct_start=0.1, cycle_momentum=False
    )
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(size)[: len(x) // size]:
            a, b = model(view(x[rows])), model(view(x[rows]))
            loss = nt_xent(a, b)
            a.retain_grad()
            b.retain_grad()
            updater.zero_grad()
            loss.backward()
            if monitor is not None:
                monitor.update(queries=a, documents=b, lr=schedule.get_last_lr()[0])
            updater.step()
            schedule.step()
    return model.eval()


def knn(train: Tensor, train_labels: Tensor, test: Tensor, labels: Tensor, k: int = 20) -> float:
    nearest = (normalize(test) @ normalize(train).T).topk(min(k, len(train)), dim=1).indices
    votes = nn.functional.one_hot(train_labels[nearest], 10).sum(dim=1)
    return (votes.argmax(dim=1) == labels).double().mean().item() * 100


def digits(imbalanced: bool, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = load_digits()
    x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, test = order[360:], order[:360]
    if imbalanced:
        train = torch.cat([train[y[train] == c][: max(2, int(140 * 1.5**-c))] for c in range(10)])
    return x[train], y[train], x[test], y[test]


# The paper's kNN accuracy less the default's, SimCLR on Cifar-10: Table 4 (SGD, epoch 1000), Table 5 (imbalanced, epoch
# 500), Table 6 (Adam, epoch 100)
PAPER = {
    ("SGD", "balanced", "cut"): 0.5,
    ("SGD", "balanced", "GradScale"): 0.5,
    ("SGD", "imbalanced", "cut"): 4.6,
    ("SGD", "imbalanced", "GradScale"): 4.8,
    ("AdamW", "balanced", "cut"): 0.3,
    ("AdamW", "balanced", "GradScale"): 0.9,
}


@torch.no_grad()
def measured(model: SimCLR, x: Tensor, y: Tensor, test: Tensor, labels: Tensor) -> tuple[float, float]:
    return knn(model.encoder(x), y, model.encoder(test), labels), model(x).norm(dim=1).mean().item()


def interventions(quick: bool, output: Path) -> dict[str, Any]:
    epochs, seeds = (20, 2) if quick else (100, 5)
    found: dict[str, list[tuple[float, float]]] = {}
    paths = []
    print(f"## SimCLR on digits, {epochs} epochs, {seeds} seeds: kNN accuracy of the encoder, norm of the projection\n")
    print("| optimizer | data | variant | kNN accuracy | gain | paper's gain | sign | norm |")
    print("| --- | --- | --- | ---: | ---: | ---: | --- | ---: |")
    for optimizer in ("SGD", "AdamW"):
        for data in ("balanced", "imbalanced"):
            base = np.zeros(seeds)
            for variant in ("default", "cut", "cut output", "GradScale"):
                runs = []
                for seed in range(seeds):
                    x, y, test, labels = digits(data == "imbalanced", seed)
                    watch = (optimizer, data, seed) == ("SGD", "balanced", 0)
                    name = variant.lower().replace(" ", "_")
                    file = output / f"simclr_{name}.csv"
                    file.unlink(missing_ok=True) if watch else None
                    monitor = stm.NormMonitor(every=5, csv=file) if watch else None
                    model = simclr(x, optimizer, variant, epochs, seed, monitor)
                    if monitor is not None:
                        start, *_, end = (row["query_norm_mean"] for row in monitor.rows)
                        paths.append(f"{variant} {start:.1f} -> {end:.1f}")
                        table = pd.DataFrame(monitor.rows).filter(regex="^step$|^query_")
                        axes = table.plot(x="step", subplots=True, figsize=(6, 12), title=f"SimCLR, SGD, {variant}")
                        axes[0].figure.savefig(output / f"simclr_{name}.png", dpi=150)
                    runs.append(measured(model, x, y, test, labels))
                found[f"{optimizer}, {data}, {variant}"] = runs
                accuracy, norm = np.array(runs).T
                line = f"| {optimizer} | {data} | {variant} | {accuracy.mean():.1f} | "
                if variant == "default":
                    base = accuracy
                    print(line + f"| | | {norm.mean():.1f} |", flush=True)
                    continue
                gain, paper = accuracy - base, PAPER.get((optimizer, data, variant))
                clear = abs(gain.mean()) > margin(gain)
                agrees = "agrees" if paper and paper * gain.mean() > 0 else "disagrees"
                sign = "" if paper is None else agrees if clear else "unclear"
                shown = "" if paper is None else f"{paper:+.1f}"
                print(
                    f"{line}{gain.mean():+.1f} ± {margin(gain):.1f} | {shown} | {sign} | {norm.mean():.1f} |",
                    flush=True,
                )
    print(f"\nMean norm in training, SGD, balanced, first seed, first and last step seen: {', '.join(paths)}.")
    print("\nThe paper's final norms under Adam (Table S4): default 81.0, cut 2.1, GradScale 174.8.\n")
    return found


def novelty(inside: Any, outside: Any) -> tuple[float, float]:
    """Mean norm outside the training domain over the mean inside, and the AUROC of the norm (Fig. 3 and S5)."""
    return float(np.mean(outside) / np.mean(inside)), auroc(inside, outside)


def knn_accuracy_by_norm(
    embeddings: Any, labels: Any, k: int, num_buckets: int, min_rows: int
) -> list[tuple[float, float]]:
    """Lower end and accuracy of every bucket of norms: (n, D), (n,) -> buckets in rising order of the norm.

    Norms are divided by the largest one and sorted into buckets of equal width; buckets of fewer than ``min_rows`` rows
    are left out. The majority of its k nearest other rows under cosine classifies a row (Fig. 4 left; k = 200 in the
    paper's App. C.1).
    """
    sizes, classes = stm.geometry.norms(embeddings), np.unique(np.asarray(labels), return_inverse=True)[1]
    nearest = NearestNeighbors(n_neighbors=k, metric="cosine").fit(np.asarray(embeddings))
    neighbours = nearest.kneighbors(return_distance=False)  # (n, k): without X, no row is its own neighbour
    is_right = mode(classes[neighbours], axis=1).mode == classes
    bucket = np.clip(np.ceil(sizes / sizes.max() * num_buckets).astype(int) - 1, 0, num_buckets - 1)
    return [
        (i / num_buckets, float(is_right[inside].mean()))
        for i in range(num_buckets)
        if (inside := bucket == i).sum() >= min_rows
    ]


def confidence(quick: bool) -> dict[str, Any]:
    """Trained on 0 to 4: held-out digits of those classes against 5 to 9; accuracy by norm."""
    ratios, areas, trends, untrained = [], [], [], []
    for seed in range(2 if quick else 5):
        x, y, test, labels = digits(False, seed)
        torch.manual_seed(seed)
        control = SimCLR()
        with torch.no_grad():
            for _ in range(100):
                control(view(x[y < 5]))  # the statistics of BatchNorm, and nothing else
            magnitudes = control.eval()(test).norm(dim=1)
        untrained.append(novelty(magnitudes[labels < 5].tolist(), magnitudes[labels >= 5].tolist()))
        model = simclr(x[y < 5], "SGD", "default", 20 if quick else 100, seed, None)
        with torch.no_grad():
            magnitudes = model(test).norm(dim=1)
            found = novelty(magnitudes[labels < 5].tolist(), magnitudes[labels >= 5].tolist())
            both = torch.cat([x, test])
            buckets = knn_accuracy_by_norm(model(both), torch.cat([y, labels]), k=50, num_buckets=20, min_rows=50)
        ratios.append(found[0])
        areas.append(found[1])
        if len(buckets) > 1:
            trends.append(stm.geometry.spearman(*zip(*buckets, strict=True)))
    print("## Norm as confidence, trained on digits 0 to 4\n")
    print(
        f"- norm of unseen classes over held-out seen ones {np.mean(ratios):.3f} ± {margin(ratios):.3f}, AUROC "
        f"{np.mean(areas):.3f} ± {margin(areas):.3f}; the paper (Fig. 3): below 1 on CIFAR"
    )
    shown = (f"{np.mean(values):.3f} ± {margin(values):.3f}" for values in zip(*untrained, strict=True))
    print(f"  untrained: {', AUROC '.join(shown)}")
    print(
        f"- Spearman of bucket and kNN accuracy {np.mean(trends):+.2f} ({', '.join(f'{t:+.2f}' for t in trends)}); the "
        "paper (Fig. 4): rising\n"
    )
    return {"ratio": ratios, "auroc": areas, "trend": trends, "untrained": list(zip(*untrained, strict=True))}


# --- 4. scored pairs ------------------------------------------------------------------------------------------------


def sentences() -> list[str]:
    """Sentences of Python's documentation of its language, which is installed with it."""
    text = re.sub(r"[*`_|+=-]+", " ", " ".join(topics.values()))
    found = (re.sub(r"\s+", " ", s).strip() for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text))
    return list(dict.fromkeys(s for s in found if 6 <= len(s.split()) <= 30))


def scored_pairs(quick: bool) -> tuple[list[str], list[str], np.ndarray]:
    texts = sentences()[: 600 if quick else 3000]
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


def regression(
    quick: bool, also: Callable[[SentenceTransformer], dict[str, float]] = lambda model: {}
) -> dict[str, Any]:
    """Spearman and symmetry gap by similarity and scale, for every seed; ``also`` measures more of each model."""
    a, b, scores = scored_pairs(quick)
    texts = sorted(set(a))
    seeds, steps = (1, 80) if quick else (3, 600)
    found: dict[str, list[dict[str, float]]] = {}
    print(f"## Pairs of sentences with a teacher's cosine ({len(a):,} pairs), {steps} steps of 64, {seeds} seed(s)\n")
    print("| similarity | scale | Spearman | symmetry gap | paper, STS-B, lambda .01 |")
    print("| --- | --- | ---: | ---: | ---: |")
    paper = {"cosine": "78.8", "dot": "78.4", "qnorm": "41.3", "dnorm": "37.1"}  # Contriever, Table 5
    for name in paper:
        for scale in ("auto", 0.01):
            if name == "cosine" and scale != "auto":
                continue
            runs = []
            for seed in range(seeds):
                rng = np.random.default_rng(seed)
                held_out = set(rng.choice(len(texts), len(texts) // 5, replace=False).tolist())
                held_out_texts = {texts[i] for i in held_out}
                train = [i for i in range(len(a)) if a[i] not in held_out_texts and b[i] not in held_out_texts]
                test = [i for i in range(len(a)) if a[i] in held_out_texts and b[i] in held_out_texts]
                torch.manual_seed(seed)
                model = static_model()
                loss = stm.SimilarityMSELoss(model, name, scale=scale)  # type: ignore[arg-type]
                optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
                for _ in range(steps):
                    rows = rng.choice(train, 64)
                    columns = [dict(model.preprocess([side[i] for i in rows])) for side in (a, b)]
                    optimizer.zero_grad()
                    loss(columns, torch.tensor(scores[rows])).backward()
                    optimizer.step()
                x, y = (model.encode([side[i] for i in test]) for side in (a, b))
                similarity = stm.Similarity.named(name)
                predicted = similarity.pairwise(x, y)
                metrics = {
                    "matched_spearman": geometry.spearman(predicted, scores[test]),
                    "symmetry_gap": geometry.symmetry_gap(predicted, similarity.pairwise(y, x)),
                }
                runs.append({**metrics, **also(model)})
            found[f"{name} {scale}"] = runs
            mean = {key: np.mean([run[key] for run in runs]) for key in runs[0]}
            shown = "auto" if scale == "auto" else f"{scale:g}"
            spread = margin([run["matched_spearman"] for run in runs])
            print(
                f"| {name} | {shown} | {100 * mean['matched_spearman']:.1f} ± {100 * spread:.1f} | "
                f"{mean['symmetry_gap']:.3f} | {paper[name] if scale != 'auto' or name == 'cosine' else ''} |",
                flush=True,
            )
    spearman = {key: np.array([100 * run["matched_spearman"] for run in runs]) for key, runs in found.items()}
    print("\nDifferences of the same seed:\n")
    for first, second in COMPARED:
        gain = spearman[first] - spearman[second]
        print(f"- {first} less {second}: {gain.mean():+.1f} ± {margin(gain):.1f}")
    print()
    return found


COMPARED = (
    *((f"{name} auto", f"{name} 0.01") for name in ("dot", "qnorm", "dnorm")),
    *((f"{name} auto", "dot auto") for name in ("cosine", "qnorm", "dnorm")),
)


# --- 5. what the monitor costs --------------------------------------------------------------------------------------


def overhead(quick: bool) -> dict[str, Any]:
    """Time inside the monitor's own methods over the time of the steps: no difference of two noisy runs."""
    texts, steps = sentences(), 6 if quick else 20
    model = SentenceTransformer(bundled_minilm(), device="cpu")
    model.max_seq_length = 32
    loss = stm.CosineRankingLoss(model)
    monitor, spent = stm.NormMonitor(loss, every=1), [0.0]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - began

        return call

    for name in ("on_step_begin", "on_step_end", "on_log", "_listen", "_begin_batch"):
        setattr(monitor, name, timed(getattr(monitor, name)))
    arguments = SentenceTransformerTrainingArguments(
        tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=32,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = Dataset.from_dict({"anchor": texts[: 32 * steps], "positive": texts[32 * steps : 64 * steps]})
    trainer = SentenceTransformerTrainer(model, arguments, train_dataset=rows, loss=loss, callbacks=[monitor])
    trainer.remove_callback(PrinterCallback)
    began = time.perf_counter()
    trainer.train()
    total = time.perf_counter() - began
    share = spent[0] / total
    print(f"## NormMonitor on all-MiniLM, batches of 32 pairs: {spent[0] / steps * 1e3:.1f} ms a measured step")
    print(f"of {total / steps * 1e3:.0f} ms,", end=" ")
    print(f"{share:.2%} of training at every=1, about {share / 10:.2%} at every=10 (the default)\n")
    return {"share": share, "milliseconds": spent[0] / steps * 1e3}


# --- 6. what cut-init leaves ----------------------------------------------------------------------------------------


def cuts(_quick: bool) -> dict[str, Any]:
    found = {}
    print("## cut_init of all-MiniLM at c = 3")
    places: tuple[Literal["output", "all"], ...] = ("output", "all")
    for where in places:
        model = SentenceTransformer(bundled_minilm(), device="cpu")
        before = model.encode(list(PROBE), convert_to_tensor=True).double()
        after = stm.cut_init(model, 3.0, where=where).encode(list(PROBE), convert_to_tensor=True).double()
        pairs = torch.triu_indices(len(before), len(before), offset=1)
        cosines = [stm.COSINE(x, x)[pairs[0], pairs[1]].numpy().round(6) for x in (before, after)]
        found[where] = stm.geometry.spearman(*cosines)
        print(f'where="{where}": Spearman of similarities before and after {found[where]:.3f}')
    print()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer seeds, epochs and steps: about two minutes")
    parser.add_argument("--output", type=Path, default=Path("runs/norms"), help="where figures and pictures are kept")
    parser.add_argument("--only", default="", help="parts to run, such as 1,3")
    arguments = parser.parse_args()
    logging.getLogger("st_magnitude").setLevel(logging.ERROR)  # one-sided similarities are compared on purpose
    arguments.output.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[bool], dict[str, Any]]] = {
        "1": simulations,
        "2": latent_classes,
        "3": lambda quick: {"variants": interventions(quick, arguments.output), "confidence": confidence(quick)},
        "4": regression,
        "5": overhead,
        "6": cuts,
    }
    results, began = {}, time.perf_counter()
    for number in arguments.only.split(",") if arguments.only else parts:
        results[number] = parts[number](arguments.quick)
        print(f"[{time.perf_counter() - began:.0f} s]\n", flush=True)
    record = arguments.output / ("quick.json" if arguments.quick else "results.json")
    record.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

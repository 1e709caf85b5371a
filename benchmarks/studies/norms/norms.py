"""The embedding-norm effect and the interventions against it, next to the paper's figures.

    python benchmarks/studies/norms/norms.py

Three parts of *On the Importance of Embedding Norms in Self-Supervised Learning* (Draganov et al.),
on one core, no download. ± is half a 95 % t interval over seeds:

1. App. B.1: steps to a mean cosine of .999 against the norm, with GradScale at powers 1 and 2 and
   with weight decay (Table 1); how often, and by how much, the bound of Theorem 3.4 is exceeded.
2. App. B.2: latent classes, supervised InfoNCE, a two-layer network: norm against density, norm
   against frequency.
3. SimCLR on scikit-learn's digits (8 x 8 images; views by shift, noise and dropped pixels),
   balanced and with n_i proportional to 1.5^-i, SGD and AdamW: default, cut-init at c = 3 (of all
   weights, and of the last layer only), GradScale at power 1 (SGD: learning rate / 6, as in the
   paper). kNN accuracy of the encoder's output on held-out digits, mean norm of the projector's
   output. Then norms as confidence.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from benchmarks.data.surface import auroc
from benchmarks.studies.cells import prepare_process
from benchmarks.studies.estimates import margin, markdown
from scipy.stats import mode
from sklearn.datasets import load_digits
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import st_magnitude as stm

EPOCHS, SEEDS = 100, 5  # of SimCLR
TABLE_1 = {0.5: "64, 526, 1080", 1.0: "49, 318, 610", 10.0: "divergence"}


def shown(values: Any, digits: int = 2) -> str:
    return f"{np.mean(values):+.{digits}f} ± {margin(values):.{digits}f}"


# --- 1. pairs of points ---------------------------------------------------------------------------


def pairs(n: int = 500, dim: int = 20) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (
        normalize(torch.randn(n, dim, generator=generator, dtype=torch.float64)) for _ in range(2)
    )
    return x, y


def steps_to_converge(
    norm: float, power: float = 0.0, decay: float = 0.0, lr: float = 0.1, limit: int = 20_000
) -> str:
    """App. B.1: one side is fixed, the other climbs the cosine by gradient descent; z loses decay ·
    |z|²."""
    fixed, z = pairs()
    z = norm * z
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
    return (
        f"{acute:.1%} of acute pairs, {obtuse:.1%} of obtuse ones, by {over.max() - 1:.1%} at most"
    )


def simulations() -> None:
    norms = (1, 2, 4, 8)
    print("## Steps to a mean cosine of .999, learning rate .1, from norm 1, 2, 4, 8\n")
    for power in (0, 1, 2):
        steps = [int(steps_to_converge(norm, power=power)) for norm in norms]
        slope = np.polyfit(np.log(norms), np.log(steps), 1)[0]
        print(f"- GradScale power {power}: {steps}; exponent of the norm {slope:.2f}")
    print("\nWith weight decay, norms 1, 4, 7, learning rate .02 (the paper's), and with 10\n")
    for decay, paper in TABLE_1.items():
        low, high = (
            ", ".join(steps_to_converge(n, decay=decay, lr=lr) for n in (1, 4, 7))
            for lr in (0.02, 10)
        )
        print(f"- decay {decay}: {low} ({paper}); {high}")
    print(f"\nThe bound of Theorem 3.4, norm 4, rate .5, is exceeded by {theorem()}\n")


# --- 2. latent classes ----------------------------------------------------------------------------


def latent(imbalanced: bool, epochs: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings before and after training, and classes: App. B.2."""
    torch.manual_seed(seed)
    counts = [2000, 1000, 500, 500] if imbalanced else [1000] * 4
    centers = normalize(torch.randn(4, 11))
    classes = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    points = normalize(centers[classes] + 0.1**0.5 * torch.randn(len(classes), 11)) @ torch.randn(
        11, 64
    )
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 11))
    before = model(points).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    members = [torch.where(classes == c)[0] for c in range(4)]
    for _ in range(epochs):
        for rows in torch.randperm(len(points)).split(128):
            other = torch.stack(
                [members[c][torch.randint(len(members[c]), ())] for c in classes[rows].tolist()]
            )
            loss = stm.infonce(
                model(points[rows]), model(points[other]), [stm.Term(temperature=0.5)]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return before, model(points).detach(), classes


def latent_classes(epochs: int = 50) -> None:
    density, frequency = [], []
    for seed in range(SEEDS):
        before, after, _ = latent(False, epochs, seed)
        row = []
        for x in (before, after):
            unit = normalize(x)
            # cosine of the 10th neighbour: high is dense
            tenth = (unit @ unit.T).topk(11, dim=1).values[:, -1]
            row.append(stm.geometry.spearman(stm.geometry.norms(x), tenth))
        density.append(row)
        _, last, classes = latent(True, epochs, seed)
        frequency.append([last[classes == c].norm(dim=1).mean().item() for c in range(4)])
    first, after = np.mean(density, axis=0)
    change = shown(np.diff(density, axis=1)[:, 0])
    means = ", ".join(f"{mean:.2f}" for mean in np.mean(frequency, axis=0))
    both = np.array(frequency)
    excess = shown(both[:, 0] - both[:, 2:].mean(axis=1), 1)
    print(f"## Latent classes, {epochs} epochs, {SEEDS} seeds\n")
    print(f"- Spearman of norm and density: {first:+.2f} before, {after:+.2f} after, {change}")
    print(f"- norm of classes with shares 1/2, 1/4, 1/8, 1/8: {means}")
    print(f"- the first less the mean of the last two: {excess}\n")


# --- 3. SimCLR on digits --------------------------------------------------------------------------


class SimCLR(nn.Module):
    """Encoder and projector with BatchNorm, as in the paper's networks: the norm comes from the
    last layers."""

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
    shifted = torch.stack(
        [image[i : i + 8, j : j + 8] for image, (i, j) in zip(padded, places.tolist(), strict=True)]
    )
    noisy = shifted.flatten(1) + 0.15 * torch.randn(len(x), 64)
    return noisy * (torch.rand_like(noisy) > 0.1)


def nt_xent(a: Tensor, b: Tensor, temperature: float = 0.5) -> Tensor:
    unit = normalize(torch.cat([a, b]))  # (2 B, D)
    logits = (unit @ unit.T / temperature).fill_diagonal_(-torch.inf)
    n = len(a)
    return cross_entropy(logits, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


def simclr(x: Tensor, optimizer: str, variant: str, seed: int) -> SimCLR:
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
    steps = EPOCHS * (len(x) // size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        updater, max_lr=lr, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(size)[: len(x) // size]:
            loss = nt_xent(model(view(x[rows])), model(view(x[rows])))
            updater.zero_grad()
            loss.backward()
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


# The paper's kNN accuracy less the default's, SimCLR on Cifar-10: Table 4 (SGD, epoch 1000), Table
# 5 (imbalanced, epoch 500), Table 6 (Adam, epoch 100)
PAPER = {
    ("SGD", "balanced", "cut"): 0.5,
    ("SGD", "balanced", "GradScale"): 0.5,
    ("SGD", "imbalanced", "cut"): 4.6,
    ("SGD", "imbalanced", "GradScale"): 4.8,
    ("AdamW", "balanced", "cut"): 0.3,
    ("AdamW", "balanced", "GradScale"): 0.9,
}


@torch.no_grad()
def measured(
    model: SimCLR, x: Tensor, y: Tensor, test: Tensor, labels: Tensor
) -> tuple[float, float]:
    return knn(model.encoder(x), y, model.encoder(test), labels), model(x).norm(dim=1).mean().item()


VARIANTS = ("default", "cut", "cut output", "GradScale")


def interventions() -> None:
    rows = []
    for optimizer, data in product(("SGD", "AdamW"), ("balanced", "imbalanced")):
        found = {}
        for variant in VARIANTS:
            runs = []
            for seed in range(SEEDS):
                x, y, test, labels = digits(data == "imbalanced", seed)
                model = simclr(x, optimizer, variant, seed)
                runs.append(measured(model, x, y, test, labels))
            found[variant] = np.array(runs)  # (S, 2): accuracy and norm
            gain = found[variant][:, 0] - found["default"][:, 0]
            accuracy, norm = found[variant].mean(axis=0)
            paper = PAPER.get((optimizer, data, variant), "")
            over = "" if variant == "default" else shown(gain, 1)
            rows.append([optimizer, data, variant, f"{accuracy:.1f}", over, paper, f"{norm:.1f}"])
    head = ["optimizer", "classes", "variant", "kNN accuracy", "over the default", "paper", "norm"]
    print("\n".join(["## SimCLR on digits", "", *markdown(head, rows, "lll"), ""]))


def novelty(inside: Any, outside: Any) -> tuple[float, float]:
    """Mean norm outside the training domain over the mean inside, and AUROC (Fig. 3 and S5)."""
    return float(np.mean(outside) / np.mean(inside)), auroc(inside, outside)


def knn_accuracy_by_norm(
    embeddings: Any, labels: Any, k: int, num_buckets: int, min_rows: int
) -> list[tuple[float, float]]:
    """Lower end and accuracy of every bucket of norms: (n, D), (n,) -> buckets in rising order of
    the norm.

    Norms are divided by the largest one and sorted into buckets of equal width; buckets of fewer
    than ``min_rows`` rows are left out. The majority of its k nearest other rows under cosine
    classifies a row (Fig. 4 left; k = 200 in the paper's App. C.1).
    """
    sizes, classes = (
        stm.geometry.norms(embeddings),
        np.unique(np.asarray(labels), return_inverse=True)[1],
    )
    nearest = NearestNeighbors(n_neighbors=k, metric="cosine").fit(np.asarray(embeddings))
    # (n, k): without X, no row is its own neighbour
    neighbours = nearest.kneighbors(return_distance=False)
    is_right = mode(classes[neighbours], axis=1).mode == classes
    bucket = np.clip(np.ceil(sizes / sizes.max() * num_buckets).astype(int) - 1, 0, num_buckets - 1)
    return [
        (i / num_buckets, float(is_right[inside].mean()))
        for i in range(num_buckets)
        if (inside := bucket == i).sum() >= min_rows
    ]


def confidence() -> None:
    """Trained on 0 to 4: held-out digits of those classes against 5 to 9; accuracy by norm."""
    scores, untrained, trends = [], [], []
    for seed in range(SEEDS):
        x, y, test, labels = digits(False, seed)
        torch.manual_seed(seed)
        control = SimCLR()
        with torch.no_grad():
            for _ in range(100):
                control(view(x[y < 5]))  # the statistics of BatchNorm, and nothing else
        model = simclr(x[y < 5], "SGD", "default", seed)
        with torch.no_grad():
            for network, found in ((control.eval(), untrained), (model, scores)):
                sizes = network(test).norm(dim=1)
                found.append(novelty(sizes[labels < 5].tolist(), sizes[labels >= 5].tolist()))
            embedded = model(torch.cat([x, test]))
        buckets = knn_accuracy_by_norm(embedded, torch.cat([y, labels]), 50, 20, min_rows=50)
        if len(buckets) > 1:
            trends.append(stm.geometry.spearman(*zip(*buckets, strict=True)))
    print("## Norm as confidence, trained on digits 0 to 4: unseen over seen classes, AUROC\n")
    for name, found in (("trained", scores), ("untrained", untrained)):
        print(f"- {name}: {', '.join(shown(values) for values in zip(*found, strict=True))}")
    each = ", ".join(f"{trend:+.2f}" for trend in trends)
    print(f"- Spearman of bucket and kNN accuracy {np.mean(trends):+.2f} ({each})")


if __name__ == "__main__":
    prepare_process()
    for part in (simulations, latent_classes, interventions, confidence):
        part()

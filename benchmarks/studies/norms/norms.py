"""GradScale and cut-init: the steps that a norm costs, and SimCLR on digits, next to the paper.

    python benchmarks/studies/norms/norms.py

Two parts of *On the Importance of Embedding Norms in Self-Supervised Learning* (Draganov et al.),
on one core, no download. ± is half a 95 % t interval over seeds:

1. App. B.1: steps to a mean cosine of .999 against the norm, with GradScale at powers 1 and 2.
2. SimCLR on scikit-learn's digits (8 x 8 images; views by shift, noise and dropped pixels),
   balanced and with n_i proportional to 1.5^-i, SGD and AdamW: default, cut-init at c = 3 (of all
   weights, and of the last layer only), GradScale at power 1 (SGD: learning rate / 6, as in the
   paper). kNN accuracy of the encoder's output on held-out digits, mean norm of the projector's
   output.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from benchmarks.studies.cells import prepare_process
from benchmarks.studies.estimates import margin, markdown
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import st_magnitude as stm

EPOCHS, SEEDS = 100, 5  # of SimCLR


def shown(values: Any, digits: int = 2) -> str:
    return f"{np.mean(values):+.{digits}f} ± {margin(values):.{digits}f}"


# --- 1. pairs of points ---------------------------------------------------------------------------


def pairs(n: int = 500, dim: int = 20) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (
        normalize(torch.randn(n, dim, generator=generator, dtype=torch.float64)) for _ in range(2)
    )
    return x, y


def steps_to_converge(norm: float, power: float, lr: float = 0.1) -> int:
    """App. B.1: one side is fixed, the other climbs the cosine by gradient descent."""
    fixed, z = pairs()
    z = norm * z
    for step in range(20_000):
        sizes = z.norm(dim=1, keepdim=True)
        unit = z / sizes
        cosine = (unit * fixed).sum(dim=1, keepdim=True)
        if cosine.mean() > 0.999:
            return step
        z = z + lr * sizes**power * (fixed - cosine * unit) / sizes
    raise RuntimeError(f"from norm {norm} the points do not meet within 20,000 steps")


def simulations() -> None:
    norms = (1, 2, 4, 8)
    print("## Steps to a mean cosine of .999, learning rate .1, from norm 1, 2, 4, 8\n")
    for power in (0, 1, 2):
        steps = [steps_to_converge(norm, power) for norm in norms]
        slope = np.polyfit(np.log(norms), np.log(steps), 1)[0]
        print(f"- GradScale power {power}: {steps}; exponent of the norm {slope:.2f}")
    print()


# --- 2. SimCLR on digits --------------------------------------------------------------------------


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


if __name__ == "__main__":
    prepare_process()
    simulations()
    interventions()

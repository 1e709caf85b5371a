"""The steps that a norm costs, with and without GradScale.

    python benchmarks/studies/norms/norms.py

App. B.1 of *On the Importance of Embedding Norms in Self-Supervised Learning* (Draganov et al.):
500 pairs of points in 20 dimensions, of which one side is fixed and the other climbs the cosine by
gradient descent from the norms 1, 2, 4 and 8, until the mean cosine is .999.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import normalize

NORMS = (1, 2, 4, 8)


def steps_to_converge(norm: float, power: float, lr: float = 0.1) -> int:
    """The number of steps with the gradient times |z|^power."""
    generator = torch.Generator().manual_seed(0)
    fixed, start = (
        normalize(torch.randn(500, 20, generator=generator, dtype=torch.float64)) for _ in range(2)
    )
    z = norm * start
    for step in range(20_000):
        sizes = z.norm(dim=1, keepdim=True)
        unit = z / sizes
        cosine = (unit * fixed).sum(dim=1, keepdim=True)
        if cosine.mean() > 0.999:
            return step
        z = z + lr * sizes**power * (fixed - cosine * unit) / sizes
    raise RuntimeError(f"from norm {norm} the points do not meet within 20,000 steps")


if __name__ == "__main__":
    for power in (0, 1, 2):
        steps = [steps_to_converge(norm, power) for norm in NORMS]
        slope = np.polyfit(np.log(NORMS), np.log(steps), 1)[0]
        print(f"GradScale power {power}: {steps} steps; exponent of the norm {slope:.2f}")

"""Tokens and time of MultipleNegativesRankingLoss with ``columns_grouped_by_length``, forward and
backward, as ratios to its default.

    PYTHONPATH=<patched checkout of sentence-transformers> OMP_NUM_THREADS=1
        python measure_groups.py MODEL [--batch-size 64] [--seed 0]

Pairs of texts of random tokens. Their lengths follow the quantiles of two data sets under the
tokenizer of all-MiniLM-L6-v2. Time is the processor time of the process in the fastest of two
rounds in which the variants take turns; before, each gradient is compared with the default's.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from functools import partial

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.merged_forward import columns_grouped_by_length
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor

QUANTILES = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1)
QUESTIONS = (4, 9, 10, 11, 12, 13, 15, 16, 19, 28, 53, 98)  # of BANKING77
LENGTHS = {
    "questions, questions": (QUESTIONS, QUESTIONS),
    "questions, names of intents": (QUESTIONS, (4, 4, 4, 5, 5, 5, 6, 6, 7, 8, 11, 11)),
    "questions, paragraphs": (  # of XQuAD
        (6, 10, 11, 12, 13, 14, 15, 16, 17, 20, 26, 34),
        (36, 99, 114, 127, 137, 152, 163, 182, 210, 251, 256, 256),
    ),
}


def texts(size: int, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Features of texts whose lengths are drawn between quantiles."""
    share = torch.rand(size, dtype=torch.double)
    known = torch.tensor(QUANTILES, dtype=torch.double)
    after = torch.bucketize(share, known).clamp(min=1)
    weight = (share - known[after - 1]) / (known[after] - known[after - 1])
    low, high = torch.tensor(lengths)[after - 1], torch.tensor(lengths)[after]
    found = torch.lerp(low.double(), high.double(), weight).round().long()
    mask = (torch.arange(int(found.max())) < found[:, None]).long()
    return {"input_ids": torch.randint(1000, 2000, mask.shape) * mask, "attention_mask": mask}


def measure(model: SentenceTransformer, name: str, size: int) -> None:
    loss = MultipleNegativesRankingLoss(model)
    columns = [texts(size, lengths) for lengths in LENGTHS[name]]
    tokens = 0

    def count(_: SentenceTransformer, args: tuple) -> None:
        nonlocal tokens
        tokens += args[0]["input_ids"].numel()

    hook = model.register_forward_pre_hook(count)
    variants = {0: nullcontext}
    variants |= {k: partial(columns_grouped_by_length, k) for k in (2, 4, 8)}
    rounds: dict[int, list[tuple[int, float, Tensor]]] = {k: [] for k in variants}
    for _ in range(2):
        for k, context in variants.items():
            tokens = 0
            model.zero_grad()
            began = time.process_time()
            with context():
                loss([dict(column) for column in columns], None).backward()
            spent = time.process_time() - began
            gradient = torch.cat(
                [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            )
            rounds[k].append((tokens, spent, gradient))
    hook.remove()
    base_tokens, base_gradient = rounds[0][0][0], rounds[0][0][2]
    base_time = min(spent for _, spent, _ in rounds[0])
    for k, found in rounds.items():
        difference = (found[0][2] - base_gradient).norm() / base_gradient.norm()
        assert difference < 1e-4, difference
        share = found[0][0] / base_tokens
        spent = min(spent for _, spent, _ in found)
        print(f"{name:28} {size:4} {k or 'default':>8} {share:8.2f} {spent / base_time:6.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = SentenceTransformer(options.model, device="cpu").eval()  # without dropout
    print(f"{'pairs':28} {'B':>4} {'passes':>8} {'x tokens':>8} {'x time':>6}")
    for name in LENGTHS:
        measure(model, name, options.batch_size)

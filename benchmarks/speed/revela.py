"""Revela: the cost of in-batch attention.

    python benchmarks/speed/revela.py

One attention layer, forward and backward, H = 32 query heads over 8 key heads of 64, L = 160
tokens: materialised (B, H, L, B, L) scores against this package, exact and with a peaked Sim.
Memory is the peak of the tensors that are allocated during the step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from benchmarks.speed.kernel import seconds
from benchmarks.speed.memory import peak_bytes
from torch import Tensor

from st_magnitude.revela import attention
from st_magnitude.revela.attention import Neighbours, in_batch_attention

LENGTH, HEADS, KEY_HEADS, DIM = 160, 32, 8, 64


def materialised(
    query: Tensor, key: Tensor, value: Tensor, neighbours: Neighbours, scaling: float | None = None
) -> Tensor:
    """Eq. 5-7 with all scores at once: (B, H, L, d)."""
    documents, _, length, dim = query.shape
    shared = key.shape[1]
    # (H_kv, B r L, d)
    queries = query.reshape(documents, shared, -1, dim).transpose(0, 1).flatten(1, 2)
    keys, values = (x.transpose(0, 1).flatten(1, 2) for x in (key, value))  # (H_kv, B L, d)
    # (H_kv, B r L, B L)
    scores = queries @ keys.transpose(1, 2) * (dim**-0.5 if scaling is None else scaling)
    scores = scores.view(*scores.shape[:2], documents, length)
    if neighbours.key_mask is not None:
        scores = scores.masked_fill(~neighbours.key_mask, float("-inf"))
    weights = scores.softmax(-1)
    blocks = values.view(shared, documents, length, dim)
    read = torch.einsum("hqjl,hjld->hqjd", weights, blocks)
    if neighbours.v_norm:
        sizes = torch.einsum("hqjl,hjl->hqj", weights, blocks.norm(dim=-1))
        read = read / (sizes[..., None] + attention.EPS)
    # (B r L, B)
    similarity = neighbours.similarity.repeat_interleave(queries.shape[1] // documents, 0)
    total = torch.einsum("qj,hqjd->hqd", similarity.to(read.dtype), read)
    return total.view(shared, documents, -1, dim).transpose(0, 1).reshape(query.shape)


def similarities(size: int, peaked: bool) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(size, size, generator=generator).fill_diagonal_(float("-inf"))
    return (scores * (300 if peaked else 1)).softmax(-1)


def layer(size: int, repeats: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(size, HEADS, LENGTH, DIM, requires_grad=True)
    key, value = (torch.randn(size, KEY_HEADS, LENGTH, DIM, requires_grad=True) for _ in range(2))
    mask = torch.ones(size, LENGTH)
    even, peaked = similarities(size, False), similarities(size, True)
    exact, sparse = (Neighbours.of(weights, mask) for weights in (even, peaked))

    def step(attend: Callable[..., Tensor], neighbours: Neighbours) -> None:
        query.grad = key.grad = value.grad = None
        attend(query, key, value, neighbours).sum().backward()

    steps = {
        "materialised": partial(step, materialised, exact),
        "exact": partial(step, in_batch_attention, exact),
        "peaked": partial(step, in_batch_attention, sparse),
    }
    scores = 4 * HEADS * (size * LENGTH) ** 2  # bytes
    if 6 * scores > os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        del steps["materialised"]
    else:
        result = in_batch_attention(query, key, value, exact)
        torch.testing.assert_close(
            result, materialised(query, key, value, exact), rtol=1e-4, atol=1e-5
        )
        del result
    _compare(f"{size}", steps, repeats)


def _compare(name: str, steps: dict[str, Callable[[], None]], repeats: int) -> None:
    """One row of the table; absolute figures where the materialised scores do not fit into
    memory."""
    times = seconds(steps, repeats)
    sizes = {label: peak_bytes(step) for label, step in steps.items()}
    cells = {label: f"{times[label]:.2f} s, {sizes[label] / 2**20:,.0f} MiB" for label in steps}
    base = "materialised"
    if base in steps:
        for label in ("exact", "peaked"):
            cells[label] = f"{times[label] / times[base]:.2f} x, {sizes[label] / sizes[base]:.2f} x"
    print(f"| {name} | {' | '.join(({base: 'does not fit'} | cells).values())} |", flush=True)


if __name__ == "__main__":
    print(f"{LENGTH} tokens\n\n| B | materialised | exact | peaked Sim |")
    print("| ---: | --- | --- | --- |")
    for size in (8, 16, 32):
        layer(size, 3)

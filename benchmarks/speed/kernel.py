"""Time and memory of the infonce kernel, forward and backward on embeddings, as ratios within one
run.

    python benchmarks/speed/kernel.py [--quick] [--device cuda]

Against sentence-transformers' MultipleNegativesRankingLoss (MNRL), its MatryoshkaLoss around one
MNRL per temperature (the way to compose dims x temperatures from its parts), and the floor: the 6
B^2 D floating-point operations of the three matrix products at the rate that a product of the same
shape reaches here. Memory is the peak of tensors allocated during the step, inputs and their
gradients' accumulators not counted.

Expected on 2 CPU cores, before measuring: one term at most 1.05 x the time and 1/3 of the memory of
MNRL; 3 dims x 3 temperatures at most 1.3 x the time of one plain MNRL, a quarter of the time and a
tenth of the memory of the composition; a training step of MiniLM at most 1.02 x the one with MNRL.
Excluded ids (each shared by two documents on average) and several positives at most 1.1 x the time
of the same loss without them, log q 1.05 x, and a joint softmax over documents and queries, twice
the columns, 2.1 x. "barest" is normalise, multiply, cross_entropy; one term at most 1.05 x of it.
``precision="bfloat16"`` takes at most half of the time of float32, with errors as in plain PyTorch
under autocast.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from sentence_transformers.sentence_transformer.losses import (
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from st_magnitude import COSINE, QNormRankingLoss, Term, infonce, prepare

TEMPERATURES = (0.03, 0.06, 0.1)


class Embedded(nn.Module):
    """A stand-in for the model: its features are the embeddings."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["sentence_embedding"]}

    def get_embedding_dimension(self) -> int:
        return self.dim


def seconds(steps: dict[str, Callable[[], None]], repeats: int, device: str) -> dict[str, float]:
    """The fastest of several rounds for each, in turn, so that all meet the same machine."""
    best = dict.fromkeys(steps, float("inf"))
    for round_ in range(repeats + 1):  # the first warms up
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            if round_:
                best[name] = min(best[name], time.perf_counter() - began)
    return best


def peak_bytes(step: Callable[[], None], device: str) -> int:
    """The most that was allocated at a time during a step, beyond what was there before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def compare(size: int, dim: int, repeats: int, device: str) -> dict[str, float]:
    torch.manual_seed(0)
    queries, documents = (
        torch.randn(size, dim, device=device, requires_grad=True) for _ in range(2)
    )
    ids = torch.randint(size // 2, (size,), device=device)
    dims = (dim // 4, dim // 2, dim)
    many = [Term(k, temperature) for k in dims for temperature in TEMPERATURES]
    stub = Embedded(dim)
    plain = MultipleNegativesRankingLoss(stub)
    log_q = torch.rand(size, device=device).log()
    labels = torch.arange(size, device=device)
    parts = [
        MatryoshkaLoss(stub, MultipleNegativesRankingLoss(stub, scale=1 / t), dims)
        for t in TEMPERATURES
    ]

    def features() -> list[dict[str, Tensor]]:
        return [{"sentence_embedding": queries}, {"sentence_embedding": documents}]

    losses: dict[str, Callable[[], Tensor]] = {
        "mnrl": lambda: plain(features(), None),
        "barest": lambda: cross_entropy(normalize(queries) @ normalize(documents).T * 20, labels),
        "one term": lambda: infonce(queries, documents, similarity=COSINE),
        "nine terms": lambda: infonce(queries, documents, many, COSINE),
        "composition": lambda: sum(part(features(), None) for part in parts),
        "exclude": lambda: infonce(queries, documents, exclude=ids),
        "nine, exclude": lambda: infonce(queries, documents, many, exclude=ids),
        "positives": lambda: infonce(queries, documents, positives=ids),
        "hardness": lambda: infonce(
            queries, documents, hardness_mode="all_negatives", hardness_strength=5.0
        ),
        "log q": lambda: infonce(queries, documents, log_q=log_q),
        "joint": lambda: infonce(queries, documents, directions=("query_to_doc", "query_to_query")),
    }
    for ours, theirs in (("one term", "mnrl"), ("nine terms", "composition")):
        torch.testing.assert_close(losses[ours](), losses[theirs](), rtol=1e-5, atol=1e-5)

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            queries.grad = documents.grad = None
            loss().backward()

        return run

    steps = {name: step(loss) for name, loss in losses.items()}
    measured = seconds(steps, repeats, device)
    a, b, out = queries.detach(), documents.detach(), queries.new_empty(512, size)

    def product() -> None:  # in tiles, so that its result need not go to main memory
        for start in range(0, size, 512):
            torch.mm(a[start : start + 512], b.T, out=out)

    floor = 3 * seconds({"product": product}, 2 * repeats, device)["product"]
    memory = {name: peak_bytes(run, device) for name, run in steps.items()}
    return {
        "mnrl ms": measured["mnrl"] * 1e3,
        "floor": floor / measured["mnrl"],
        "one term": measured["one term"] / measured["mnrl"],
        "one : barest": measured["one term"] / measured["barest"],
        "nine terms": measured["nine terms"] / measured["mnrl"],
        "nine : composition": measured["nine terms"] / measured["composition"],
        "exclude : one": measured["exclude"] / measured["one term"],
        "nine, exclude : nine": measured["nine, exclude"] / measured["nine terms"],
        "positives : one": measured["positives"] / measured["one term"],
        "hardness : one": measured["hardness"] / measured["one term"],
        "log q : one": measured["log q"] / measured["one term"],
        "joint : one": measured["joint"] / measured["one term"],
        "mnrl MB": memory["mnrl"] / 2**20,
        "one term MB": memory["one term"] / memory["mnrl"],
        "nine terms MB": memory["nine terms"] / memory["mnrl"],
        "nine : composition MB": memory["nine terms"] / memory["composition"],
    }


def precision(size: int, dim: int, repeats: int) -> list[str]:
    """Rows: time over that of float32, and relative errors against float64."""
    torch.manual_seed(0)
    shared = torch.randn(size, dim)
    sides = [(shared + torch.randn(size, dim)).requires_grad_() for _ in range(2)]
    labels = torch.arange(size)

    def in_plain_torch(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(normalize(x) @ normalize(y).T * 20, labels)

    def under_autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return in_plain_torch(*sides)

    losses: dict[str, Callable[[], Tensor]] = {
        "infonce, float32": lambda: infonce(*sides),
        "infonce, bfloat16": lambda: infonce(*sides, precision="bfloat16"),
        "plain PyTorch under autocast": under_autocast,
    }

    def step(loss: Callable[[], Tensor]) -> list[Tensor]:
        sides[0].grad = sides[1].grad = None
        value = loss()
        value.backward()
        return [value.detach(), *(x.grad for x in sides if x.grad is not None)]

    exact = [x.detach().double().requires_grad_() for x in sides]
    value = in_plain_torch(*exact)
    expected = [value.detach(), *torch.autograd.grad(value, exact)]
    times = seconds(
        {name: lambda loss=loss: step(loss) for name, loss in losses.items()}, repeats, "cpu"
    )
    rows = []
    for name, loss in losses.items():
        of_loss, of_queries, _ = (
            ((x - y).norm() / y.norm()).item() for x, y in zip(step(loss), expected, strict=True)
        )
        time = times[name] / times["infonce, float32"]
        rows.append(f"| {size} | {dim} | {name} | {time:.2f} | {of_loss:.1e} | {of_queries:.1e} |")
    return rows


def minilm_step(repeats: int, batch: int = 64) -> float | None:
    """Time of a training step with QNormRankingLoss over one with MNRL; None where the model is not
    installed."""
    from benchmarks.data.docstrings import bundled_minilm
    from sentence_transformers import SentenceTransformer

    try:
        path = bundled_minilm()
    except ImportError:
        return None
    model = prepare(SentenceTransformer(path, device="cpu"), "qnorm")
    model.train()
    text = "the quick brown fox jumps over the lazy dog while " * 3

    def features() -> list[dict[str, Tensor]]:
        return [model.preprocess([f"{i} {text}"[:140] for i in range(batch)]) for _ in range(2)]

    losses = {"mnrl": MultipleNegativesRankingLoss(model), "qnorm": QNormRankingLoss(model)}

    def step(loss: nn.Module) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad()
            loss(features(), None).backward()

        return run

    steps = {name: step(loss) for name, loss in losses.items()}
    for run in steps.values():
        run()
    ratios = []
    for _ in range(repeats):
        began = time.perf_counter()
        steps["mnrl"]()
        middle = time.perf_counter()
        steps["qnorm"]()
        ratios.append((time.perf_counter() - middle) / (middle - began))
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    sizes = (512, 2048) if arguments.quick else (512, 1024, 2048, 4096, 8192)
    dims = (384,) if arguments.quick else (384, 1024)
    print(
        f"torch {torch.__version__}, {arguments.device}, {torch.get_num_threads()} threads,"
        " float32, cosine"
    )
    print("Times and peak memory over those of one MNRL; nine terms: 3 dims x 3 temperatures.\n")
    header = None
    for size in sizes:
        for dim in (384, 768, 1024) if size == 2048 and not arguments.quick else dims:
            repeats = {512: 40, 1024: 25, 2048: 12, 4096: 5}.get(size, 2)
            row = compare(size, dim, repeats, arguments.device)
            if header is None:
                header = ["B", "D", *row]
                print("| " + " | ".join(header) + " |")
                print("|" + " ---: |" * len(header))
            cells = [
                f"{value:.0f}" if name in ("mnrl ms", "mnrl MB") else f"{value:.2f}"
                for name, value in row.items()
            ]
            print("| " + " | ".join([str(size), str(dim), *cells]) + " |", flush=True)
    if arguments.device == "cpu":
        print("\nTime over float32, and relative errors against float64:\n")
        print("| B | D | loss | time | error of the loss | error of the gradient |")
        print("| ---: | ---: | --- | ---: | ---: | ---: |")
        for size in (512, 1024, 2048):
            print("\n".join(precision(size, 768, 10)), flush=True)
    if arguments.device == "cpu" and (ratio := minilm_step(5 if arguments.quick else 15)):
        print(f"\nA training step of MiniLM, batch 64, QNormRankingLoss over MNRL: {ratio:.3f}")


if __name__ == "__main__":
    main()

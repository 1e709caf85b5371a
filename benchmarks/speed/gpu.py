"""The losses on a GPU: versions, tests, time and memory of encoders under them, and of the losses
alone, with their share of the device's speed; `make gpu` runs this, in at most 15 minutes.

    python benchmarks/speed/gpu.py [--quick] [--device cpu] [--output runs]

It prints Markdown to paste into an issue, and writes gpu.md and the same as JSON, gpu.json. Sizes
that do not end in time are left out.

**Encoders** have random weights and the shapes of MiniLM, BERT base and ModernBERT base; SDPA and,
where it is installed, flash attention, with which sentence-transformers does not pad. Texts are
random words with the lengths and the copies of two data sets. A step is forward and backward of
model and loss under autocast to bfloat16, with dropout and no optimizer; cached losses have
mini-batches of 32. A cell is ms / MiB / tokens / passes: MiB is the peak beyond weights, gradients
and features, tokens count padding, and passes are calls of the encoder. "tokens that a pass costs"
is how many take as long as one more pass, which `st_magnitude/losses/groups.py` plans with.

Expected, before measuring: a pass costs 4,000 tokens for MiniLM, 1,000 for base, and 2,000 for
ModernBERT; ours take .4 to 1 of MNRL's time, and gain nothing with flash attention.

**Losses alone**: forward and backward on embeddings under autocast. MNRL and CachedMNRL multiply in
bfloat16, ours in float32, or in TF32 where the script says so. A cell is ms / MiB / share. MiB is
the peak beyond inputs and the gradients that a step begins with. The share is 6 B² D operations,
three matrix products, over the time and over the speed of the largest product that is timed here,
in bfloat16: shares of one device can be compared.

Expected: one term in TF32 at most 2 x the time of MNRL from B = 4,096; in float32 at most 2 x its
own floor of three products; memory of one term linear, under 1/10 of MNRL's from B = 16,384.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from benchmarks.speed.kernel import TEMPERATURES, Embedded, seconds
from benchmarks.speed.memory import MIB, peak_bytes
from benchmarks.speed.trimming import encoder_of
from benchmarks.studies.estimates import markdown
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.util import batch_to_device
from torch import Tensor
from transformers import BertConfig, ModernBertConfig
from transformers.utils import is_flash_attn_2_available

from st_magnitude import CosineRankingLoss, Term, infonce

ROOT = Path(__file__).parents[2]
SIZES, DIMS = tuple(2**power for power in range(10, 17)), (768, 1024)
BATCHES, WORDS = tuple(2**power for power in range(4, 11)), 30_000


def bert(layers: int, width: int, heads: int = 12) -> BertConfig:
    shape = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width}
    return BertConfig(num_attention_heads=heads, **shape)


ENCODERS = {
    "tiny": bert(1, 32, heads=2),
    "MiniLM": bert(6, 384),
    "base": bert(12, 768),
    "ModernBERT base": ModernBertConfig(vocab_size=30_522, pad_token_id=0),
}
SETTINGS = ("encoder", "attention", "data", "batch")
# Quantiles of the tokens of queries and of documents by all-MiniLM-L6-v2, and how many documents
QUANTILES = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1)
LENGTHS = {
    "BANKING77": (
        (4, 9, 10, 11, 12, 13, 15, 16, 19, 28, 53, 98),
        (4, 4, 4, 5, 5, 5, 6, 6, 7, 8, 11, 11),
        77,
    ),
    "XQuAD": (
        (6, 10, 11, 12, 13, 14, 15, 16, 17, 20, 26, 34),
        (36, 99, 114, 127, 137, 152, 163, 182, 210, 251, 256, 256),
        240,
    ),
}


def peak_speed(device: str, size: int) -> float:
    """Floating-point operations per second of a square product in bfloat16."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds({"product": lambda: a @ b}, 10, device)["product"]


def steps(size: int, dim: int, device: str) -> dict[str, Callable[[], None]]:
    """For every loss a step: forward and backward."""
    torch.manual_seed(0)
    queries, documents = (
        torch.randn(size, dim, device=device, requires_grad=True) for _ in range(2)
    )
    columns = [{"sentence_embedding": x} for x in (queries, documents)]
    nine = [Term(k, temperature) for k in (dim // 4, dim // 2, dim) for temperature in TEMPERATURES]
    plain = MultipleNegativesRankingLoss(Embedded(dim))
    cached = CachedMultipleNegativesRankingLoss(Embedded(dim), mini_batch_size=1024)

    def tf32() -> Tensor:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            return infonce(queries, documents)  # it takes the gradients in its forward pass
        finally:
            torch.set_float32_matmul_precision(before)

    losses: dict[str, Callable[[], Tensor]] = {
        "MNRL": lambda: plain(columns, None),
        "CachedMNRL": lambda: cached.calculate_loss([[queries], [documents]], with_backward=True),
        "one term": lambda: infonce(queries, documents),
        "one term, TF32": tf32,
        "nine terms": lambda: infonce(queries, documents, nine),
    }

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            queries.grad = documents.grad = None
            with torch.autocast(device, torch.bfloat16):
                value = loss()
            if value.requires_grad:  # the cached loss has taken its gradients
                value.backward()

        return run

    return {name: step(loss) for name, loss in losses.items()}


def cell(
    run: Callable[[], None], size: int, dim: int, device: str, peak: float
) -> dict[str, float] | None:
    """Time and memory of a loss; None if it does not fit into the memory."""
    try:
        time = seconds({"step": run}, 5, device)["step"]
        memory = peak_bytes(run, device)
    except torch.OutOfMemoryError:
        return None
    return {"ms": time * 1e3, "MiB": memory / MIB, "share": 6 * size**2 * dim / time / peak}


def measure(
    sizes: Sequence[int], dims: Sequence[int], device: str, peak: float, end: float
) -> list[dict[str, Any]]:
    """The cells of every size and number of dimensions that ends in time."""
    rows: list[dict[str, Any]] = []
    spent = 0.0
    for size in sizes:
        for dim in dims:
            start = perf_counter()
            if start + 5 * spent > end:  # twice the size takes four times as long
                print(f"no time is left for B = {size}, D = {dim}", flush=True)
                return rows
            runs = steps(size, dim, device)
            cells = {name: cell(run, size, dim, device, peak) for name, run in runs.items()}
            rows.append({"B": size, "D": dim, "losses": cells})
            spent = perf_counter() - start
            print(f"B = {size}, D = {dim} took {spent:.0f} s", flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        cells = [
            "{ms:.3g} / {MiB:.0f} / {share:.2f}".format(**found) if found else "-"
            for found in row["losses"].values()
        ]
        lines.append([row["B"], row["D"], *cells])
    return markdown(["B", "D", *rows[0]["losses"]], lines, "rr")


def texts_of(data: str, number: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Queries that all differ, and a document for each, of random words w2, w3, ..."""
    rng = np.random.default_rng(seed)
    queries, documents, num_documents = LENGTHS[data]

    def drawn(quantiles: Sequence[int], size: int) -> list[str]:
        lengths = np.interp(rng.random(size), QUANTILES, quantiles).round().astype(int)
        return [" ".join(f"w{word}" for word in rng.integers(2, WORDS, n)) for n in lengths]

    made = drawn(documents, num_documents)
    return drawn(queries, number), [made[i] for i in rng.integers(num_documents, size=number)]


def losses_of(model: SentenceTransformer) -> dict[str, torch.nn.Module]:
    return {
        "MNRL": MultipleNegativesRankingLoss(model),
        "CachedMNRL": CachedMultipleNegativesRankingLoss(model, mini_batch_size=32),
        "keep": CosineRankingLoss(model, same_text="keep"),
        "default": CosineRankingLoss(model),
    }


def tokens_and_passes(model: SentenceTransformer, step: Callable[[], None]) -> dict[str, int]:
    """The tokens, padding included, and the forward calls of the encoder in a step."""
    tokens = []

    def count(_: object, inputs: tuple[dict[str, Tensor]]) -> None:
        tokens.append(inputs[0]["input_ids"].numel())

    hook = model[0].register_forward_pre_hook(count)
    step()
    hook.remove()
    return {"tokens": sum(tokens), "passes": len(tokens)}


def encoder_cell(
    model: SentenceTransformer, loss: torch.nn.Module, features: list[dict[str, Any]], device: str
) -> dict[str, float] | None:
    """Time, memory, tokens and passes of a step; None if it does not fit into the memory."""

    def run() -> None:
        with torch.autocast(device, torch.bfloat16):
            value = loss([dict(column) for column in features], None)
        value.backward()

    try:
        found: dict[str, float] = tokens_and_passes(model, run)
        found["ms"] = seconds({"step": run}, 3, device)["step"] * 1e3
        return found | {"MiB": peak_bytes(run, device) / MIB}
    except torch.OutOfMemoryError:
        return None


def measure_encoders(
    names: Sequence[str], batches: Sequence[int], device: str, end: float
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The cells that end in time, and the tokens that a pass of each encoder costs."""
    rows: list[dict[str, Any]] = []
    overheads: dict[str, int] = {}
    attentions = ["sdpa", *(["flash_attention_2"] if is_flash_attn_2_available() else [])]
    for name, attention in product(names, attentions):
        model = encoder_of(ENCODERS[name], attention=attention).to(device).train()
        if attention == "sdpa":
            overheads[name] = tokens_of_a_pass(model, device)
        for data in LENGTHS:
            spent = 0.0
            for batch in batches:
                start = perf_counter()
                if start + 3 * spent > end:  # twice the texts
                    print(f"no time is left for {name}, {data}, {batch}", flush=True)
                    break
                columns = [model.preprocess(column) for column in texts_of(data, batch)]
                features = [batch_to_device(column, torch.device(device)) for column in columns]
                cells = {
                    loss: encoder_cell(model, module, features, device)
                    for loss, module in losses_of(model).items()
                }
                row = dict(zip(SETTINGS, (name, attention, data, batch), strict=True))
                rows.append(row | {"losses": cells})
                spent = perf_counter() - start
    return rows, overheads


def encoder_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        cells = [
            "{ms:.3g} / {MiB:.0f} / {tokens:,} / {passes}".format(**found) if found else "-"
            for found in row["losses"].values()
        ]
        lines.append([*(row[key] for key in SETTINGS), *cells])
    return markdown([*SETTINGS, *rows[0]["losses"]], lines, "lll")


def tokens_of_a_pass(model: SentenceTransformer, device: str) -> int:
    """How many tokens cost as much as one more forward and backward pass."""

    def step(texts: int, length: int) -> Callable[[], None]:
        ids = torch.randint(2, WORDS, (texts, length), device=device)

        def run() -> None:
            features = {"input_ids": ids.clone(), "attention_mask": torch.ones_like(ids)}
            with torch.autocast(device, torch.bfloat16):
                value = model(features)["sentence_embedding"].sum()
            value.backward()

        return run

    few, many = (1, 8), (16, 128)
    times = seconds({"few": step(*few), "many": step(*many)}, 5, device)
    of_a_token = (times["many"] - times["few"]) / (16 * 128 - 8)
    return round(times["few"] / of_a_token - 8)


def tested(device: str) -> str:
    """The last line of pytest about the tests on a device."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-k", device]
    command.append("tests/kernel/test_gpu.py")
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(found.stdout + found.stderr, flush=True)
    return found.stdout.strip().rpartition("\n")[2]


def main(given: Sequence[str] | None = None) -> None:
    start = perf_counter()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--minutes", type=float, default=14, help="after which no size begins")
    parser.add_argument("--output", type=Path, default=ROOT / "runs")
    options = parser.parse_args(given)
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here: try --device cpu --quick")
    packages = ("st-magnitude", "sentence-transformers", "transformers", "torch")
    versions = {name: version(name) for name in packages}
    versions |= {"python": platform.python_version(), "CUDA": str(torch.version.cuda)}
    peak = peak_speed(device, 256 if options.quick else 8192)
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "tests": tested(device),
        "TFLOP/s in bfloat16": round(peak / 1e12, 3),
    }
    names, batches = (["tiny"], (4, 8)) if options.quick else (list(ENCODERS)[1:], BATCHES)
    end = start + 40 * options.minutes  # two thirds of the time
    encoders, overheads = measure_encoders(names, batches, device, end)
    record["tokens that a pass costs"] = overheads
    sizes, dims = ((64, 128), (32,)) if options.quick else (SIZES, DIMS)
    rows = measure(sizes, dims, device, peak, start + 60 * options.minutes)
    record["minutes"] = round((perf_counter() - start) / 60, 1)
    lines = [f"- {name}: {value}" for name, value in record.items()]
    lines += ["", "Encoders: ms / MiB / tokens / passes.", "", *encoder_table(encoders)]
    lines += ["", "Losses alone: ms / MiB / share of the speed in bfloat16.", "", *table(rows), ""]
    text = "\n".join(lines)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "gpu.md").write_text(text, encoding="utf-8")
    stored = json.dumps(record | {"encoders": encoders, "rows": rows}, indent=1)
    (options.output / "gpu.json").write_text(stored, encoding="utf-8")
    print(f"\n{text}")


if __name__ == "__main__":
    main()

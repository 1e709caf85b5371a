"""Asymmetric losses for CLIP: Table 6 of the magnitude paper on real images, at a size that two cores can train.

    python benchmarks/clip.py [--quick] [--cache FOLDER] [--jobs 2] [--seeds 0,1,2,3,4] [--table]

Small open_clip models from scratch (ModifiedResNet of 1-1-1-1 blocks and width 16 at 48 pixels, two layers of text,
1.8 million parameters) learn emoji and what they are called (:mod:`emoji`). One training serves two tests:

- *unseen style*: 500 emoji of the training data in a drawing style that training never showed; one image per text;
- *unseen emoji*: 250 emoji that training never showed, in the three styles of training; up to three images per text.

Rows are the paper's six losses (*Beyond the Unit Hypersphere*, arXiv 2602.09229, Table 6), and two interventions of
Draganov et al. on the first of them: GradScale at power 1, cut-init of the projections at c = 3. Losses that keep a
norm start with both projections divided by the mean norm (`stm.clip.rescale_output`); norm-sym starts as open_clip
does. A seed draws the split, the initial weights and the batches. Steps, batch and learning rate are the same for all
rows, were set beforehand and not tuned, on dev or on anything else; what is measured is the end of the training.

Every run is stored as a JSON file in benchmarks/results/clip and not repeated. So an interrupted study continues where
it stopped, `--seeds` and `--rows` run a part of it, and `--table` prints the runs that are stored.

The paper trains ViT-B/32 on COCO and does not say how it pairs relevant with irrelevant items for Cohen's d. Over all
pairs d is 0 for any features where all items have equally many partners, so it is the "hard" pairing here: relevant
items against the 10 nearest irrelevant ones of each query by cosine. What can be asked of the paper is the sign.

Expected before measuring these rows (with one seed of a longer training at hand, see docs/research/clip.md):

1. norm-sym: d about 0 on both sides, dot worse than cosine.
2. nonorm-sym: dot better than cosine, d positive on both sides; the paper has it negative and calls it about 0.
3. One direction, with the asking side normalised: the found side gets d > 0, dot beats cosine in the direction that was
   trained, the other direction is lost.
4. One direction, nothing normalised: the same, less of it.
5. Where norms are learned, they demote hubs: on the found side, features with a high N_10 by cosine have *small* norms.
6. GradScale and cut-init change no figure beyond its interval.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import emoji
import numpy as np
import torch
from numpy.typing import NDArray
from open_clip import SimpleTokenizer
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from scipy import stats
from torch import Tensor

import st_magnitude as stm
from st_magnitude._plot import pyplot
from st_magnitude.clip import AsymmetricClipLoss, evaluate_retrieval, rescale_output, unnormalize
from st_magnitude.data.beir import DataError
from st_magnitude.surgery.gradients import grad_scale

SIZE, CONTEXT, DIM = 48, 20, 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = {  # name to preset of the loss
    "norm-sym": "norm-sym",
    "nonorm-sym": "nonorm-sym",
    "imgnorm-i2t": "imgnorm-i2t",
    "nonorm-i2t": "nonorm-i2t",
    "txtnorm-t2i": "txtnorm-t2i",
    "nonorm-t2i": "nonorm-t2i",
    "norm-sym, GradScale": "norm-sym",
    "norm-sym, cut-init": "norm-sym",
}


class Settings(NamedTuple):
    """Of one training; chosen beforehand and the same for all rows."""

    steps: int = 300
    batch_size: int = 128
    lr: float = 1e-3
    warmup: int = 30
    weight_decay: float = 0.1


Floats = NDArray[np.float32]
RESULTS = Path(__file__).parent / "results" / "clip"
QUICK = Settings(steps=100, batch_size=64, warmup=10)
TESTS = {"unseen_style": "Unseen style", "unseen_emoji": "Unseen emoji"}


# --- data and model ---------------------------------------------------------------------------------------------------


class Tokens:
    """open_clip's tokenizer with the ids that these texts use counted through: no embedding lies idle.

    The order of ids stays, and with it the largest one, by which open_clip finds the end of a text.
    """

    def __init__(self, texts: list[str]) -> None:
        self._tokenizer = SimpleTokenizer(context_length=CONTEXT)
        self._ids = torch.unique(SimpleTokenizer(context_length=77)(texts))  # sorted, 0 (padding) first
        self.size = len(self._ids)

    def __call__(self, texts: list[str]) -> Tensor:
        return torch.searchsorted(self._ids, self._tokenizer(texts))  # (n, CONTEXT)


def small_clip(vocabulary: int, seed: int) -> CLIP:
    """1.8 million parameters from scratch."""
    torch.manual_seed(seed)
    return CLIP(
        DIM,
        CLIPVisionCfg(layers=(1, 1, 1, 1), width=16, image_size=SIZE),
        CLIPTextCfg(context_length=CONTEXT, vocab_size=vocabulary, width=64, heads=4, layers=2),
    )


def pixels(images: NDArray[np.uint8], shift: torch.Generator | None = None) -> Tensor:
    """(n, S, S, 3) bytes to (n, 3, S, S) in [-1, 1]; moved by up to 3 pixels where a generator is given."""
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    if shift is not None:
        moves = torch.randint(-3, 4, (len(x), 2), generator=shift).tolist()
        x = torch.stack([image.roll((a, b), dims=(1, 2)) for image, (a, b) in zip(x, moves, strict=True)])
    return x.contiguous(memory_format=torch.channels_last)


def captions(which: list[emoji.Emoji], rng: np.random.Generator) -> list[str]:
    """The name and some of the tags in random order, behind the name of the group in one case of three."""
    texts = []
    for one in which:
        tags = rng.permutation(np.array(one.tags, dtype=object))[: rng.integers(0, 6)].tolist()
        texts.append(", ".join([*([one.group] if rng.random() < 1 / 3 else []), one.label, *tags]))
    return texts


# --- one run ----------------------------------------------------------------------------------------------------------


def train(
    row: str, seed: int, data: emoji.EmojiImages, splits: emoji.Splits, settings: Settings
) -> tuple[CLIP, Tokens]:
    """A model from scratch. A batch holds an emoji once, in a style drawn at random."""
    tokens = Tokens([e.text for e in data.emoji] + sorted({e.group for e in data.emoji}))
    model = unnormalize(small_clip(tokens.size, seed)).to(DEVICE, memory_format=torch.channels_last)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    images_of = [np.flatnonzero(splits.owners == i) for i in np.unique(splits.owners)]

    def batch() -> tuple[Tensor, Tensor]:
        drawn = rng.choice(len(images_of), settings.batch_size, replace=False)
        rows = np.array([rng.choice(images_of[i]) for i in drawn])
        texts = tokens(captions([data.emoji[i] for i in splits.owners[rows]], rng))
        return pixels(splits.images[rows], generator).to(DEVICE), texts.to(DEVICE)

    if not row.startswith("norm-sym"):
        rescale_output(model, *batch())
    if row.endswith("cut-init"):
        stm.cut_init(model, 3.0, where=lambda name, _: name.startswith(("visual.attnpool.c_proj", "text_projection")))
    loss_function = AsymmetricClipLoss.from_preset(ROWS[row])
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=(0.9, 0.98),
        eps=1e-6,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / settings.warmup) * (1 + np.cos(np.pi * step / settings.steps)) / 2,
    )
    model.train()
    for step in range(settings.steps):
        images, texts = batch()
        image_features, text_features, scale = model(images, texts)
        if row.endswith("GradScale"):
            image_features, text_features = grad_scale(image_features), grad_scale(text_features)
        loss = loss_function(image_features, text_features, scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, np.log(100))  # as open_clip_train does
        if step % 50 == 0 or step == settings.steps - 1:
            print(f"  {row}, seed {seed}, step {step}: loss {loss.item():.3f}, scale {scale.item():.1f}", flush=True)
    return model.eval(), tokens


@torch.no_grad()
def encode(model: CLIP, tokens: Tokens, images: NDArray[np.uint8], texts: list[str]) -> tuple[Floats, Floats]:
    """Raw features: (n, D), (m, D)."""
    x = [model.encode_image(pixels(images[i : i + 128]).to(DEVICE)) for i in range(0, len(images), 128)]
    y = [model.encode_text(tokens(texts[i : i + 128]).to(DEVICE)) for i in range(0, len(texts), 128)]
    return torch.cat(x).cpu().numpy(), torch.cat(y).cpu().numpy()


def measure(images: Floats, texts: Floats, relevant: NDArray[np.bool_]) -> dict[str, Any]:
    """Retrieval, Cohen's d and hubs: (n, D), (m, D), (n, m).

    N_10 of an item is the number of queries that have it among their ten best. Its skewness says how far a few hubs are
    in many lists. "Hard" d is Cohen's d between the norms of the relevant items of all queries and of their ten nearest
    irrelevant items by cosine.
    """
    x, y = torch.from_numpy(images), torch.from_numpy(texts)
    metrics: dict[str, float] = evaluate_retrieval(x, y, relevant)
    norms = {"image": np.linalg.norm(images, axis=1), "text": np.linalg.norm(texts, axis=1)}
    occurrence = {}
    for name, similarity in (("cosine", stm.COSINE), ("dot", stm.DOT)):
        scores = similarity(x, y).numpy()
        for way, side, ranked, wanted in (("i2t", "text", scores, relevant), ("t2i", "image", scores.T, relevant.T)):
            order = np.argsort(-ranked, axis=1, kind="stable")
            n_10 = np.bincount(order[:, :10].ravel(), minlength=len(norms[side]))
            occurrence[f"{name}_{side}"] = n_10
            metrics[f"{name}_{side}_hub_skew"] = float(stats.skew(n_10)) if np.ptp(n_10) else np.nan
            metrics[f"{name}_{side}_hub_norm"] = stm.geometry.spearman(n_10, norms[side])
            hits = np.take_along_axis(wanted, order, axis=1)
            asked = hits.any(axis=1)
            precisions = hits.cumsum(axis=1) / np.arange(1, hits.shape[1] + 1) * hits
            metrics[f"{name}_{way}_map"] = float((precisions.sum(axis=1) / hits.sum(axis=1).clip(1))[asked].mean())
            if name == "cosine":
                near = ~hits & ((~hits).cumsum(axis=1) <= 10) & asked[:, None]
                metrics[f"{side}_hard_d"] = stm.geometry.cohens_d(norms[side][order[hits]], norms[side][order[near]])
    return {"metrics": metrics, "norms": norms, "occurrence": occurrence}


def zero_shot(images: Floats, classes: Floats, labels: NDArray[np.int64]) -> dict[str, float]:
    """The share of images whose best class is the right one: (n, D), (C, D), (n,)."""
    right = labels[:, None] == np.arange(len(classes))
    found = evaluate_retrieval(torch.from_numpy(images), torch.from_numpy(classes), right, ks=(1,))
    return {name: found[f"{name}_i2t_recall@1"] for name in ("cosine", "dot")}


def one_run(row: str, seed: int, cache: str | None, settings: Settings, path: Path) -> None:
    """Train, measure both tests, and keep that as JSON."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    data = emoji.build(cache, SIZE, emoji.STYLES)
    splits = data.split(seed)
    model, tokens = train(row, seed, data, splits, settings)
    classes = sorted({e.group for e in data.emoji})
    record: dict[str, Any] = {"row": row, "seed": seed, "settings": settings._asdict(), "tests": {}}
    for name in TESTS:
        test: emoji.Split = getattr(splits, name)
        images, texts = encode(model, tokens, test.images, test.texts)
        prompts = encode(model, tokens, test.images[:1], classes)[1]
        measured = measure(images, texts, test.relevance)
        labels = np.array([classes.index(group) for group in test.groups])[test.relevance.argmax(axis=1)]
        record["tests"][name] = {
            "metrics": {key: value if np.isfinite(value) else None for key, value in measured["metrics"].items()},
            "zero_shot": zero_shot(images, prompts, labels),
            "majority": float(np.bincount(labels).max() / len(labels)),
            "sizes": [len(images), len(texts)],
        }
        if seed == 0:  # for the picture
            record["tests"][name] |= {
                "norms": {side: values.round(5).tolist() for side, values in measured["norms"].items()},
                "occurrence": {key: values.tolist() for key, values in measured["occurrence"].items()},
            }
    record["seconds"] = time.perf_counter() - began
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps(record) + "\n", encoding="utf-8")
    partial.replace(path)


# --- tables -----------------------------------------------------------------------------------------------------------

# d image, d text; R@1 cosine I->T, T->I; dot I->T, T->I
TABLE_6 = {
    "norm-sym": (-0.55, -0.30, 38.4, 28.0, 32.8, 26.3),
    "nonorm-sym": (-0.65, -0.06, 23.4, 19.1, 25.1, 19.5),
    "imgnorm-i2t": (5.72, 1.83, 30.5, 0.3, 32.1, 0.3),
    "nonorm-i2t": (-0.49, 0.58, 18.0, 12.4, 21.2, 9.6),
    "txtnorm-t2i": (2.11, 10.89, 1.9, 17.6, 0.2, 23.4),
    "nonorm-t2i": (1.31, 1.21, 8.6, 13.5, 6.9, 16.7),
}
CELLS = ("d image", "d text", "cos I→T", "cos T→I", "dot I→T", "dot T→I")
SIGNED = ("d image", "d text", "dot − cos I→T", "dot − cos T→I")

Runs = dict[str, list[dict[str, Any]]]  # row to records, by seed


def margin(values: Sequence[float]) -> float:
    """Half a 95 % t interval of the mean; nan for one value."""
    n = len(values)
    return float(stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / n**0.5) if n > 1 else float("nan")


def shown(values: Sequence[float], digits: int, sign: bool = False) -> str:
    """Mean and half interval, such as ``12.3 ± 1.0``."""
    mean = f"{np.mean(values):{'+' if sign else ''}.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {margin(values):.{digits}f}"


def cells(record: dict[str, Any], test: str) -> tuple[float, ...]:
    """The six cells of Table 6 of one run."""
    m = record["tests"][test]["metrics"]
    recalls = [f"{similarity}_{way}_recall@1" for similarity in ("cosine", "dot") for way in ("i2t", "t2i")]
    return (m["image_hard_d"], m["text_hard_d"], *(100 * m[name] for name in recalls))


def signed(six: Sequence[float]) -> tuple[float, ...]:
    """The figures that have a sign: both d, and dot less cosine both ways."""
    return (six[0], six[1], six[4] - six[2], six[5] - six[3])


def verdict(values: Sequence[float], paper: float) -> str:
    """Whether the signs agree, as far as the seeds can tell."""
    if round(paper, 6) == 0:
        return "(paper 0)"
    if not np.any(values):
        return "0"
    same = np.sign(np.mean(values)) == np.sign(paper)
    if len(values) < 2:
        return "same sign" if same else "other sign"
    if not abs(np.mean(values)) > margin(values):
        return "open"
    return "agrees" if same else "disagrees"


def sign_table(runs: Runs, test: str) -> list[str]:
    """The figures with a sign in the paper's Table 6, with interval and verdict."""
    lines = [f"| {TESTS[test].lower()} | seeds | {' | '.join(SIGNED)} |", f"| --- | ---: |{' --- |' * len(SIGNED)}"]
    for row in TABLE_6:
        if row in runs:
            columns = list(zip(*(signed(cells(record, test)) for record in runs[row]), strict=True))
            entries = [
                f"{shown(v, 2 if i < 2 else 1, sign=True)} {verdict(v, paper)}"
                for i, (v, paper) in enumerate(zip(columns, signed(TABLE_6[row]), strict=True))
            ]
            lines.append(f"| {row} | {len(runs[row])} | {' | '.join(entries)} |")
    return lines


def print_table(runs: Runs, test: str) -> None:
    found = next(iter(runs.values()))[0]["tests"][test]["sizes"]
    print(f"### {TESTS[test]}: {found[0]} images, {found[1]} texts\n")
    print("Hard Cohen's d and R@1 in %; in brackets the paper's Table 6.\n")
    print(f"| | seeds | {' | '.join(CELLS)} |")
    print(f"| --- | ---: |{' ---: |' * len(CELLS)}")
    for row, records in runs.items():
        columns = list(zip(*(cells(record, test) for record in records), strict=True))
        entries = [shown(values, 2 if i < 2 else 1, sign=i < 2) for i, values in enumerate(columns)]
        if row in TABLE_6:
            papers = [f"{paper:.{2 if i < 2 else 1}f}" for i, paper in enumerate(TABLE_6[row])]
            entries = [f"{entry} ({paper})" for entry, paper in zip(entries, papers, strict=True)]
        print(f"| {row} | {len(records)} | {' | '.join(entries)} |")
    print("\nSigns next to the paper's:\n")
    print("\n".join(sign_table(runs, test)) + "\n")
    base = {record["seed"]: cells(record, test) for record in runs.get("norm-sym", [])}
    if interventions := [row for row in runs if row not in TABLE_6 and base]:
        print("Less norm-sym of the same seed:\n")
        print(f"| | {' | '.join(CELLS)} |")
        print(f"| --- |{' ---: |' * len(CELLS)}")
        for row in interventions:
            pairs = [(cells(record, test), base[record["seed"]]) for record in runs[row] if record["seed"] in base]
            if pairs:
                columns = list(zip(*(np.subtract(a, b) for a, b in pairs), strict=True))
                print(f"| {row} | {' | '.join(shown(v, 2 if i < 2 else 1, True) for i, v in enumerate(columns))} |")
        print()
    print(
        "Hubs and classes: Spearman of N_10 by cosine with the norm; skewness of N_10 of texts by cosine, by dot; MAP"
    )
    majority = np.mean([record["tests"][test]["majority"] for records in runs.values() for record in records])
    print(f"and zero-shot accuracy of nine groups in % (the largest group: {100 * majority:.1f}).\n")
    print(
        "| | N_10 ~ norm, image | text | skew, cos | dot | MAP I→T, cos | dot | T→I, cos | dot | classes, cos | dot |"
    )
    print(f"| --- |{' ---: |' * 10}")
    for row, records in runs.items():
        tests = [record["tests"][test] for record in records]
        line = [shown([t["metrics"][f"cosine_{side}_hub_norm"] for t in tests], 2, True) for side in ("image", "text")]
        line += [shown([t["metrics"][f"{s}_text_hub_skew"] for t in tests], 1) for s in ("cosine", "dot")]
        for way in ("i2t", "t2i"):
            line += [shown([100 * t["metrics"][f"{s}_{way}_map"] for t in tests], 1) for s in ("cosine", "dot")]
        line += [shown([100 * t["zero_shot"][s] for t in tests], 1) for s in ("cosine", "dot")]
        print(f"| {row} | {' | '.join(line)} |")
    print(flush=True)


def plot_hubs(runs: Runs, path: Path, test: str = "unseen_emoji") -> None:
    """The norm of each item of the found side against N_10 by cosine, of seed 0; demoted hubs stand out.

    A hub is among the tenth of items with the largest N_10 by cosine; it is demoted if dot halves that.
    """
    plt = pyplot()
    panels = [
        (row, side)
        for row, side in (
            ("norm-sym", "text"),
            ("nonorm-sym", "text"),
            ("imgnorm-i2t", "text"),
            ("txtnorm-t2i", "image"),
        )
        if row in runs and runs[row][0]["seed"] == 0
    ]
    if not panels:
        return
    figure, axes = plt.subplots(
        1, len(panels), figsize=(3.2 * len(panels), 3.9), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, (row, side) in zip(axes[0], panels, strict=True):
        measured = runs[row][0]["tests"][test]
        norms = np.array(measured["norms"][side])
        by_cosine, by_dot = (np.array(measured["occurrence"][f"{s}_{side}"]) for s in ("cosine", "dot"))
        relative = norms / np.median(norms)
        is_hub = by_cosine >= max(np.quantile(by_cosine, 0.9), 1)
        demoted = is_hub & (by_dot <= by_cosine / 2)
        for which, colour, label in (
            (~is_hub, "0.7", "others"),
            (is_hub & ~demoted, "tab:blue", "hubs"),
            (demoted, "tab:red", "hubs that dot demotes"),
        ):
            axis.scatter(by_cosine[which] + 1, relative[which], s=10, color=colour, label=f"{label}: {which.sum()}")
        axis.axhline(1, color="0.4", linewidth=0.6)
        axis.set_xscale("log")
        axis.set_xlabel("1 + N₁₀ by cosine")
        axis.set_title(f"{row}, {side}s: ρ = {measured['metrics'][f'cosine_{side}_hub_norm']:+.2f}", fontsize=10)
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=1, frameon=False)
    axes[0, 0].set_ylabel("norm / median norm")
    figure.savefig(path, dpi=110)
    plt.close(figure)


# --- the study --------------------------------------------------------------------------------------------------------


def collect(folder: Path, settings: Settings, rows: Sequence[str], seeds: Sequence[int]) -> Runs:
    """The stored runs of these rows and seeds with these settings."""
    runs: Runs = {}
    for row in rows:
        for seed in seeds:
            path = record_path(folder, row, seed)
            if path.is_file():
                record = json.loads(path.read_text(encoding="utf-8"))
                if record["settings"] == settings._asdict():
                    for test in record["tests"].values():  # JSON has no nan
                        test["metrics"] = {k: np.nan if v is None else v for k, v in test["metrics"].items()}
                    runs.setdefault(row, []).append(record)
    return runs


def record_path(folder: Path, row: str, seed: int) -> Path:
    return folder / f"{row.replace(', ', '-')}-seed{seed}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 100 steps of 64: too short for conclusions")
    parser.add_argument("--output", type=Path, default=Path("runs/clip"), help="folder for the picture")
    parser.add_argument("--results", type=Path, help="folder of the runs; default: benchmarks/results/clip")
    parser.add_argument("--cache", help="a folder for packages and images; default: $ST_MAGNITUDE_CACHE or ~/.cache")
    parser.add_argument("--seeds", help="such as 0,1 (default: 0 to 4; 0 with --quick)")
    parser.add_argument("--rows", help=f"numbers from 1 of {', '.join(ROWS)}; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--table", action="store_true", help="train nothing, print what there is")
    arguments = parser.parse_args()
    settings = QUICK if arguments.quick else Settings()
    folder = arguments.results or (arguments.output / "quick" if arguments.quick else RESULTS)
    seeds = [int(s) for s in (arguments.seeds or ("0" if arguments.quick else "0,1,2,3,4")).split(",")]
    names = list(ROWS)
    rows = names if arguments.rows is None else [names[int(i) - 1] for i in arguments.rows.split(",")]
    began = time.perf_counter()
    if not arguments.table:
        try:
            emoji.build(arguments.cache, SIZE, emoji.STYLES)  # once, before processes race for it
        except DataError as error:
            parser.exit(1, f"{error}\n")
        have = collect(folder, settings, rows, seeds)
        done = {(row, record["seed"]) for row, records in have.items() for record in records}
        jobs = [
            (row, seed, arguments.cache, settings, record_path(folder, row, seed))
            for seed in seeds
            for row in rows
            if (row, seed) not in done
        ]
        if arguments.jobs == 1:
            for job in jobs:
                one_run(*job)
        else:
            with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
                for result in [pool.submit(one_run, *job) for job in jobs]:
                    result.result()
    runs = collect(folder, settings, rows, seeds)
    if not runs:
        parser.exit(1, f"There are no runs in {folder} yet: run without --table.\n")
    print(f"## {settings.steps} steps of {settings.batch_size}, learning rate {settings.lr:g}\n")
    for test in TESTS:
        print_table(runs, test)
    arguments.output.mkdir(parents=True, exist_ok=True)
    plot_hubs(runs, arguments.output / ("hubs-quick.png" if arguments.quick else "hubs.png"))
    spent = [record["seconds"] for records in runs.values() for record in records]
    print(
        f"[{len(spent)} runs of {np.mean(spent):.0f} s on average; this call took {time.perf_counter() - began:.0f} s]"
    )


if __name__ == "__main__":
    main()

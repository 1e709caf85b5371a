"""Asymmetric losses for CLIP: Table 6 of the magnitude paper on real images, for two cores.

    python benchmarks/studies/clip/clip.py [--rows 2,3,5,6] [--seeds 0,1,2] [--table]

Small open_clip models from scratch learn emoji and what they are called (data/emoji.py). One
training serves two tests: 500 emoji of the training data in a drawing style that training never
showed, and 250 emoji that training never showed, in the three styles of training.

Rows are the paper's six losses (*Beyond the Unit Hypersphere*, arXiv 2602.09229, Table 6). Losses
that keep a norm start with both projections divided by the mean norm
(`stm.clip.rescale_output`). A seed draws the split, the initial weights and the batches. Settings
are the same for all rows, were set beforehand and not tuned. The paper does not say how it pairs
relevant with irrelevant items for Cohen's d: over all pairs d is 0 for any features where all items
have equally many partners, so it is the "hard" pairing here, relevant items against the 10 nearest
irrelevant ones of each query by cosine. Every run is a line of cells.jsonl and not repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data import emoji
from benchmarks.studies.estimates import margin, markdown
from benchmarks.studies.store import Figures, Store
from numpy.typing import NDArray
from open_clip import SimpleTokenizer
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from scipy.stats import spearmanr
from torch import Tensor

import st_magnitude as stm
from st_magnitude.clip import AsymmetricClipLoss, evaluate_retrieval, rescale_output, unnormalize

CONTEXT, DIM = 20, 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TABLE_6 = {  # preset to the paper's d image, d text; R@1 cosine I->T, T->I; dot I->T, T->I
    "norm-sym": (-0.55, -0.30, 38.4, 28.0, 32.8, 26.3),
    "nonorm-sym": (-0.65, -0.06, 23.4, 19.1, 25.1, 19.5),
    "imgnorm-i2t": (5.72, 1.83, 30.5, 0.3, 32.1, 0.3),
    "nonorm-i2t": (-0.49, 0.58, 18.0, 12.4, 21.2, 9.6),
    "txtnorm-t2i": (2.11, 10.89, 1.9, 17.6, 0.2, 23.4),
    "nonorm-t2i": (1.31, 1.21, 8.6, 13.5, 6.9, 16.7),
}

STEPS, WARMUP, BATCH, RATE, DECAY = 300, 30, 128, 1e-3, 0.1  # of all rows, chosen beforehand
Floats = NDArray[np.float32]
TESTS = {"unseen_style": "Unseen style", "unseen_emoji": "Unseen emoji"}


# --- data and model -------------------------------------------------------------------------------


class Tokens:
    """open_clip's tokenizer with the ids that these texts use counted through.

    The order of ids stays, and with it the largest one, by which open_clip finds the end of a text.
    """

    def __init__(self, texts: list[str]) -> None:
        self._tokenizer = SimpleTokenizer(context_length=CONTEXT)
        # sorted, 0 (padding) first
        self._ids = torch.unique(SimpleTokenizer(context_length=77)(texts))
        self.size = len(self._ids)

    def __call__(self, texts: list[str]) -> Tensor:
        return torch.searchsorted(self._ids, self._tokenizer(texts))  # (n, CONTEXT)


def small_clip(vocabulary: int, seed: int) -> CLIP:
    """1.8 million parameters from scratch."""
    torch.manual_seed(seed)
    return CLIP(
        DIM,
        CLIPVisionCfg(layers=(1, 1, 1, 1), width=16, image_size=emoji.SIZE),
        CLIPTextCfg(context_length=CONTEXT, vocab_size=vocabulary, width=64, heads=4, layers=2),
    )


def pixels(images: NDArray[np.uint8], shift: torch.Generator | None = None) -> Tensor:
    """(n, S, S, 3) bytes to (n, 3, S, S) in [-1, 1], moved by up to 3 pixels with a generator."""
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    if shift is not None:
        moves = torch.randint(-3, 4, (len(x), 2), generator=shift).tolist()
        pairs = zip(x, moves, strict=True)
        x = torch.stack([image.roll((a, b), dims=(1, 2)) for image, (a, b) in pairs])
    return x.contiguous(memory_format=torch.channels_last)


def captions(which: list[emoji.Emoji], rng: np.random.Generator) -> list[str]:
    """The name and some tags in random order, behind the name of the group in one case of three."""
    texts = []
    for one in which:
        tags = rng.permutation(np.array(one.tags, dtype=object))[: rng.integers(0, 6)].tolist()
        texts.append(", ".join([*([one.group] if rng.random() < 1 / 3 else []), one.label, *tags]))
    return texts


# --- one run --------------------------------------------------------------------------------------


def train(
    row: str, seed: int, data: emoji.EmojiImages, splits: emoji.Splits
) -> tuple[CLIP, Tokens]:
    """A model from scratch. A batch holds an emoji once, in a style drawn at random."""
    tokens = Tokens([e.text for e in data.emoji] + sorted({e.group for e in data.emoji}))
    model = unnormalize(small_clip(tokens.size, seed)).to(DEVICE, memory_format=torch.channels_last)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    images_of = [np.flatnonzero(splits.owners == i) for i in np.unique(splits.owners)]

    def batch() -> tuple[Tensor, Tensor]:
        drawn = rng.choice(len(images_of), BATCH, replace=False)
        rows = np.array([rng.choice(images_of[i]) for i in drawn])
        texts = tokens(captions([data.emoji[i] for i in splits.owners[rows]], rng))
        return pixels(splits.images[rows], generator).to(DEVICE), texts.to(DEVICE)

    if row != "norm-sym":
        rescale_output(model, *batch())
    loss_function = AsymmetricClipLoss.from_preset(row)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}]
    groups += [{"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), eps=1e-6)

    def share(step: int) -> float:
        warm = min(1.0, (step + 1) / WARMUP)
        return warm * (1 + np.cos(np.pi * step / STEPS)) / 2

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    model.train()
    for _ in range(STEPS):
        images, texts = batch()
        loss = loss_function(*model(images, texts))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, np.log(100))  # as open_clip_train does
    return model.eval(), tokens


@torch.no_grad()
def encode(
    model: CLIP, tokens: Tokens, images: NDArray[np.uint8], texts: list[str]
) -> tuple[Floats, Floats]:
    """Raw features: (n, D), (m, D)."""
    starts = range(0, len(images), 128)
    x = [model.encode_image(pixels(images[i : i + 128]).to(DEVICE)) for i in starts]
    starts = range(0, len(texts), 128)
    y = [model.encode_text(tokens(texts[i : i + 128]).to(DEVICE)) for i in starts]
    return torch.cat(x).cpu().numpy(), torch.cat(y).cpu().numpy()


def metrics_of(images: Floats, texts: Floats, relevant: NDArray[np.bool_]) -> dict[str, float]:
    """Retrieval, Cohen's d, and hubs by cosine: (n, D), (m, D), (n, m).

    N_10 of an item is the number of queries that have it among their ten best.
    """
    x, y = torch.from_numpy(images), torch.from_numpy(texts)
    metrics: dict[str, float] = evaluate_retrieval(x, y, relevant)
    scores = stm.COSINE(x, y).numpy()
    sides = {"text": (scores, texts), "image": (scores.T, images)}
    for side, (ranked, found) in sides.items():
        norms = np.linalg.norm(found, axis=1)
        order = np.argsort(-ranked, axis=1, kind="stable")
        n_10 = np.bincount(order[:, :10].ravel(), minlength=len(norms))
        metrics[f"cosine_{side}_hub_norm"] = float(spearmanr(n_10, norms).statistic)
        metrics[f"{side}_hard_d"] = metrics.pop(f"{side}_cohens_d")
    return metrics


@dataclass(frozen=True)
class Cell:
    """A row of Table 6."""

    row: str
    seed: int = 0


CELLS = Store(Path(__file__).with_name("cells.jsonl"), Cell)


def one_run(row: str, seed: int) -> Figures:
    """Train, and measure both tests."""
    torch.set_num_threads(1)
    data = emoji.build(emoji.STYLES)
    splits = data.split(seed)
    model, tokens = train(row, seed, data, splits)
    record: Figures = {"tests": {}}
    for name in TESTS:
        test: emoji.Split = getattr(splits, name)
        metrics = metrics_of(*encode(model, tokens, test.images, test.texts), test.relevance)
        metrics = {k: v for k, v in metrics.items() if np.isfinite(v)}  # JSON has no nan
        record["tests"][name] = {"metrics": metrics, "sizes": [len(test.images), len(test.texts)]}
    return record


# --- tables ---------------------------------------------------------------------------------------

COLUMNS = ("d image", "d text", "cos I→T", "cos T→I", "dot I→T", "dot T→I")
SIGNED = ("d image", "d text", "dot − cos I→T", "dot − cos T→I")

Runs = dict[str, list[dict[str, Any]]]  # row to records, by seed


def shown(values: Sequence[float], digits: int, sign: bool = False) -> str:
    """Mean and half interval, such as ``12.3 ± 1.0``."""
    mean = f"{np.mean(values):{'+' if sign else ''}.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {margin(values):.{digits}f}"


def six_figures(record: dict[str, Any], test: str) -> tuple[float, ...]:
    """The six figures of Table 6 of one run."""
    m = record["tests"][test]["metrics"]
    recalls = [
        f"{similarity}_{way}_recall@1" for similarity in ("cosine", "dot") for way in ("i2t", "t2i")
    ]
    return (m["image_hard_d"], m["text_hard_d"], *(100 * m[name] for name in recalls))


def signed(six: Sequence[float]) -> tuple[float, ...]:
    """The figures that have a sign: both d, and dot less cosine both ways."""
    return (six[0], six[1], six[4] - six[2], six[5] - six[3])


def verdict(values: Sequence[float], paper: float) -> str:
    """Whether the signs agree, as far as the seeds can tell."""
    if round(paper, 6) == 0:
        return "(paper 0)"
    if not abs(np.mean(values)) > margin(values):
        return "open"
    return "agrees" if np.sign(np.mean(values)) == np.sign(paper) else "disagrees"


def sign_table(runs: Runs, test: str) -> list[str]:
    """The figures with a sign in the paper's Table 6, with interval and verdict."""
    rows = []
    for row in (row for row in TABLE_6 if row in runs):
        columns = zip(*(signed(six_figures(record, test)) for record in runs[row]), strict=True)
        pairs = enumerate(zip(columns, signed(TABLE_6[row]), strict=True))
        entries = [
            f"{shown(v, 2 if i < 2 else 1, sign=True)} {verdict(v, paper)}"
            for i, (v, paper) in pairs
        ]
        rows.append([row, len(runs[row]), *entries])
    return markdown([TESTS[test].lower(), "seeds", *SIGNED], rows, "lrllll")


def tables(runs: Runs, test: str) -> list[str]:
    """Hard Cohen's d and R@1 in %, and N_10 by cosine against the norm."""
    rows, hubs = [], []
    for row, records in runs.items():
        columns = zip(*(six_figures(record, test) for record in records), strict=True)
        digits = [2, 2, 1, 1, 1, 1]
        values = [shown(v, n, n == 2) for v, n in zip(columns, digits, strict=True)]
        paper = [f"{x:.{n}f}" for x, n in zip(TABLE_6[row], digits, strict=True)]
        entries = [f"{a} ({b})" for a, b in zip(values, paper, strict=True)]
        rows.append([row, len(records), *entries])
        metrics = [record["tests"][test]["metrics"] for record in records]
        keys = [f"cosine_{side}_hub_norm" for side in ("image", "text")]
        hubs.append([row, *(shown([m[key] for m in metrics], 2, True) for key in keys)])
    parts = (
        [f"### {TESTS[test]}"],
        markdown(["", "seeds", *COLUMNS], rows),
        sign_table(runs, test),
        markdown(["N_10 against norm", "image", "text"], hubs),
    )
    return [line for part in parts for line in [*part, ""]]


# --- the study ------------------------------------------------------------------------------------


def collect() -> Runs:
    """The stored runs."""
    found = {row: list(CELLS.of_seeds(Cell(row), 5).values()) for row in TABLE_6}
    return {row: stored for row, stored in found.items() if stored}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--rows", default="1,2,3,4,5,6", help=f"of {', '.join(TABLE_6)}")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--table", action="store_true", help="train nothing, print what there is")
    arguments = parser.parse_args()
    rows = [list(TABLE_6)[int(i) - 1] for i in arguments.rows.split(",")]
    jobs = [(row, int(seed)) for seed in arguments.seeds.split(",") for row in rows]
    todo = [job for job in jobs if not CELLS.load(Cell(*job))]
    if todo and not arguments.table:
        emoji.build(emoji.STYLES)  # once, before processes race for it
        with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
            for job, figures in zip(todo, pool.map(one_run, *zip(*todo, strict=True)), strict=True):
                CELLS.add(Cell(*job), figures)
    runs = collect()
    for test in TESTS:
        print("\n".join(tables(runs, test)))


if __name__ == "__main__":
    main()

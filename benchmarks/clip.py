"""stub"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import emoji
import numpy as np
import torch
from numpy.typing import NDArray
from open_clip import SimpleTokenizer
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from torch import Tensor

import st_magnitude as stm
from st_magnitude.clip import AsymmetricClipLoss, calibrate, unnormalize

SIZE, CONTEXT, DIM = 48, 20, 128
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


# --- data and model ---------------------------------------------------------------------------------------------------


class Tokens:
    """open_clip's tokenizer with the ids that these texts use counted through, so that no embedding lies idle.

    The order of ids stays, and with it the largest one, by which open_clip finds the end of a text.
    """

    def __init__(self, texts: list[str]) -> None:
        self._tokenizer = SimpleTokenizer(context_length=CONTEXT)
        self._ids = torch.unique(SimpleTokenizer(context_length=77)(texts))  # sorted, 0 (padding) first
        self.size = len(self._ids)

    def __call__(self, texts: list[str]) -> Tensor:
        return torch.searchsorted(self._ids, self._tokenizer(texts))  # (n, CONTEXT)


def small_clip(vocabulary: int, seed: int) -> CLIP:
    """1.9 million parameters from scratch."""
    torch.manual_seed(seed)
    return CLIP(
        DIM,
        CLIPVisionCfg(layers=(1, 1, 1, 1), width=16, image_size=SIZE),
        CLIPTextCfg(context_length=CONTEXT, vocab_size=vocabulary, width=64, heads=4, layers=2),
    )


def pixels(images: NDArray[np.uint8], shift: torch.Generator | None = None) -> Tensor:
    """(n, S, S, 3) bytes to (n, 3, S, S) in [-1, 1]; each image is moved by up to 3 pixels where a generator is given."""
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


def train(row: str, seed: int, data: emoji.EmojiImages, splits: emoji.Splits, settings: Settings) -> tuple[CLIP, Tokens]:
    """A model from scratch. A batch holds an emoji once, in a style drawn at random."""
    tokens = Tokens([e.text for e in data.emoji] + sorted({e.group for e in data.emoji}))
    model = unnormalize(small_clip(tokens.size, seed)).to(memory_format=torch.channels_last)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    images_of = [np.flatnonzero(splits.owners == i) for i in np.unique(splits.owners)]

    def batch() -> tuple[Tensor, Tensor]:
        drawn = rng.choice(len(images_of), settings.batch_size, replace=False)
        rows = np.array([rng.choice(images_of[i]) for i in drawn])
        return pixels(splits.images[rows], generator), tokens(captions([data.emoji[i] for i in splits.owners[rows]], rng))

    if not row.startswith("norm-sym"):
        calibrate(model, *batch())
    if row.endswith("GradScale"):
        stm.attach_grad_scale(model, power=1.0)
    if row.endswith("cut-init"):
        stm.cut_init(model, c=3.0)
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
def encode(model: CLIP, tokens: Tokens, images: NDArray[np.uint8], texts: list[str]) -> tuple[Any, Any]:
    """Raw features: (n, D), (m, D)."""
    x = torch.cat([model.encode_image(pixels(images[i : i + 128])) for i in range(0, len(images), 128)])
    y = torch.cat([model.encode_text(tokens(texts[i : i + 128])) for i in range(0, len(texts), 128)])
    return x.numpy(), y.numpy()


def one_run(row: str, seed: int, data: emoji.EmojiImages, settings: Settings, path: Path) -> None:
    """Train and keep the raw features of dev and both tests in a file."""
    began = time.perf_counter()
    splits = data.split(seed)
    model, tokens = train(row, seed, data, splits, settings)
    kept: dict[str, Any] = {}
    for name in ("dev", "unseen_style", "unseen_emoji"):
        test: emoji.Split = getattr(splits, name)
        kept[f"{name}_images"], kept[f"{name}_texts"] = encode(model, tokens, test.images, test.texts)
        kept[f"{name}_relevance"], kept[f"{name}_groups"] = test.relevance, np.array(test.groups)
    kept["class_names"] = np.array(sorted({e.group for e in data.emoji}))
    kept["class_features"] = encode(model, tokens, splits.dev.images[:1], kept["class_names"].tolist())[1]
    kept["settings"] = json.dumps(settings._asdict())
    kept["seconds"] = time.perf_counter() - began
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    np.savez_compressed(partial, **kept)
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache"); parser.add_argument("--steps", type=int, default=300); parser.add_argument("--rows", default="norm-sym")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    data = emoji.build(a.cache, SIZE, emoji.STYLES)
    for row in a.rows.split("|"):
        one_run(row, a.seed, data, Settings(steps=a.steps), Path("/tmp/clipd_scratch/runs") / f"{row}-{a.seed}-{a.steps}.npz")


if __name__ == "__main__":
    main()

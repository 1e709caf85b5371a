"""open_clip's training program with a loss of st_magnitude.

    pip install ".[clip]"
    python examples/clip_training.py --model ViT-B-32 --train-data "shards/{000..099}.tar"

The arguments are those of open_clip_train, whose loop, logs and checkpoints do not change.
"""

from __future__ import annotations

import argparse
import sys

import open_clip
import torch
from open_clip_train import main as program
from PIL import Image
from torch import nn

import st_magnitude as stm

PRESET = "imgnorm-i2t"
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "black", "white")
create_model = program.create_model_and_transforms


def create_model_and_transforms(name: str, *others: object, **options: object) -> tuple:
    """open_clip's model, which does not normalise and begins with mean norms of about 1.

    The norms are those of squares of one colour. Images and texts of yours make them exact.
    """
    model, *transforms = create_model(name, *others, **options)
    weight = next(p for p in model.visual.parameters() if p.ndim == 4)  # reads the pixels
    squares = [transforms[-1](Image.new("RGB", (256, 256), colour)) for colour in COLOURS]
    tokenize = open_clip.get_tokenizer(name, context_length=options.get("force_context_length"))
    texts = tokenize([f"a {colour} square" for colour in COLOURS])
    unnormalized = stm.clip.unnormalize(model)
    stm.clip.rescale_output(unnormalized, torch.stack(squares).to(weight), texts.to(weight.device))
    return (model, *transforms)


def create_loss(args: argparse.Namespace) -> nn.Module:
    gather = args.distributed
    return stm.clip.AsymmetricClipLoss.from_preset(PRESET, gather_across_devices=gather)


if __name__ == "__main__":
    program.create_model_and_transforms = create_model_and_transforms
    program.create_loss = create_loss
    program.main(sys.argv[1:])

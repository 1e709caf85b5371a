"""open_clip's training program with a loss of st_magnitude.

    pip install ".[clip]"
    python examples/clip_training.py --model ViT-B-32 --train-data "shards/{000..099}.tar"

The arguments are those of open_clip_train, whose loop, logs and checkpoints do not change.
"""

from __future__ import annotations

import argparse
import sys

from open_clip_train import main as program
from torch import nn

import st_magnitude as stm

PRESET = "imgnorm-i2t"
create_model = program.create_model_and_transforms


def create_model_and_transforms(*arguments: object, **options: object) -> tuple[object, ...]:
    """open_clip's model, which does not normalise and begins with mean norms of 1."""
    model, *transforms = create_model(*arguments, **options)
    stm.clip.rescale_output(stm.clip.unnormalize(model))
    return (model, *transforms)


def create_loss(args: argparse.Namespace) -> nn.Module:
    gather = args.distributed
    return stm.clip.AsymmetricClipLoss.from_preset(PRESET, gather_across_devices=gather)


if __name__ == "__main__":
    program.create_model_and_transforms = create_model_and_transforms
    program.create_loss = create_loss
    program.main(sys.argv[1:])

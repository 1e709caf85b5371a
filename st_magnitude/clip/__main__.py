"""open_clip's training program, and its arguments, with a loss of st_magnitude (``--preset``)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from torch import nn

from st_magnitude._checks import needs
from st_magnitude.clip.loss import PRESETS, AsymmetricClipLoss
from st_magnitude.clip.model import rescale_output, unnormalize


def main(arguments: Sequence[str] | None = None) -> None:
    with needs("python -m st_magnitude.clip", "clip"):
        from open_clip_train import main as program
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # those are open_clip's
    parser.add_argument("--preset", choices=PRESETS, default="imgnorm-i2t", help="A row of Table 6")
    own, theirs = parser.parse_known_args(arguments)
    create_model = program.create_model_and_transforms

    def create_raw_model(*values: Any, **options: Any) -> tuple[Any, ...]:
        """The model does not normalise, and begins with mean norms of 1."""
        model, *transforms = create_model(*values, **options)
        return rescale_output(unnormalize(model)), *transforms

    def create_loss(args: argparse.Namespace) -> nn.Module:
        if args.siglip or args.distill:
            parser.error("--siglip and --distill-model have losses of their own; leave them out.")
        return AsymmetricClipLoss.from_preset(own.preset, gather_across_devices=args.distributed)

    ours: Any = {"create_model_and_transforms": create_raw_model, "create_loss": create_loss}
    with patch.multiple(program, **ours):
        program.main(theirs)


if __name__ == "__main__":
    main()

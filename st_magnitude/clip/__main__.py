"""open_clip's training program, and its arguments, with a loss of st_magnitude (``--preset``)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from st_magnitude._checks import needs
from st_magnitude.clip.loss import PRESETS, AsymmetricClipLoss
from st_magnitude.clip.model import rescale_output, unnormalize

_NAME = "python -m st_magnitude.clip"


def main(arguments: Sequence[str] | None = None) -> None:
    with needs(_NAME, "clip"):
        from open_clip_train import main as program
    parser = argparse.ArgumentParser(
        _NAME,
        usage=argparse.SUPPRESS,  # open_clip's follows
        description=__doc__,
        epilog="All arguments of open_clip's program follow.",
        add_help=False,
        allow_abbrev=False,  # those are open_clip's
    )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="imgnorm-i2t",
        help="Which side keeps its norm, and the direction of the loss (docs/clip.md). Default:"
        " %(default)s.",
    )
    own, theirs = parser.parse_known_args(arguments)
    if {"-h", "--help"} & set(theirs):
        parser.print_help()
    args = program.parse_args(theirs)
    if args.siglip or args.distill_model:
        parser.error("--siglip and --distill-model have losses of their own; leave them out.")
    create_model = program.create_model_and_transforms

    def create_raw_model(*values: Any, **options: Any) -> tuple[Any, ...]:
        """The model does not normalise, and begins with mean norms of 1."""
        model, *transforms = create_model(*values, **options)
        return rescale_output(unnormalize(model)), *transforms

    def create_loss(args: argparse.Namespace) -> nn.Module:
        return AsymmetricClipLoss.from_preset(own.preset, gather_across_devices=args.distributed)

    given = dict(vars(program))
    vars(program).update(create_model_and_transforms=create_raw_model, create_loss=create_loss)
    try:
        program.main(theirs)
    finally:
        vars(program).update(given)


if __name__ == "__main__":
    sys.argv[0] = _NAME  # as open_clip's usage says it
    main()

"""open_clip's training loop with a loss of this package.

    python -m st_magnitude.clip PRESET [--no-rescale] -- <arguments of open_clip_train>

``python -m st_magnitude.clip imgnorm-i2t -- --model ViT-B-32 --train-data ...`` trains like
``python -m open_clip_train.main --model ViT-B-32 --train-data ...``, with the same logs and checkpoints, but with
``AsymmetricClipLoss.from_preset("imgnorm-i2t")`` and a model that does not normalise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

from st_magnitude._checks import INSTALL
from st_magnitude.clip.loss import PRESETS, AsymmetricClipLoss

__all__ = ["main", "training_program"]


def training_program(preset: str, rescale: bool = True) -> ModuleType:
    """A copy of ``open_clip_train.main`` of our own, whose ``main(arguments)`` trains with the preset.

    The program takes neither a loss nor a model. So it is loaded once more, under no name in ``sys.modules``, and in
    this copy ``create_loss`` and ``create_model_and_transforms`` are ours; open_clip's module stays as it is. The
    preset ``norm-sym`` does not change models.
    """
    from st_magnitude.clip.model import rescale_output, unnormalize  # its ImportError says what to install

    try:
        spec = find_spec("open_clip_train.main")
        program: Any = module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(program)  # type: ignore[union-attr]
        create = program.create_model_and_transforms
        program.create_loss  # noqa: B018
    except (AttributeError, ImportError, RuntimeError) as error:
        raise ImportError(
            f"open_clip's training program cannot be used ({error}). st_magnitude.clip needs open_clip_torch 3 with "
            f'what it trains with: install it {INSTALL} ".[clip]".'
        ) from error

    def create_loss(args: Any) -> AsymmetricClipLoss:
        others = {"--siglip": args.siglip, "--distill-model": args.distill, "CoCa": "coca" in args.model.lower()}
        if chosen := [name for name, is_on in others.items() if is_on]:
            raise ValueError(
                f"{chosen[0]} has another loss, which the preset {preset!r} would replace: leave it out, or train with "
                "open_clip's own program."
            )
        return AsymmetricClipLoss.from_preset(preset, gather_across_devices=args.distributed)

    def create_model_and_transforms(*arguments: Any, **options: Any) -> tuple[Any, ...]:
        model, *transforms = create(*arguments, **options)
        if preset != "norm-sym":
            unnormalize(model)
            if rescale:
                rescale_output(model)
        return (model, *transforms)

    program.create_loss, program.create_model_and_transforms = create_loss, create_model_and_transforms
    return program


def main(arguments: Sequence[str] | None = None) -> Any:
    """Trains, and returns the result of open_clip's main."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m st_magnitude.clip",
        usage="%(prog)s PRESET [--no-rescale] -- <arguments of open_clip_train>",
        description="open_clip's training loop with AsymmetricClipLoss.",
    )
    parser.add_argument("preset", choices=PRESETS, metavar="PRESET", help=", ".join(PRESETS))
    parser.add_argument(
        "--no-rescale", action="store_true", help="do not divide the last projections by the mean initial norms"
    )
    options = parser.parse_args(arguments[:end])
    if end == len(arguments):
        parser.error("the arguments of open_clip_train follow after `--`, e.g. `-- --model ViT-B-32 --train-data ...`")
    return training_program(options.preset, rescale=not options.no_rescale).main(arguments[end + 1 :])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ImportError as error:
        sys.exit(f"Error: {error}")

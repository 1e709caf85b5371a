"""open_clip's training loop with a loss of this package.

    python -m st_magnitude.clip PRESET [--no-calibrate] -- <arguments of open_clip_train>

``python -m st_magnitude.clip imgnorm-i2t -- --model ViT-B-32 --train-data ...`` trains like
``python -m open_clip_train.main --model ViT-B-32 --train-data ...``, with the same logs and checkpoints, but with
``AsymmetricClipLoss.from_preset("imgnorm-i2t")`` and a model that does not normalise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

from st_magnitude.clip import require_open_clip

try:
    require_open_clip()
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"Error: {error}")  # one line instead of a traceback

from st_magnitude.clip.loss import PRESETS, AsymmetricClipLoss, AsymmetricCoCaLoss
from st_magnitude.clip.model import calibrate, unnormalize

__all__ = ["main", "patched", "preset_loss"]


def training_program() -> ModuleType:
    """The module ``open_clip_train.main``."""
    try:
        return import_module("open_clip_train.main")
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f'open_clip\'s training loop cannot be imported ({error}): run `pip install "st-magnitude[clip]"`.'
        ) from error


def preset_loss(preset: str, args: Any) -> AsymmetricClipLoss:
    """The loss of a preset, with the arguments of open_clip's training loop, in place of its ``create_loss(args)``."""
    for flag, is_on in {"--siglip": getattr(args, "siglip", False), "--distill-model": args.distill}.items():
        if is_on:
            raise ValueError(
                f"{flag} chooses another loss, which the preset {preset!r} would replace: leave {flag} out."
            )
    options = {
        "local_loss": args.local_loss,
        "gather_with_grad": args.gather_with_grad,
        "rank": args.rank,
        "world_size": args.world_size,
        "use_horovod": getattr(args, "horovod", False),
    }
    if "coca" not in args.model.lower():
        return AsymmetricClipLoss.from_preset(preset, **options)
    return AsymmetricCoCaLoss.from_preset(
        preset,
        caption_loss_weight=args.coca_caption_loss_weight,
        clip_loss_weight=args.coca_contrastive_loss_weight,
        **options,
    )


@contextmanager
def patched(preset: str, rescale: bool = True) -> Iterator[None]:
    """Within the block, ``open_clip_train.main.main(arguments)`` trains with the preset.

    It replaces, in that module only, ``create_loss`` (open_clip 3) or the loss of the task that ``create_task`` returns
    (open_clip 4), and ``create_model_and_transforms``, whose model no longer normalises. The preset ``norm-sym`` does
    not change models.
    """
    program = training_program()
    create: Callable[..., tuple[Any, ...]] = program.create_model_and_transforms

    @wraps(create)
    def create_model_and_transforms(*arguments: Any, **options: Any) -> tuple[Any, ...]:
        model, *transforms = create(*arguments, **options)
        if preset != "norm-sym":
            unnormalize(model)
            if rescale:
                calibrate(model)
        return (model, *transforms)

    replacements: dict[str, Any] = {"create_model_and_transforms": create_model_and_transforms}
    if hasattr(program, "create_task"):
        create_task = program.create_task

        def with_loss(args: Any, *arguments: Any, **options: Any) -> Any:
            task = create_task(args, *arguments, **options)
            task.loss = preset_loss(preset, args)
            return task

        replacements["create_task"] = with_loss
    else:
        replacements["create_loss"] = lambda args: preset_loss(preset, args)
    originals = {name: getattr(program, name) for name in replacements}
    vars(program).update(replacements)
    try:
        yield
    finally:
        vars(program).update(originals)


def main(arguments: Sequence[str] | None = None) -> Any:
    """Trains, and returns the result of open_clip's main."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m st_magnitude.clip",
        usage="%(prog)s PRESET [--no-calibrate] -- <arguments of open_clip_train>",
        description="open_clip's training loop with AsymmetricClipLoss.",
    )
    parser.add_argument("preset", choices=PRESETS, metavar="PRESET", help=", ".join(PRESETS))
    parser.add_argument(
        "--no-calibrate", action="store_true", help="do not divide the last projections by the mean initial norms"
    )
    options = parser.parse_args(arguments[:end])
    if end == len(arguments):
        parser.error("the arguments of open_clip_train follow after `--`, e.g. `-- --model ViT-B-32 --train-data ...`")
    with patched(options.preset, rescale=not options.no_calibrate):
        return training_program().main(arguments[end + 1 :])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ImportError as error:
        sys.exit(f"Error: {error}")

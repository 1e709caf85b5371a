"""open_clip's training program with a loss of this package.

``python -m st_magnitude.clip imgnorm-i2t -- --model ViT-B-32 ...`` trains and logs like
``python -m open_clip_train.main --model ViT-B-32 ...``, but trains and validates with
``AsymmetricClipLoss.from_preset("imgnorm-i2t")`` a model that does not normalise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec, module_from_spec
from types import ModuleType

from torch import Tensor

from st_magnitude._checks import INSTALL
from st_magnitude.clip.loss import PRESETS, AsymmetricClipLoss


def training_program(preset: str) -> ModuleType:
    """A copy of ``open_clip_train.main``, whose ``main(arguments)`` trains with the preset.

    The program takes neither loss nor model, so ours stand in for its own in copies of its modules,
    which are under no name in ``sys.modules``. ``norm-sym`` leaves models as they are.
    """
    from st_magnitude.clip.model import rescale_output, unnormalize  # says what to install

    try:
        program = _copy_of("open_clip_train.main")
        training = _copy_of("open_clip_train.train")
        create = program.create_model_and_transforms
        program.create_loss  # noqa: B018
        stock_metrics = training.get_clip_metrics
    except (AttributeError, ImportError, RuntimeError) as error:
        raise ImportError(
            f"open_clip's training program cannot be used ({error}). st_magnitude.clip needs "
            f'open_clip_torch 3 with what it trains with: install it {INSTALL} ".[clip]".'
        ) from error
    loss = AsymmetricClipLoss.from_preset(preset)

    def create_loss(args: argparse.Namespace) -> AsymmetricClipLoss:
        if args.siglip or args.distill or "coca" in args.model.lower():
            raise ValueError(
                f"CoCa, --siglip and --distill-model have losses of their own, which {preset!r} "
                "would replace: leave them out, or train with open_clip's own program."
            )
        return AsymmetricClipLoss.from_preset(preset, gather_across_devices=args.distributed)

    def create_model_and_transforms(*arguments: object, **options: object) -> tuple[object, ...]:
        model, *transforms = create(*arguments, **options)
        if preset != "norm-sym":
            rescale_output(unnormalize(model))
        return (model, *transforms)

    def get_clip_metrics(
        image_features: Tensor, text_features: Tensor, logit_scale: Tensor
    ) -> dict[str, float]:
        images = loss.similarity.query(image_features)
        texts = loss.similarity.document(text_features)
        value = loss(image_features, text_features, logit_scale).item()
        return stock_metrics(images, texts, logit_scale) | {f"{preset}_val_loss": value}

    vars(training).update(get_clip_metrics=get_clip_metrics)
    vars(program).update(
        create_loss=create_loss,
        create_model_and_transforms=create_model_and_transforms,
        evaluate=training.evaluate,
    )
    return program


def _copy_of(name: str) -> ModuleType:
    spec = find_spec(name)
    module = module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def main(arguments: Sequence[str] | None = None) -> int | None:
    parser = argparse.ArgumentParser(
        prog="python -m st_magnitude.clip",
        usage="%(prog)s PRESET -- <arguments of open_clip_train>",
    )
    parser.add_argument("preset", choices=PRESETS, metavar="PRESET", help=", ".join(PRESETS))
    given = list(sys.argv[1:] if arguments is None else arguments)
    preset = parser.parse_args(given[:1]).preset
    if given[1:2] != ["--"]:
        parser.error("the arguments of open_clip_train follow after `--`, e.g. `-- --model RN50`")
    status: int | None = training_program(preset).main(given[2:])
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ImportError as error:
        sys.exit(f"Error: {error}")

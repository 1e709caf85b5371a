"""Adapters of peft, such as LoRA, written into the weights of a model."""

from __future__ import annotations

from copy import deepcopy
from typing import TypeVar, cast

from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import PreTrainedModel

from st_magnitude._checks import InputError, needs
from st_magnitude._upstream import forget_adapter

Model = TypeVar("Model", bound=nn.Module)


def add_lora(model: SentenceTransformer, rank: int) -> None:
    """Adds a LoRA on all linear layers, with alpha = 2 * rank.

    Raises:
        ImportError: If peft is not installed.
        ValueError: If the model has no transformer, as a static table.
    """
    with needs("LoRA", "revela"):
        from peft import LoraConfig
    if not any(isinstance(part, PreTrainedModel) for part in model.modules()):
        raise InputError(f"lora={rank} needs a transformer with linear layers; leave it out.")
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.1, target_modules="all-linear")
    model.add_adapter(config)


def merged(model: Model) -> Model:
    """The model itself or, if it has an adapter of peft, a copy in which that is merged."""
    return merge_lora(deepcopy(model)) if has_adapter(model) else model


def has_adapter(model: nn.Module) -> bool:
    return any(type(module).__module__.startswith("peft.") for module in model.modules())


def merge_lora(model: Model) -> Model:
    """Writes a LoRA into the weights, in place, and returns the plain model without peft.

    Its outputs stay the same. Layers of ``modules_to_save`` and ``trainable_token_indices`` take
    the place of those that they were trained from.

    Args:
        model: A SentenceTransformer with an adapter, or a ``peft.PeftModel``.

    Raises:
        ImportError: If peft is not installed.
        ValueError: If the weights are quantized. The model is then unchanged.
    """
    parameters = model.named_parameters()
    if names := [name for name, values in parameters if not values.is_floating_point()]:
        raise InputError(
            f"merge_lora computes new weights, and {len(names)} of this model are integers, such "
            f"as {names[0]}. Load the model without quantization."
        )
    plain = cast(Model, _plain(model))
    for part in plain.modules():
        if isinstance(part, PreTrainedModel):
            forget_adapter(part)
    return plain


def _plain(module: nn.Module) -> nn.Module:
    """The module of transformers or torch that a module of peft stands for, with plain children."""
    with needs("LoRA", "revela"):
        from peft import PeftModel
        from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(module, PeftModel):
        module = module.merge_and_unload()
    elif unload := getattr(module, "unload_and_optionally_merge_module", None):
        module = unload(merge=True, safe_merge=False, adapter_names=None)
    elif isinstance(module, BaseTunerLayer):
        module.merge()
        module = module.get_base_layer()
    for name, child in list(module.named_children()):
        if (plain := _plain(child)) is not child:
            setattr(module, name, plain)
    return module

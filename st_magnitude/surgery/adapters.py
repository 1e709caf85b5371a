"""Adapters of peft, such as LoRA, written into the weights of a model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

import transformers
from packaging.version import Version
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import PreTrainedModel

from st_magnitude._checks import INSTALL, InputError, needs
from st_magnitude._upstream import forget_adapter
from st_magnitude.modules import ExponentNorm
from st_magnitude.surgery.raw import Model

if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.getLogger(__name__)

MERGE_FIRST = (
    "Merge it into the weights, and train the model of the new folder: stm.export(stm.load(folder),"
    " new_folder)."
)


def lora_config(*, r: int = 256, lora_alpha: int = 64) -> LoraConfig:
    """Revela's LoRA, in all linear layers of attention and feed-forward blocks.

    Raises:
        InputError: Before transformers 5.6, which gives a loaded adapter new weights, and if it
            asks for a later peft.
    """
    with needs("LoRA", "revela"):
        import peft
        from peft import LoraConfig
        from transformers.integrations.peft import MIN_PEFT_VERSION
    versions = Version(transformers.__version__), Version(peft.__version__)
    if versions[0] < Version("5.6") or versions[1] < Version(MIN_PEFT_VERSION):
        raise InputError(
            f"transformers {versions[0]} and peft {versions[1]} do not train LoRA together. Install"
            f' two that do {INSTALL} ".[revela]".'
        )
    return LoraConfig(r=r, lora_alpha=lora_alpha, lora_dropout=0.1, target_modules="all-linear")


def add_lora(model: SentenceTransformer, rank: int) -> None:
    """Adds a LoRA on all linear layers, with alpha = 2 * rank, to a transformer without adapter."""
    if has_adapter(model):
        raise InputError(f"lora adds an adapter, and this model has one already. {MERGE_FIRST}")
    if not any(isinstance(part, PreTrainedModel) for part in model.modules()):
        raise InputError("lora needs a transformer with linear layers; leave it out.")
    model.add_adapter(lora_config(r=rank, lora_alpha=2 * rank))


def refuse_frozen(model: nn.Module) -> None:
    """Refuses a model of which training could change nothing, or nothing but exponents although an
    adapter is there; who freezes a model without one may want to learn the exponents alone."""
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    norms = [module for module in model.modules() if isinstance(module, ExponentNorm)]
    exponents = {parameter for norm in norms for parameter in norm.parameters()}
    if trained - exponents or (trained and not has_adapter(model)):
        return
    if not has_adapter(model):
        raise InputError("The model has no weights that training could change; choose another one.")
    raise InputError(
        "All weights of the encoder are frozen, those of its adapter too, as peft loads adapters"
        f" frozen. {MERGE_FIRST} To train the adapter on: `for name, weight in"
        " model.named_parameters(): weight.requires_grad_('lora_' in name)`."
    )


def has_adapter(model: nn.Module) -> bool:
    return any(type(module).__module__.startswith("peft.") for module in model.modules())


def merge_lora(model: Model) -> Model:
    """Writes a LoRA into the weights, in place, and returns the plain model without peft.

    Its outputs stay the same, and all its weights can be trained. Layers of ``modules_to_save`` and
    ``trainable_token_indices`` take the place of those that they were trained from. Weights in half
    precision become float32: they would round away a part of what an adapter has learned.

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
    adapted = [x for x in model.modules() if isinstance(x, PreTrainedModel) and has_adapter(x)]
    half = next((x.dtype for x in model.parameters() if x.element_size() < 4), None)
    if half is not None and has_adapter(model):
        model.float()
        logger.warning(
            f"The merged model is float32: {str(half).removeprefix('torch.')} would round away a"
            f" part of what the adapter has learned. model.to({half}) stores it in half the room."
        )
    plain = cast(Model, _plain(model))
    for part in adapted:
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

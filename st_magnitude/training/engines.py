"""FSDP and DeepSpeed: which of them surrounds a model, and which losses they cannot train."""

from __future__ import annotations

from typing import Any

from transformers import Trainer


def engine_of(model: Any) -> str | None:
    """The engine around a model: ``"FSDP"``, ``"DeepSpeed ZeRO-3"`` (or another stage), or None.

    Classes are compared by name, because importing them takes long, or needs DeepSpeed.
    """
    if type(model).__name__ == "DeepSpeedEngine":
        return f"DeepSpeed ZeRO-{model.zero_optimization_stage()}"
    classes = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return "FSDP" if classes & {"FSDPModule", "FullyShardedDataParallel"} else None


def engine_of_trainer(trainer: Trainer) -> str | None:
    """The engine that a Trainer will put around its model, before it does so."""
    if trainer.is_deepspeed_enabled:
        return f"DeepSpeed ZeRO-{trainer.accelerator.state.deepspeed_plugin.zero_stage}"
    return "FSDP" if trainer.is_fsdp_enabled else None


def refuse_engine(
    engine: str | None, name: str, caches: bool, learns_exponents: bool = False
) -> None:
    """Refuses a loss that an engine would train wrongly, or in which it would fail."""
    if engine is None:
        return
    if learns_exponents and engine != "DeepSpeed ZeRO-2":
        # Scalars cannot be sharded, and a loss takes them outside of the model's forward.
        why = f"learns exponents, each a single number, and {engine} shards all parameters"
        how = "fix them: MagnitudeRankingLoss(model, stm.Similarity(1, 0.5))"
    elif caches and engine.startswith("DeepSpeed"):
        # "Gradient computed twice for this partition": sentence-transformers, issue 3173
        why = f"caches gradients in several backward passes a step, and {engine} allows one"
        how = "leave mini_batch_size out"
    else:
        return
    raise ValueError(
        f"{name} {why}. Use DistributedDataParallel (torchrun, without {engine.split()[0]}), or "
        f"{how}."
    )

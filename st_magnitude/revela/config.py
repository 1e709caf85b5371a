"""The settings of a run from a folder of text, for ``st-magnitude revela`` and for `run`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from st_magnitude._checks import one_of
from st_magnitude._config import check_ranges

__all__ = ["PRESETS", "RevelaConfig"]

PRESETS: dict[str, dict[str, Any]] = {
    "short": {},
    "paper": {
        "temperature": 1e-4,
        "read_weight": 1.0,
        "v_norm": True,
        "group_size": 16,
        "max_words": 120,
        "max_length": 160,
        "learning_rate": 1e-4,
        "lm_learning_rate": 1e-4,
        "lora_rank": 256,
    },
}


@dataclass(frozen=True)
class RevelaConfig:
    """Settings of a Revela run. Every field is an option of ``st-magnitude revela``, which prints their help texts.

    The defaults suit a short run of some hundred steps (docs/revela.md). ``RevelaConfig.preset("paper")`` has the
    paper's values; the number of steps and of groups in a step (10,000 and 32 there) stay for you to set.

    Raises:
        ValueError: If a number is outside its range.

    Example:
        >>> RevelaConfig(max_steps=100).read_weight, RevelaConfig.preset("paper", max_steps=100).read_weight
        (0.1, 1.0)
    """

    temperature: Annotated[
        float, typer.Option(help="Temperature of the softmax over similarities; the paper's is 1e-4.")
    ] = 0.05
    read_weight: Annotated[
        float, typer.Option(help="Weight of the attention to other documents; the paper's is 1.")
    ] = 0.1
    v_norm: Annotated[
        bool, typer.Option(help="Divide the attention to other documents by value norms (Eq. 6), as the paper does.")
    ] = False
    group_size: Annotated[int, typer.Option(min=2, help="Chunks in a group, which attend to each other.")] = 8
    max_words: Annotated[int, typer.Option(min=1, help="Largest number of words in a chunk.")] = 40
    max_length: Annotated[int, typer.Option(min=2, help="Number of tokens of a chunk that the models read.")] = 64
    epochs: Annotated[float, typer.Option(min=0, help="Passes over the corpus.")] = 1.0
    max_steps: Annotated[int, typer.Option(help="Number of steps; overrides --epochs if positive.")] = -1
    batch_size: Annotated[int, typer.Option(min=1, help="Groups in a batch of each process.")] = 1
    gradient_accumulation_steps: Annotated[int, typer.Option(min=1, help="Batches before each update.")] = 1
    learning_rate: Annotated[
        float | None,
        typer.Option(min=0, help="Learning rate of the retriever; default: 3e-4 for a LoRA, 5e-5 for an encoder."),
    ] = None
    lm_learning_rate: Annotated[float, typer.Option(min=0, help="Learning rate of the language model's LoRA.")] = 3e-4
    lora_rank: Annotated[int, typer.Option(min=1, help="Rank of the LoRAs; alpha is a quarter of it.")] = 16
    warmup_steps: Annotated[
        int, typer.Option(min=0, help="Steps with a rising learning rate, at most a tenth of all steps.")
    ] = 100
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Use less memory and more time.")
    ] = False
    bf16: Annotated[bool | None, typer.Option(help="Autocast to bfloat16; default: if the hardware is fast at it.")] = (
        None
    )
    save_steps: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 200
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Keep the checkpoints of a finished run.")
    ] = False
    seed: Annotated[int, typer.Option(help="Seed for the order and dropout.")] = 0
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in the output.")] = False

    def __post_init__(self) -> None:
        check_ranges(self)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> RevelaConfig:
        """The settings of a preset, ``"short"`` (the defaults) or ``"paper"``, with overrides."""
        one_of("name", name, tuple(PRESETS))
        return cls(**(PRESETS[name] | overrides))

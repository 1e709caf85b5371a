"""The settings of a run from a folder of text, for ``st-magnitude revela`` and for `run`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from st_magnitude._config import Bf16, check_ranges


@dataclass(frozen=True)
class RevelaConfig:
    """Settings of a Revela run: every field is an option of ``st-magnitude revela``.

    The defaults suit a short run of some hundred steps; docs/revela.md has the paper's values.

    Raises:
        ValueError: If a number is outside its range.
    """

    temperature: Annotated[float, Option(help="Temperature of the softmax over chunks.")] = 0.05
    read_weight: Annotated[float, Option(help="Weight of the attention to other chunks.")] = 0.1
    v_norm: Annotated[
        bool, Option("--v-norm/--no-v-norm", help="Divide that attention by value norms (Eq. 6).")
    ] = False
    group_size: Annotated[int, Option(min=2, help="Chunks in a group, which read each other.")] = 8
    max_words: Annotated[int, Option(min=1, help="Largest number of words in a chunk.")] = 40
    max_length: Annotated[int, Option(min=2, help="Tokens to read of a chunk.")] = 64
    epochs: Annotated[float, Option(min=0, help="Passes over the corpus.")] = 1.0
    max_steps: Annotated[int, Option(help="Steps; overrides --epochs if positive.")] = -1
    batch_size: Annotated[int, Option(min=1, help="Groups in a batch of each process.")] = 1
    gradient_accumulation_steps: Annotated[int, Option(min=1, help="Batches in an update.")] = 1
    learning_rate: Annotated[
        float | None, Option(min=0, help="Default: 3e-4 for a decoder's LoRA, 5e-5 for an encoder.")
    ] = None
    lm_learning_rate: Annotated[float, Option(min=0, help="Rate of the language model.")] = 3e-4
    lora_rank: Annotated[int, Option(min=1, help="Rank of the LoRAs; alpha is a quarter.")] = 16
    warmup_steps: Annotated[
        float, Option(min=0, help="Steps of warm-up or, below 1, a share of all.")
    ] = 0.1
    gradient_checkpointing: Annotated[bool, Option(help="Use less memory and more time.")] = False
    bf16: Bf16 = None
    save_steps: Annotated[int, Option(min=1, help="Steps between checkpoints.")] = 200
    seed: Annotated[int, Option(help="Seed for the order and dropout.")] = 0
    resume: Annotated[bool, Option(help="Continue from the last checkpoint.")] = False

    def __post_init__(self) -> None:
        check_ranges(self)

"""``st-magnitude revela``: learn a retriever from raw text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from st_magnitude.commands.core import Figures, check_folder, command


@command()
def revela(
    corpus: Annotated[Path, typer.Option(help="Folder (or file) of text, Markdown, reST, HTML, source or JSON lines.")],
    retriever: Annotated[str, typer.Option(help="Folder or hub id: a SentenceTransformer or a bare decoder.")],
    lm: Annotated[str, typer.Option(help="Folder or hub id of a causal language model, or a GGUF file.")],
    output: Annotated[Path, typer.Option(help="Folder for the trained retriever.")],
    temperature: Annotated[float, typer.Option(help="Of the similarities; the paper's is 1e-4.")] = 0.05,
    read_weight: Annotated[float, typer.Option(help="Of what documents read in each other; the paper's is 1.")] = 1.0,
    v_norm: Annotated[bool, typer.Option(help="Divide what is read by the size of values (Eq. 6).")] = True,
    group_size: Annotated[int, typer.Option(min=2, help="Chunks that read each other.")] = 16,
    max_words: Annotated[int, typer.Option(min=1, help="Words of a chunk.")] = 120,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of a chunk that the models read.")] = 160,
    epochs: Annotated[float, typer.Option(help="Passes over the corpus.")] = 1.0,
    max_steps: Annotated[int, typer.Option(help="Stop after so many steps; overrides --epochs.")] = -1,
    batch_size: Annotated[int, typer.Option(min=1, help="Groups a step.")] = 1,
    gradient_accumulation_steps: Annotated[int, typer.Option(min=1, help="Batches before each update.")] = 1,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of the retriever; default: 1e-4 for a LoRA, 2e-5 for a whole encoder.")
    ] = None,
    lm_learning_rate: Annotated[float, typer.Option(help="Of the language model's LoRA.")] = 1e-4,
    lora_rank: Annotated[int, typer.Option(min=1, help="Rank of both LoRAs.")] = 256,
    warmup_steps: Annotated[int, typer.Option(min=0, help="At most a tenth of all steps.")] = 100,
    held_out: Annotated[float, typer.Option(help="Share of documents kept for evaluation.")] = 0.1,
    max_queries: Annotated[int, typer.Option(min=1, help="Section titles that are asked.")] = 300,
    gradient_checkpointing: Annotated[bool, typer.Option(help="Less memory, more time.")] = False,
    bf16: Annotated[bool | None, typer.Option(help="Default: where the hardware has it.")] = None,
    save_steps: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 200,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in the output.")] = False,
    seed: Annotated[int, typer.Option(help="Of the split, the order and dropout.")] = 0,
) -> Figures:
    """Learn a retriever from raw text (Revela).

    The retriever learns by language modelling with in-batch attention. Some documents are held out: their section
    titles ask for their chunks, before and after, for the retriever, BM25 and both fused. Needs the extra "revela".
    """
    check_folder(output)
    from st_magnitude.revela.run import run

    figures = run(
        corpus,
        retriever,
        lm,
        output,
        temperature=temperature,
        read_weight=read_weight,
        v_norm=v_norm,
        group_size=group_size,
        max_words=max_words,
        max_length=max_length,
        epochs=epochs,
        max_steps=max_steps,
        batch_size=batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        learning_rate=learning_rate,
        lm_learning_rate=lm_learning_rate,
        lora_rank=lora_rank,
        warmup_steps=warmup_steps,
        held_out=held_out,
        max_queries=max_queries,
        gradient_checkpointing=gradient_checkpointing,
        bf16=bf16,
        save_steps=save_steps,
        resume=resume,
        seed=seed,
        say=typer.echo,
    )
    typer.echo(f"Saved to {output}.")
    return figures

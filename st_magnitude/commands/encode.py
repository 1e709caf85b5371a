"""``st-magnitude encode``: encode a large corpus into Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from st_magnitude._config import MaxLength
from st_magnitude.commands.core import EncodingBatch, Figures, Model, command, folder, load_model, show_progress


@command
def encode(
    model: Model,
    corpus: Annotated[
        Path,
        typer.Option(
            exists=True, help="A .jsonl or .parquet file, a folder of such files, or a folder in BEIR's layout."
        ),
    ],
    output: Annotated[Path, folder("Folder for the embeddings: a new one, or an unfinished one.")],
    role: Annotated[str, typer.Option(help="Role of the texts: document or query.")] = "document",
    prompt: Annotated[
        str | None, typer.Option(help="Text that precedes every text; default: the model's own prompt.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Type of the stored numbers: float32 or float16.")] = "float32",
    shard_size: Annotated[
        int, typer.Option(min=1, help="Number of documents in a file. A killed run loses at most one file.")
    ] = 20000,
    batch_size: EncodingBatch = 32,
    devices: Annotated[
        str | None,
        typer.Option(help="Devices with one process each, such as cuda:0,cuda:1 or cpu,cpu; default: the first GPU."),
    ] = None,
    max_length: MaxLength = None,
) -> Figures:
    """Encode a large corpus into Parquet files.

    The same command continues after a stop or a kill, and several jobs that give it at the same time share the work.
    Complete files are not encoded again. A folder that holds the embeddings of another model, corpus or setting is
    refused.
    """
    from st_magnitude.data.encode import encode_corpus

    figures = encode_corpus(
        load_model(model, max_length),
        corpus,
        output,
        role=role,
        prompt=prompt,
        dtype=dtype,
        shard_size=shard_size,
        batch_size=batch_size,
        devices=None if devices is None else [name.strip() for name in devices.split(",")],
        show_progress_bar=show_progress(),
    )
    typer.echo(
        f"This run encoded {figures['encoded']:,} of {figures['documents']:,} documents into {output}. Use the metric "
        f"{figures['index_metric']} for its index."
    )
    return {"output": str(output), **figures}

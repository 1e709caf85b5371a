"""``st-magnitude encode``: encode a large corpus into Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from st_magnitude.commands.core import (
    EncodingBatch,
    Figures,
    MaxLength,
    Model,
    check_folder,
    command,
    load_model,
    show_progress,
)


@command()
def encode(
    model: Model,
    corpus: Annotated[
        Path,
        typer.Option(
            exists=True, help="A .jsonl or .parquet file, a folder of such files, or a folder in BEIR's layout."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the embeddings: a new one, or an unfinished one.")],
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
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Ray cluster whose workers encode: an address, auto, or local for this machine."
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="Job I of N that share the work, counted from 1; all may write to the same folder."
        ),
    ] = None,
    max_length: MaxLength = None,
) -> Figures:
    """Encode a large corpus into Parquet files.

    The same command continues after a stop or a kill. Complete files are not encoded again. A folder that holds the
    embeddings of another model, corpus or setting is refused.
    """
    check_folder(output)
    part = _part(shard)
    from st_magnitude.corpus.encoding import encode_corpus

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
        ray=ray,
        part=part,
        show_progress_bar=show_progress(),
    )
    complete = output if shard is None else f"Part {shard} of {output}"
    typer.echo(
        f"This run encoded {figures['encoded']:,} of {figures['documents']:,} documents. {complete} is complete. "
        f"Use the metric {figures['index_metric']} for its index."
    )
    return {"output": str(output), **figures}


def _part(shard: str | None) -> tuple[int, int]:
    if shard is None:
        return 1, 1
    try:
        job, num_jobs = map(int, shard.split("/"))
    except ValueError:
        raise typer.BadParameter(f"--shard takes two whole numbers, such as 2/8; got {shard!r}.") from None
    return job, num_jobs

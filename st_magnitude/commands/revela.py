"""``st-magnitude revela``: learn a retriever from raw text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from st_magnitude.commands.core import Figures, command, folder, say
from st_magnitude.revela.config import RevelaConfig


@command
def revela(
    *,
    corpus: Annotated[Path, Option(help="Folder or file of text, Markdown, code or JSON lines.")],
    retriever: Annotated[str, Option(help="Folder or hub id: a SentenceTransformer or a decoder.")],
    lm: Annotated[str, Option(help="Folder or hub id of a causal language model.")],
    output: Annotated[Path, folder("New folder for the trained retriever.")],
    data: Annotated[
        str | None, Option(help="Pairs or a folder, as for train, to measure before and after on.")
    ] = None,
    split: Annotated[str, Option(help="Split to measure on; read test last, and once.")] = "dev",
    settings: RevelaConfig,
) -> Figures:
    """Learn a retriever from raw text (Revela).

    The retriever learns to find the chunks that help a language model to predict a text. With
    --data, it, BM25 and both fused are measured before and after. Needs the extra "revela".
    """
    from st_magnitude.data.pairs import load_splits
    from st_magnitude.revela.run import run

    judged = None if data is None else load_splits(data)[split]
    figures = run(corpus, retriever, lm, output, settings, data=judged, say=say)
    say(f"Saved to {output}.")
    return figures

"""Text on a disk: retrieval data in BEIR's layout, documents and their chunks, and the embeddings of a corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from st_magnitude.corpus.encoder import Encoder

__all__ = ["Encoder"]


def __getattr__(name: str) -> Any:
    if name != "Encoder":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from st_magnitude.corpus.encoder import Encoder

    return Encoder

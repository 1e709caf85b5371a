"""The texts that a model has read, as hashes: no measurement may ask about them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from st_magnitude.data.beir import DataError, canonical

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

# In the folder of a model, at which sentence-transformers does not look: the keys, little endian
MEMORY = "texts_read.u64"

Keys = NDArray[np.uint64]


class AllReadError(DataError):
    """All queries of the data are among the texts that a model was trained on."""


def keys_of(texts: Iterable[str]) -> Keys:
    """A hash of 64 bits of the canonical spelling of each text, (n,)."""
    spelled = (canonical(text).encode("utf-8", "surrogatepass") for text in texts)
    hashes = (hashlib.blake2b(text, digest_size=8).digest() for text in spelled)
    return np.frombuffer(b"".join(hashes), dtype="<u8").astype(np.uint64)


def digest(texts: Iterable[str]) -> str:
    """SHA-256 of a sequence of texts, which tells texts in another order or cut apart."""
    sha = hashlib.sha256()
    for text in texts:
        sha.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
    return sha.hexdigest()


def remember(model: SentenceTransformer, texts: Iterable[str]) -> None:
    """Adds texts of training rows, queries and documents, to what a model has read."""
    from st_magnitude.surgery.raw import unwrapped

    keys = np.union1d(read_by(model), keys_of(texts))
    unwrapped(model)._texts_read = keys  # type: ignore[assignment]


def read_by(model: SentenceTransformer | str) -> Keys:
    """The keys of the texts that a model was trained on, in rising order, as far as it is known.

    `remember` and `st_magnitude.load` give them to a model. One that sentence-transformers has
    loaded is known by the folder of its transformer, and a static table not at all. A model can
    also be the path of its folder.
    """
    if isinstance(model, str):
        return _read(Path(model, MEMORY))
    from transformers import PreTrainedModel

    from st_magnitude.surgery.raw import unwrapped

    model = unwrapped(model)
    if (keys := getattr(model, "_texts_read", None)) is not None:
        return keys
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.name_or_path:
            return _read(Path(part.name_or_path, MEMORY))
    return _read(None)


def recall(model: SentenceTransformer, file: str | Path | None) -> None:
    """Gives a loaded model the keys of a file, or none."""
    model._texts_read = _read(file)  # type: ignore[assignment]


def save_memory(model: SentenceTransformer, folder: Path) -> None:
    """Writes the keys of what a model has read, if there are any."""
    if len(keys := read_by(model)):
        (folder / MEMORY).write_bytes(keys.astype("<u8").tobytes())


def _read(file: str | Path | None) -> Keys:
    if file is None or not Path(file).is_file():
        return np.empty(0, dtype=np.uint64)
    content = Path(file).read_bytes()
    if len(content) % 8 == 0:
        keys = np.frombuffer(content, dtype="<u8").astype(np.uint64)
        if (keys[1:] > keys[:-1]).all():
            return keys
    raise DataError(
        f"{file}, the hashes of the texts that the model was trained on, is damaged: fetch it"
        " again. Without it, figures on training queries are too high."
    )

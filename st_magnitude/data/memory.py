"""The texts that a model has read, as hashes: no measurement may ask about them.

They are in the folder of a training and of its checkpoints, and with every `save_pretrained` of a
model that knows them. Neither `st_magnitude.export` nor a push to the hub takes them along: hashes
tell everybody who guesses a text whether it was among those of the training. A salt, which has to
lie next to them, and a filter with false members change little about this.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from st_magnitude.data.beir import DataError, canonical

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

# In the folder of a model: the keys, little endian. huggingface_hub uploads nothing of this place.
MEMORY = ".cache/huggingface/texts_read.u64"
_TRAINED = "The model was trained on {:,} texts"

Keys = NDArray[np.uint64]

logger = logging.getLogger(__name__)


class AllReadError(DataError):
    """All queries of the data, a number, are among the texts that a model was trained on."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"The model was trained on all {number:,} queries of these data, so no figure on them"
            " says how it answers new ones: measure it on others, such as those of the test split."
            " A table that is judged in folds reads dev as well; a training with --folds 0 leaves"
            " it out."
        )


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
    _give(model, np.union1d(read_by(model), keys_of(texts)))


def recall(model: SentenceTransformer, path: str) -> None:
    """Gives a model the keys in the folder from which it was loaded, if there are any."""
    if len(keys := read_by(path)):
        _give(model, keys)


def _give(model: SentenceTransformer, keys: Keys) -> None:
    import sentence_transformers

    from st_magnitude.data.reader import SentenceTransformer as Reader
    from st_magnitude.surgery.raw import unwrapped

    model = unwrapped(model)
    model._texts_read = keys  # type: ignore[assignment]
    if type(model) is sentence_transformers.SentenceTransformer:
        model.__class__ = Reader  # as torch's parametrize changes the class of a module


def read_by(model: SentenceTransformer | str) -> Keys:
    """The keys of the texts that a model, or that of a folder, was trained on, in rising order.

    `remember` and `st_magnitude.load` give them to a model. One that sentence-transformers has
    loaded is known by the folder of its transformer, and a static table not at all: if its card
    says that it was trained, there is a warning.
    """
    if isinstance(model, str):
        return _read(Path(model, MEMORY))
    from transformers import PreTrainedModel

    from st_magnitude._upstream import card_text_of
    from st_magnitude.surgery.raw import unwrapped

    model = unwrapped(model)
    keys: Keys | None = getattr(model, "_texts_read", None)
    if keys is None:
        parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
        keys = _read(*(Path(part.name_or_path, MEMORY) for part in parts if part.name_or_path))
        said = re.search(_TRAINED.format(0).replace("0", "[0-9,]+"), card_text_of(model))
        if said and not len(keys):
            logger.warning(
                f"{said[0]}, and nothing here says on which: figures on queries among them are too"
                " high. Load it with st_magnitude.load from the folder of its training, or measure"
                " it on other queries."
            )
        model._texts_read = keys  # type: ignore[assignment]
    return keys


def are_read(texts: Collection[str], *models: SentenceTransformer | str) -> NDArray[np.bool_]:
    """Whether one of the models was trained on each text, (n,)."""
    known = np.concatenate([read_by(model) for model in models])
    return np.isin(keys_of(texts), known) if len(known) else np.zeros(len(texts), dtype=bool)


def save_memory(model: SentenceTransformer, folder: Path) -> None:
    """Writes the keys of what a model has read, if there are any, and a section of its card."""
    from st_magnitude.saving.card import add_section

    if not len(keys := read_by(model)):
        return
    (folder / MEMORY).parent.mkdir(parents=True, exist_ok=True)
    (folder / MEMORY).write_bytes(keys.astype("<u8").tobytes())
    card = folder / "README.md"
    said = _TRAINED.format(len(keys))
    if card.is_file() and said not in card.read_text(encoding="utf-8"):
        section = (
            f"### Training texts\n\n{said}. Their hashes stay in the folder of the training, where"
            " measurements leave out queries that it has read, and are not published.\n"
        )
        add_section(card, section)


def notice(folder: Path) -> str:
    """What a user should know of the keys in the folder of a training."""
    return (
        f"{folder / MEMORY} has hashes of the {len(_read(folder / MEMORY)):,} texts that the model"
        " has read: whoever has the file can test whether a text was among them. stm.load reads it,"
        " and measurements then leave these texts out. stm.export and uploads to the hub leave the"
        " file out."
    )


def _read(*files: Path) -> Keys:
    """The keys in the first of some files that exists."""
    file = next(filter(Path.is_file, files), None)
    if file is None:
        return np.empty(0, dtype=np.uint64)
    content = file.read_bytes()
    if len(content) % 8 == 0:
        keys = np.frombuffer(content, dtype="<u8").astype(np.uint64)
        if (keys[1:] > keys[:-1]).all():
            return keys
    raise DataError(
        f"{file}, the hashes of the texts that the model was trained on, is damaged: copy it"
        " again. Without it, figures on training queries are too high."
    )

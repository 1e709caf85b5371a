"""The texts that a training has read, as hashes: no command measures the model on them.

`train` and `compare` write the hashes into the folder of the model that they save, next to
``training.json``, and the commands look for them in the folder that they are given. Nothing else
writes or reads them: a model in memory, a copy that is saved and an export know nothing of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from datasets import Dataset

from st_magnitude.data.beir import DataError, Keys, keys_of
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.workbench.files.pairs import Splits

# In the folder of a model: the keys, little endian. huggingface_hub uploads nothing of this place:
# hashes tell everybody who guesses a text whether it was among those of the training.
MEMORY = ".cache/huggingface/texts_read.u64"

FEW_UNREAD = 50  # queries of dev, below which test is measured

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


def write_memory(folder: Path, rows: Dataset, before: Sequence[str] = ()) -> None:
    """Writes the keys of training rows, and of what the models of other folders have read, into the
    folder of a model."""
    texts = {text for column in rows.column_names for text in rows[column]}
    keys = np.union1d(keys_of(texts), read_by(*before))
    (folder / MEMORY).parent.mkdir(parents=True, exist_ok=True)
    (folder / MEMORY).write_bytes(keys.astype("<u8").tobytes())


def notice(folder: Path) -> str:
    """A sentence for the user on the keys in the folder of a training."""
    return (
        f"{folder / MEMORY} has hashes of the {len(read_by(str(folder))):,} texts that the model"
        " has read: whoever has the file can test whether a text was among them. Commands on this"
        " folder leave these texts out of their measurements. stm.export, save_pretrained and"
        " uploads to the hub leave the file out."
    )


def read_by(*folders: str) -> Keys:
    """The keys of the texts that the models of some folders were trained on."""
    found = [keys_of(())]
    for file in (Path(folder, MEMORY) for folder in folders):
        content = file.read_bytes() if file.is_file() else b""
        keys = np.frombuffer(content[: len(content) // 8 * 8], dtype="<u8").astype(np.uint64)
        if len(content) % 8 or not (keys[1:] > keys[:-1]).all():
            raise DataError(
                f"{file}, the hashes of the texts that the model was trained on, is damaged: copy"
                " it again. Without it, figures on training queries are too high."
            )
        found.append(keys)
    return np.concatenate(found)


def unread(data: RetrievalData, *folders: str) -> RetrievalData:
    """The same data without the queries that a model of some folders was trained on.

    A query also counts as read if it was a document of a training row. The log says how many are
    left out.

    Raises:
        AllReadError: If no query with a relevant document is left, a DataError.
    """
    is_read = np.isin(keys_of(data.queries.values()), read_by(*folders))
    if not (number := int(is_read.sum())):
        return data
    left = data.only({q for q, known in zip(data.queries, is_read, strict=True) if not known})
    if not (left.relevant if data.relevant else left.queries):
        raise AllReadError(len(data.queries))
    logger.warning(
        f"Left out {number:,} of {len(data.queries):,} queries, on which the model was trained."
    )
    return left


def unread_split(splits: Splits, name: str, *folders: str) -> tuple[str, RetrievalData]:
    """The `unread` queries of a split, and its name.

    Where fewer than 50 are left of dev, it is the test split.

    Raises:
        DataError: If the model was trained on all queries.
    """
    names = [name, "test"] if name == "dev" and "test" in splits else [name]
    found: dict[str, RetrievalData] = {}
    for part in names:
        with suppress(AllReadError):
            found[part] = unread(splits[part], *folders)
            if found[part] is splits[part] or len(found[part].relevant) >= FEW_UNREAD:
                break
    if not found:
        unread(splits[names[-1]], *folders)  # raises
    part = max(found, key=lambda one: len(found[one].relevant))
    if part != name:
        logger.warning(
            f"The model was trained on queries of the {name} split, so the {part} split is"
            " measured."
        )
    return part, found[part]

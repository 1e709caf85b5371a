"""Splits: the parts of one data set, of which none is measured on what another has trained."""

from __future__ import annotations

import logging
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from st_magnitude._files import moved_in, refuse_used_folder
from st_magnitude.data import beir
from st_magnitude.data.beir import DataError
from st_magnitude.data.memory import AllReadError
from st_magnitude.data.retrieval import RetrievalData

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

logger = logging.getLogger(__name__)

FEW_UNREAD = 50  # queries of dev, below which test is measured


class Splits(dict[str, RetrievalData]):
    """Splits of one data set by name, usually train, dev and test, over one corpus.

    ``splits["dev"]`` raises a DataError if there is no such split, ``splits.get("dev")`` is None.

    Attributes:
        notes: Sentences for the user: what was left out, how scores were read, how many queries
            there are.
        drawn: Names of the splits that were drawn at random.
        folder: The folder in BEIR's layout that they were read from, or None.
        caveat: What the queries are, if nobody asked them: chunks of texts without labels.
    """

    def __init__(self, name: str, notes: list[str], folder: Path | None = None) -> None:
        self.name = name
        self.notes = notes
        self.folder = folder
        self.drawn: set[str] = set()
        self.caveat = ""
        self.broken: dict[str, DataError] = {}

    def __missing__(self, split: str) -> RetrievalData:
        if split in self.broken:
            raise self.broken[split]
        if self.folder is not None:
            beir.check_layout(self.folder, split)
        raise DataError(f"{self.name} has no split {split!r}; its splits are {list(self)}.")

    def relevant_documents(self) -> set[str]:
        """Ids of the documents that are relevant to a query of any split."""
        return {d for data in self.values() for grades in data.relevant.values() for d in grades}

    def check_held_out(self, *splits: str | None) -> None:
        """Refuses (DataError) splits that share queries with each other or with train."""
        names = [name for name in splits if name is not None]
        held_out = names if "train" in names or "train" not in self else ["train", *names]
        for other, name in combinations(held_out, 2):
            beir.refuse_shared(self[name].asked, self[other].asked, name, other)

    def keep_apart(self) -> None:
        """Keeps queries of dev and test out of the training rows of the splits before them."""
        later = {"dev": ["test"], "test": []}
        for name, data in self.items():
            others = later.get(name, ["dev", "test"])
            self[name] = data.apart_from(*(self.get(other) for other in others))

    def unread(self, name: str, model: SentenceTransformer | str) -> tuple[str, RetrievalData]:
        """A split without the queries that a model was trained on, and its name.

        Where fewer than 50 are left of dev, it is the test split. A model can be its folder.

        Raises:
            DataError: If the model was trained on all queries.
        """
        names = [name, "test"] if name == "dev" and "test" in self else [name]
        found: dict[str, RetrievalData] = {}
        for part in names:
            try:
                found[part] = self[part].unread_by(model)
            except AllReadError:
                if not found and part == names[-1]:
                    raise
                continue
            if found[part] is self[part] or len(found[part].query_ids) >= FEW_UNREAD:
                break
        part = max(found, key=lambda one: len(found[one].query_ids))
        if part != name:
            logger.warning(
                f"The model was trained on queries of the {name} split, so the {part} split is"
                " measured."
            )
        return part, found[part]

    def save(self, folder: str | Path) -> None:
        """Writes all splits as a new folder in BEIR's layout."""
        refuse_used_folder(folder)
        queries = {key: text for data in self.values() for key, text in data.queries.items()}
        first, data = next(iter(self.items()))
        with moved_in(Path(folder), last="qrels") as new:
            RetrievalData(queries, data.corpus, {}).save(new, first)
            for name, data in self.items():
                data.save_qrels(new / "qrels" / f"{name}.tsv")

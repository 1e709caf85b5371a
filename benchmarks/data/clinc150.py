"""CLINC150: 22,500 questions to an assistant in 150 intents, and 1,200 that are out of its scope.

Publisher: Clinc, https://github.com/clinc/oos-eval, file data/data_full.json. Licence: CC BY 3.0.
Source: Larson et al., An Evaluation Dataset for Intent Classification and Out-of-Scope Prediction,
EMNLP 2019.
"""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["read"]

SPLITS = ("train", "val", "test", "oos_train", "oos_val", "oos_test")


def read(file: str | Path, split: str) -> list[tuple[str, str]]:
    """The questions of a split with their intents; "oos" where no intent fits.

    Args:
        file: The publisher's data_full.json.
        split: "train" (100 questions for each intent), "val" (20), "test" (30), or one of
            "oos_train" (100 questions), "oos_val" (100) and "oos_test" (1,000).

    Raises:
        ValueError: If there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"The splits are {', '.join(SPLITS)}; got {split!r}.")
    splits = json.loads(Path(file).read_text(encoding="utf-8"))
    return [(text, intent) for text, intent in splits[split]]

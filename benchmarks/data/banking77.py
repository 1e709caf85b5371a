"""BANKING77: 13,083 questions of customers of a bank, in 77 intents.

Publisher: PolyAI, https://github.com/PolyAI-LDN/task-specific-datasets, folder banking_data, files
train.csv (10,003 questions) and test.csv (3,080). Licence: CC BY 4.0. Source: Casanueva et al.,
Efficient Intent Detection with Dual Sentence Encoders, NLP for ConvAI 2020.
"""

from __future__ import annotations

import csv
from pathlib import Path

__all__ = ["read"]


def read(folder: str | Path, split: str) -> list[tuple[str, str]]:
    """The questions of a split with their intents.

    Args:
        folder: Has the publisher's train.csv and test.csv, or the same under the names
            banking77_train.csv and banking77_test.csv.
        split: "train" or "test".

    Raises:
        FileNotFoundError: If the folder has neither file.
    """
    names = (f"{split}.csv", f"banking77_{split}.csv")
    files = [path for name in names if (path := Path(folder) / name).is_file()]
    if not files:
        raise FileNotFoundError(
            f"{folder} has neither {names[0]} nor {names[1]}. Download them from "
            "https://github.com/PolyAI-LDN/task-specific-datasets (banking_data)."
        )
    with files[0].open(encoding="utf-8", newline="") as file:
        return [(row["text"].strip(), row["category"]) for row in csv.DictReader(file)]

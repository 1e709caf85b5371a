"""The pairs of BANKING77, CLINC150, XQuAD and the STS benchmark, from a folder with their files."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.data import banking77, clinc150, xquad


def sources(folder: Path) -> dict[str, list[dict[str, object]]]:
    """A question and the name of its intent (BANKING77, CLINC150), a question and its paragraph
    (XQuAD), two sentences with a score (STS, English and Chinese)."""
    found: dict[str, list[dict[str, object]]] = {}
    for name, rows in (
        ("BANKING77", banking77.read(folder, "train")),
        ("CLINC150", clinc150.read(folder / "clinc150_full.json", "train")),
    ):
        found[name] = [{"text": text, "intent": name.replace("_", " ")} for text, name in rows]
    data = xquad.find_paragraph(folder / "xquad_en.json")
    found["XQuAD"] = [
        {"question": data.queries[query], "context": data.corpus[document]}
        for query, documents in data.relevant.items()
        for document in documents
    ]
    for name, file in (("STS", "stsb_en_train.csv"), ("STS, Chinese", "stsb_zh_train.csv")):
        with (folder / file).open(encoding="utf-8", newline="") as opened:
            found[name] = [
                {"sentence1": a, "sentence2": b, "score": float(score)}
                for a, b, score in csv.reader(opened)
            ]
    return found

"""XQuAD, English: 1,190 questions on 240 paragraphs of Wikipedia.

Publisher: DeepMind, https://github.com/google-deepmind/xquad, file xquad.en.json. Licence:
CC BY-SA 4.0. Source: Artetxe et al., On the Cross-lingual Transferability of Monolingual
Representations, ACL 2020; the questions are of SQuAD 1.1 (Rajpurkar et al., EMNLP 2016).
"""

from __future__ import annotations

import json
from pathlib import Path

from st_magnitude.data.retrieval import RetrievalData

__all__ = ["find_paragraph"]


def find_paragraph(file: str | Path) -> RetrievalData:
    """Question -> the paragraph that answers it, from the publisher's xquad.en.json."""
    queries, corpus, relevant = {}, {}, {}
    for article in json.loads(Path(file).read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            document = f"d{len(corpus)}"
            corpus[document] = paragraph["context"]
            for question in paragraph["qas"]:
                queries[question["id"]] = question["question"]
                relevant[question["id"]] = {document}
    return RetrievalData(queries, corpus, relevant, name="XQuAD")

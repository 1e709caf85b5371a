"""Fewer dimensions without training: the first coordinates of a model, or principal axes?

    python benchmarks/studies/compression/principal_axes.py

nDCG@10 in points of models as their authors left them, at a half, a quarter and an eighth of their
dimensions, float32: all-MiniLM-L6-v2 and paraphrase-MiniLM-L3-v2, by cosine. The axes are fitted on
the corpus of each task, without queries. The difference has a 95 % interval over queries.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from benchmarks.data.debian import cache_folder, fetch
from benchmarks.data.docstrings import build_docstring_task, bundled_minilm
from benchmarks.data.lexicons import foldoc, wordnet
from benchmarks.data.paraphrase import paraphrase
from benchmarks.data.search_tasks import answers_only
from benchmarks.studies.estimates import in_points, markdown, paired
from sentence_transformers import SentenceTransformer

import st_magnitude as stm
from st_magnitude.data.task import EncodedTask

DIMS = (192, 96, 48)


def tasks() -> dict[str, stm.RetrievalData]:
    sizes = {"test_queries": 600, "dev_queries": 300, "seed": 1}
    chunks = build_docstring_task(cache=cache_folder() / "docstrings-late", **sizes).test
    return {
        "FOLDOC": foldoc(fetch("dict-foldoc"), 1, num_queries=600, corpus_size=3000),
        "WordNet": wordnet(fetch("wordnet-base"), 1, num_test_queries=600, corpus_size=3000)[2],
        "docstrings": answers_only(chunks),
    }


def on_principal_axes(task: EncodedTask) -> EncodedTask:
    """The task in the coordinates of its documents' principal axes, the largest first."""
    documents = stm.COSINE.document(task.documents).double()
    axes = torch.linalg.eigh(documents.T @ documents).eigenvectors.flip(1).float()  # (D, D)
    return replace(task, queries=task.queries @ axes, documents=task.documents @ axes)


def main() -> None:
    models = {"MiniLM": SentenceTransformer(bundled_minilm(), device="cpu"), "L3": paraphrase()}
    models["L3"].max_seq_length = 128
    rows = []
    for task, data in tasks().items():
        for name, model in models.items():
            encoded = stm.encode(model, data, "cosine")
            turned = on_principal_axes(encoded)
            full = in_points(encoded.search(10).ndcg)
            for dim in DIMS:
                prefix, axes = (x.prefix(dim).search(10).ndcg for x in (encoded, turned))
                gain = paired([(axes - prefix)[None]]).show()
                rows.append([name, task, dim, full, in_points(prefix), in_points(axes), gain])
    head = "model|task|dimensions|all|prefix|principal axes|axes - prefix"
    print("\n".join(markdown(head.split("|"), rows, "ll")))


if __name__ == "__main__":
    main()

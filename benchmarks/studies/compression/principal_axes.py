"""Fewer dimensions without training: the first coordinates of a model, or principal axes?

    python benchmarks/studies/compression/principal_axes.py

nDCG@10 in points of models as their authors left them, at a half, a quarter and an eighth of their
dimensions, float32: all-MiniLM-L6-v2 and paraphrase-MiniLM-L3-v2, by cosine. The axes are fitted on
the corpus of each task, without queries. The difference has a 95 % interval over queries.
"""

from __future__ import annotations

import logging

from benchmarks.data.debian import cache_folder, fetch
from benchmarks.data.docstrings import build_docstring_task, bundled_minilm
from benchmarks.data.lexicons import foldoc, wordnet
from benchmarks.data.paraphrase import paraphrase
from benchmarks.data.search_tasks import answers_only
from benchmarks.studies.estimates import Estimate, in_points, markdown
from sentence_transformers import SentenceTransformer

import st_magnitude as stm
from st_magnitude.evaluation import CompressionEvaluator

DIMS = (192, 96, 48)
OPTIONS = {"precisions": ["float32"], "similarity": "cosine", "pca": True}


def tasks() -> dict[str, stm.RetrievalData]:
    sizes = {"test_queries": 600, "dev_queries": 300, "seed": 1}
    chunks = build_docstring_task(cache=cache_folder() / "docstrings-late", **sizes).test
    return {
        "FOLDOC": foldoc(fetch("dict-foldoc"), 1, num_queries=600, corpus_size=3000),
        "WordNet": wordnet(fetch("wordnet-base"), 1, num_test_queries=600, corpus_size=3000)[2],
        "docstrings": answers_only(chunks),
    }


def main() -> None:
    logging.getLogger("st_magnitude").setLevel(logging.ERROR)
    models = {"MiniLM": SentenceTransformer(bundled_minilm(), device="cpu"), "L3": paraphrase()}
    models["L3"].max_seq_length = 128
    rows = []
    for task, data in tasks().items():
        for name, model in models.items():
            evaluator = CompressionEvaluator(
                data.queries, data.corpus, data.relevant, dims=list(DIMS), **OPTIONS
            )
            evaluator(model)
            found = evaluator.per_query
            for dim in DIMS:
                prefix, axes = found[dim, "float32", "none"], found[dim, "float32", "none", "pca"]
                gain = Estimate(*stm.geometry.paired_bootstrap(axes, prefix)).show()
                means = map(in_points, (found[384, "float32", "none"], prefix, axes))
                rows.append([name, task, dim, *means, gain])
    head = "model|task|dimensions|all|prefix|principal axes|axes - prefix"
    print("\n".join(markdown(head.split("|"), rows, "ll")))


if __name__ == "__main__":
    main()

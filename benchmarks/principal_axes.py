"""Fewer dimensions without training: the first coordinates of a model against the principal axes of the corpus.

    python benchmarks/principal_axes.py

nDCG@10 in points of models as their authors left them, at a half, a quarter and an eighth of their dimensions, float32:
all-MiniLM-L6-v2 and paraphrase-MiniLM-L3-v2 (run evidence/paraphrase.py once), by cosine, on FOLDOC (headword to
entry), WordNet (lemma to definition) and the docstrings of installed packages. The axes are fitted on the corpus of
each task, without queries. The difference has a 95 % interval over queries.

Expected before measuring: level at a half, 1 to 3 points ahead at a quarter and 3 to 8 at an eighth.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from sentence_transformers import SentenceTransformer

sys.path.append(str(Path(__file__).parent / "evidence"))
from docstrings import build_docstring_task, bundled_minilm
from lexicons import default_cache, fetch, foldoc, wordnet
from paraphrase import paraphrase
from search_tasks import answers_only

import st_magnitude as stm
from st_magnitude.evaluation import CompressionEvaluator


def tasks() -> dict[str, stm.RetrievalData]:
    sizes = {"test_queries": 600, "dev_queries": 300, "seed": 1, "workers": 1, "progress": False}
    chunks = build_docstring_task(cache=default_cache() / "docstrings-late", **sizes).test
    return {
        "FOLDOC": foldoc(fetch("dict-foldoc"), 1, num_queries=600, corpus_size=3000),
        "WordNet": wordnet(fetch("wordnet-base"), 1, num_test_queries=600, corpus_size=3000).test,
        "docstrings": answers_only(chunks),
    }


def main() -> None:
    logging.getLogger("st_magnitude").setLevel(logging.ERROR)
    models = {"MiniLM": SentenceTransformer(bundled_minilm(), device="cpu"), "L3": paraphrase()}
    models["L3"].max_seq_length = 128
    print("| model | task | dimensions | all | prefix | principal axes | axes - prefix |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for task_name, data in tasks().items():
        for name, model in models.items():
            options = {"dims": [192, 96, 48], "precisions": ["float32"], "similarity": "cosine", "pca": True}
            evaluator = CompressionEvaluator(data.queries, data.corpus, data.relevant, **options)
            evaluator(model)
            found = evaluator.per_query
            for dim in (192, 96, 48):
                prefix, axes = found[dim, "float32", "none"], found[dim, "float32", "none", "pca"]
                gain = "{:+.1f} [{:+.1f}, {:+.1f}]".format(
                    *(100 * x for x in stm.geometry.paired_bootstrap(axes, prefix))
                )
                means = (100 * x.mean() for x in (found[384, "float32", "none"], prefix, axes))
                row = [name, task_name, str(dim), *(f"{mean:.1f}" for mean in means), gain]
                print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()

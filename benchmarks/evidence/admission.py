"""Which documents to index: by the norm or by the surface of the text, and is the stated loss the true one?

    python benchmarks/evidence/admission.py

`stm.admit` on the two models of fragments.py (paraphrase-MiniLM-L3-v2 after 60 steps on docstrings with QNorm and with
Cosine) and four corpora: docstrings with the kinds of boilerplate that training has shown, the same with as many
fragments of other kinds, FOLDOC with as many fragments as entries, and FOLDOC alone, where 200 of 500 entries are
answers and the others are entries like them. Two thirds of the queries are given to `admit`; the others are new and
measure what it states. Two splits. Cosine is measured with fragments only.

Expected before measuring: on docstrings alone, half of the index by the norm of QNorm keeps 95 % of the answers or
more, and the surface as much. With fragments of other kinds the norm keeps about 60 % (fragments.py), the surface 95 %
or more. With FOLDOC alone nothing beats its share by much. A quarter of an index with fragments is free by the surface
(within half a point of nDCG@10), as for the passages of arXiv 2407.12170. The stated interval holds the share of new
queries in 90 % of the calls or more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent))
from cells import docstring_task
from fragments import CELL, trained, with_fragments
from lexicons import fetch, foldoc
from search_tasks import shrink
from sentence_transformers import SentenceTransformer

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.admission import SCORERS

SPLITS = 2
KEEP = (0.75, 0.5)


def models() -> Iterator[tuple[str, SentenceTransformer, stm.Similarity]]:
    model, best = trained(replace(CELL, loss="qnorm", scale="auto"))
    model.load_state_dict(best["calibrated"]["weights"])
    yield "QNorm", model, stm.Similarity(1.0, best["calibrated"]["exponent"])
    model, best = trained(CELL)
    model.load_state_dict(best["matched"]["weights"])
    yield "Cosine", model, stm.COSINE


def corpora() -> dict[str, RetrievalData]:
    calls = shrink(docstring_task().test, 300, 1000, 0)
    terms = foldoc(fetch("dict-foldoc"), 0, num_queries=200, corpus_size=500)
    return {
        "docstrings": calls,
        "docstrings, 50 % fragments": with_fragments(calls, 0.5),
        "FOLDOC, 50 % fragments": with_fragments(terms, 0.5),
        "FOLDOC": terms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print("| model | corpus | keep | score | stated | new queries | nDCG@10 |")
    print("| --- | --- | ---: | --- | ---: | ---: | --- |")
    inside: list[bool] = []
    for name, model, similarity in models():
        for corpus, task in corpora().items():
            if name == "Cosine" and "fragments" not in corpus:
                continue
            for scorer in SCORERS:
                rows(name, model, similarity, corpus, task, scorer, inside)
    print(f"\nThe stated interval holds the share of new queries in {np.mean(inside):.0%} of {len(inside)} calls.")


def rows(
    name: str,
    model: SentenceTransformer,
    similarity: stm.Similarity,
    corpus: str,
    task: RetrievalData,
    scorer: str,
    inside: list[bool],
) -> None:
    """Prints the rows of one model, corpus and score: means over splits."""
    judged = [query for query in task.queries if task.relevant.get(query)]
    for asked in (*({"keep": keep} for keep in KEEP), {"recall": 0.99}):
        found, fresh = [], []
        for split in range(SPLITS):
            order = np.random.default_rng(split).permutation(judged)
            given, new = order[: 2 * len(order) // 3], order[2 * len(order) // 3 :]
            part = RetrievalData({q: task.queries[q] for q in given}, task.corpus, {q: task.relevant[q] for q in given})
            made = stm.admit(model, part, scorer=scorer, similarity=similarity, seed=split, **asked)
            kept = set(made.kept_ids)
            shares = [len(kept & task.relevant[q].keys()) / len(task.relevant[q]) for q in new]
            found.append(made)
            fresh.append(np.mean(shares))
            # both sides are samples: the interval of the difference is wider by the draw of the new queries
            spread = np.sqrt(1 + len(given) / len(new))
            share, low, high = made.answers_kept
            inside.append(share - spread * (share - low) <= fresh[-1] <= share + spread * (high - share))
        before, after = (100 * np.mean([x.ndcg[i] for x in found]) for i in (0, 1))
        what = f"{asked['keep']:.0%}" if "keep" in asked else f"{np.mean([x.share for x in found]):.0%} (recall .99)"
        stated = 100 * np.mean([x.answers_kept[0] for x in found])
        print(
            f"| {name} | {corpus} | {what} | {scorer} | {stated:.1f} | {100 * np.mean(fresh):.1f} | "
            f"{before:.1f} to {after:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

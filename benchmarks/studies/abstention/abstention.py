"""Abstention on real text: which signal tells when the first document is right?

    python benchmarks/studies/abstention/abstention.py [--cache FOLDER]

Ten words from the middle of an entry of FOLDOC search for that entry: 1,000 queries to calibrate
and 1,000 others to measure, in one corpus; a quarter of the queries have lost their entry. Models:
all-MiniLM-L6-v2 as published, and wordllama's static table, trained on WordNet by cosine and by
QNorm (1,000 steps of 128); the second is scored as it was trained and by cosine. Every signal gets
its own rule.

Expected before measuring: the measured risk stays below the limit for every rule; the gap beats the
score.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.lexicons import build
from benchmarks.studies.models import minilm, static_model, train

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.abstention import CHOOSING, SIGNALS, Abstention, calibrated
from st_magnitude.geometry import risk_coverage

LIMITS = (0.1, 0.2, 0.3)
UNANSWERABLE = 0.25


def known_items(entries: dict[str, str], num_queries: int) -> list[RetrievalData]:
    """Ten words from the middle of an entry search for it; two tasks over one corpus."""
    words = {key: text.split() for key, text in entries.items() if len(text.split()) >= 20}
    ids = list(words)[:num_queries]
    return [
        RetrievalData(
            {q: " ".join(words[q][len(words[q]) // 2 - 5 :][:10]) for q in part},
            {key: entries[key] for key in words},
            {q: {q} for q in part},
        )
        for part in (ids[::2], ids[1::2])
    ]


def first_documents(model: Any, data: RetrievalData, similarity: stm.Similarity) -> tuple[Any, Any]:
    """The two best scores of every query, and whether the first is wrong; a quarter is lost."""
    encoded = data.encode(model, before_normalize=True)
    n = len(data.query_ids)
    lost = np.random.default_rng(1).permutation(n)[: round(UNANSWERABLE * n)]
    own = torch.full((n,), -1)
    own[lost] = torch.tensor([min(encoded.columns[row]) for row in lost])
    encoded = replace(encoded, own=own)  # leaves them out
    top = encoded.top(similarity, 2)
    return encoded.scores(similarity, top).double().numpy(), ~encoded.hits(top)[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args()
    data = build(options.cache, foldoc_corpus_size=3000)
    calibration, fresh = known_items(data.foldoc.corpus, num_queries=2000)
    limits = " | ".join(f"risk at most {limit:g}" for limit in LIMITS)
    print(f"| model | signal | area | {limits} |\n| --- | --- | ---: | --- | --- | --- |")
    for base, load in {"MiniLM": minilm, "static": static_model}.items():
        for name in ("published",) if base == "MiniLM" else ("cosine", "qnorm"):
            model = load()
            if name != "published":
                stm.prepare(model, name)
                how = {"max_steps": 1000, "per_device_train_batch_size": 128, "learning_rate": 1e-2}
                train(model, stm.MagnitudeRankingLoss(model, name), data.train, 0, **how)
            scorings = {name: stm.Similarity(1.0, 0.0 if name == "qnorm" else 1.0)}
            if name == "qnorm":
                scorings["qnorm, scored by cosine"] = stm.COSINE
            for scored, scoring in scorings.items():
                seen, new = (first_documents(model, part, scoring) for part in (calibration, fresh))
                n = len(seen[0])
                chooses = np.random.default_rng(0).permutation(n) < CHOOSING * n
                for signal in SIGNALS:
                    area = risk_coverage(SIGNALS[signal](seen[0][chooses]), ~seen[1][chooses])[2]
                    cells = []
                    for limit in LIMITS:
                        rule = Abstention(
                            signal, math.inf, scoring.exponents[1], limit, 0.05, UNANSWERABLE
                        )
                        rule = calibrated(rule, *seen).tested(*new)
                        shares = [
                            rule.answered / rule.queries,
                            rule.wrong / (rule.answered or math.nan),
                        ]
                        cells.append("coverage {:.3f}, risk {:.3f}".format(*shares))
                    row = [f"{base}, {scored}", signal, f"{area:.3f}", *cells]
                    print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()

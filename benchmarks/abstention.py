"""Abstention on real text: which signal tells when the first document is right?

    python benchmarks/abstention.py [--cache FOLDER]

Ten words from the middle of an entry of FOLDOC search for that entry: 1,000 queries to calibrate and 1,000 others to
measure, in one corpus; a quarter of the queries have lost their entry. Models: all-MiniLM-L6-v2 as published, and
wordllama's static table, trained on WordNet by cosine and by QNorm (1,000 steps of 128); the second is scored as it was
trained and by cosine. Every signal gets its own rule.

Expected before measuring: the measured risk stays below the limit for every rule; the gap beats the score.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lexicons import build
from temperature import minilm, static_model, train

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.abstention import SIGNALS, answers_of, first_documents, rule_of

LIMITS = (0.1, 0.2, 0.3)


def known_items(entries: dict[str, str], num_queries: int) -> list[RetrievalData]:
    """Ten words from the middle of an entry search for it; two tasks with other queries over one corpus."""
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
                seen, new = (first_documents(model, part, scoring, None, seed=0) for part in (calibration, fresh))
                for signal in SIGNALS:
                    cells = []
                    for limit in LIMITS:
                        rule = rule_of(seen, scoring, limit, 0.05, signal)
                        values = new[0][:, 0] - new[0][:, 1] if signal == "gap" else new[0][:, 0]
                        answers = answers_of(values, new[1], rule.threshold)
                        cells.append(f"coverage {answers.coverage[0]:.3f}, risk {answers.risk[0]:.3f}")
                    row = [f"{base}, {scored}", signal, f"{rule.areas[signal]:.3f}", *cells]
                    print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()

"""How much too high is BM25 if the queries that judge it choose its tokens, and too low if not?

    python benchmarks/studies/known/tokens.py FOLDER

BM25 of words and of 4-grams searches for up to 3,000 training queries of each file of
`defaults.sources`. Of 40, 100 and 300 of them, drawn 2,000 times (300: 500 times), the tokens with
the higher nDCG@10 are chosen by all, or for each of five folds by the others. Both figures minus
nDCG@10 of all queries by the tokens that the draw chose, which a user gets, are the biases. Each
file and number is a line of tokens.jsonl, in points.
"""

import argparse
import json
import logging
from pathlib import Path

import numpy as np
from benchmarks.studies.known.sources import sources

import st_magnitude as st
from st_magnitude.workbench.judging.controls import bm25_control

FILE = Path(__file__).with_suffix(".jsonl")
FOLDS = 5
MOST = 3_000


def biases(values: np.ndarray, number: int, draws: int) -> dict[str, float]:
    """The figures minus what the choice of the draw has on all queries: (options, n)."""
    rng = np.random.default_rng(0)
    whole = values.mean(axis=1)
    found: dict[str, list[float]] = {"all": [], "folds": []}
    for _ in range(draws):
        drawn = values[:, rng.permutation(values.shape[1])[:number]]
        chosen = drawn.mean(axis=1).argmax()
        found["all"].append(drawn[chosen].mean() - whole[chosen])
        fold = np.arange(number) % FOLDS
        means = [drawn[:, fold != i].mean(axis=1).argmax() for i in range(FOLDS)]
        held_out = np.concatenate([drawn[row, fold == i] for i, row in enumerate(means)])
        found["folds"].append(held_out.mean() - whole[chosen])
    return {name: round(100 * float(np.mean(x)), 2) for name, x in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    with FILE.open("w", encoding="utf-8") as file:
        for name, rows in sources(given.folder).items():
            splits = st.load_splits(rows, threshold=4.0 if "score" in rows[0] else None, seed=7)
            asked = splits["train"]
            asked = asked.only(set(asked.query_ids[:MOST]))
            rankings, _ = bm25_control(asked)
            values = np.stack([ranking.ndcg for ranking in rankings.values()])
            for number in (40, 100, 300):
                cell = {"file": name, "queries": values.shape[1], "drawn": number}
                means = zip(rankings, values.mean(axis=1), strict=True)
                cell |= {tokens: round(float(mean), 4) for tokens, mean in means}
                cell |= biases(values, number, 500 if number == 300 else 2_000)
                file.write(json.dumps(cell) + "\n")
                print(cell, flush=True)


if __name__ == "__main__":
    main()

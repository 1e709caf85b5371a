"""When not to answer: a threshold above which wrong answers stay rare, with a guarantee.

    python examples/abstention.py --model my-retriever --data my-data --risk 0.1

The answer to a query is its first document, which is wrong if it is not relevant. The dev queries
choose a threshold: of the queries that reach it, at most a share `risk` is answered wrongly, with
probability 1 - `delta`, if new queries come from the same source. The test queries then show what
the rule does. It is saved as JSON; copy `answers` into your server.

Give dev real queries that no document answers, in the share that you expect: in a folder, lines of
the qrels with an empty corpus-id and score 0. A risk of .1 needs at least 91 queries, and in
practice several hundred.

Source: Angelopoulos et al., Learn then Test, arXiv 2110.01052, with thresholds at order statistics,
at which all queries choose and test; docs/research/known.md has the proof.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.special import bdtr
from scipy.stats import binomtest

import st_magnitude as stm
from st_magnitude.workbench.memory import unread

SIGNALS = {  # from the best scores, (n, >= 2) -> (n,)
    "score": lambda scores: scores[:, 0],
    "gap": lambda scores: scores[:, 0] - scores[:, 1],
}
STARTS = (0.125, 0.25, 0.5)  # shares of answered queries at which sequences of tests begin


def answers(rule, scores):
    """Whether to answer each query, (n,), by the scores of its best two documents, (n, 2).

    Normalise the queries, and score as the model does.
    """
    return SIGNALS[rule["signal"]](np.asarray(scores, dtype=np.float64)) >= rule["threshold"]


def best_scores(model, data):
    """The two best scores of every query, (n, 2), and whether its first document is wrong, (n,)."""
    task = stm.encode(model, data, only=data.queries)
    unit_queries = stm.Similarity(1.0, task.similarity.exponents[1])
    found = replace(task, similarity=unit_queries).search(2)
    return found.scores[:, :2], found.gains[:, 0] == 0


def choose_threshold(scores, is_wrong, risk, delta):
    """The signal and its threshold that answer most, by a result of `best_scores`."""
    level = delta / (len(SIGNALS) * len(STARTS))
    found = []
    for name, signal_of in SIGNALS.items():
        values = signal_of(scores)
        for start in STARTS:
            threshold = controlled_threshold(values, is_wrong, start, risk, level)
            found.append((name, threshold, (values >= threshold).sum()))
    name, threshold, _ = max(found, key=lambda one: one[2])
    return name, threshold


def controlled_threshold(values, is_wrong, start, risk, delta):
    """The smallest threshold that passes all tests from the coverage `start` on, or infinity.

    Signals and wrong answers are (n,). Queries are answered in the order of the signal, one more at
    a time, as long as the exact binomial test holds:

        P( Binomial(answers, risk) <= wrong answers ) <= delta

    Of equal signals, the wrong answers come first.
    """
    order = np.lexsort((~is_wrong, -values))
    ranked = values[order]
    answered = np.arange(1, len(values) + 1)
    tails = bdtr(np.cumsum(is_wrong[order]), answered, risk)
    first = max(1, math.ceil(start * len(values)))
    passed = np.cumprod(tails[first - 1 :] <= delta).sum()
    is_last = np.append(ranked[:-1] > ranked[1:], True)  # of equal signals
    fitting = answered[is_last & (answered > first) & (answered < first + passed)]
    if not len(fitting):
        return math.inf
    number = fitting[-1]
    return float(ranked[number - 1 : number + 1].mean())  # between two signals: safe from rounding


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="pairs or a folder, with a dev split")
    parser.add_argument("--columns", help="other names, as query=title,document=body")
    parser.add_argument("--risk", type=float, default=0.1)
    parser.add_argument("--delta", type=float, default=0.05)
    parser.add_argument("--output", type=Path, default=Path("abstention.json"))
    args = parser.parse_args()
    for name in ("risk", "delta"):
        if not 0 < getattr(args, name) < 1:
            parser.error(f"--{name} must be strictly between 0 and 1")

    model, splits = stm.load(args.model), stm.load_splits(args.data, columns=args.columns)
    if "dev" not in splits:
        parser.error("the data need a dev split, whose queries nobody has trained on")
    scores, is_wrong = best_scores(model, unread(splits["dev"], args.model))
    signal, threshold = choose_threshold(scores, is_wrong, args.risk, args.delta)
    rule = {"signal": signal, "threshold": threshold, "risk": args.risk, "delta": args.delta}
    if math.isinf(threshold):
        parser.exit(1, "No threshold gives the guarantee: use more queries or a larger risk.\n")
    args.output.write_text(json.dumps(rule))
    print(f"Answer a query if its {signal} is at least {threshold:.4g}; saved to {args.output}")
    if "test" in splits:  # of the dev queries, which have chosen, too few are wrong
        scores, is_wrong = best_scores(model, unread(splits["test"], args.model))
        answered = answers(rule, scores)
        wrong, total = int((answered & is_wrong).sum()), int(answered.sum())
        print(f"test: {total} of {len(scores)} queries answered")
        if total:
            exact = binomtest(wrong, total).proportion_ci(method="exact")
            print(f"wrong: {wrong / total:.3f} [{exact.low:.3f}, {exact.high:.3f}]")


if __name__ == "__main__":
    main()

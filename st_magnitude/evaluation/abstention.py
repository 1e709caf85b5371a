"""Abstention with a guarantee: answer a query only where wrong answers stay rare."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr
from scipy.stats import binomtest
from sentence_transformers import SentenceTransformer

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import encode_texts
from st_magnitude.evaluation.metrics import raw_scoring_of
from st_magnitude.geometry import risk_coverage
from st_magnitude.result import Result
from st_magnitude.similarity import Similarity

logger = logging.getLogger(__name__)

Array = NDArray[np.float64]
SIGNALS: dict[str, Callable[[Array], Array]] = {  # from the best scores, (n, >= 2) -> (n,)
    "score": lambda scores: scores[:, 0],
    "gap": lambda scores: scores[:, 0] - scores[:, 1],
}
CHOOSING = 0.3  # the share of queries that choose signal and first threshold; the others test


@dataclass(frozen=True)
class Abstention(Result):
    """A rule that says which queries to answer, and what it did on some queries.

    Attributes:
        signal: ``"score"`` of the first document, or ``"gap"`` between the first two scores.
        threshold: Smallest signal that is answered; infinity if none gives the guarantee.
        document_exponent: Document exponent of the scores.
        max_risk, delta: A share of wrong answers above ``max_risk`` has the probability ``delta``.
        unanswerable: Share of the queries that have no relevant document in the guarantee.
        queries, answered, wrong: Numbers of tested queries, of those answered, of wrong answers.
    """

    signal: str
    threshold: float
    document_exponent: float
    max_risk: float
    delta: float
    unanswerable: float
    queries: int = 0
    answered: int = 0
    wrong: int = 0

    @property
    def similarity(self) -> Similarity:
        """The similarity of the scores, which divides by the norm of the query."""
        return Similarity(1.0, self.document_exponent)

    def answers(self, scores: ArrayLike) -> NDArray[np.bool_]:
        """Whether to answer each query, (n,), by the scores of its best documents, (n, >= 2).

        Example:
            >>> rule = Abstention("gap", 0.3, 1.0, max_risk=0.1, delta=0.05, unanswerable=0.25)
            >>> rule.answers([[0.9, 0.5], [0.9, 0.8]])
            array([ True, False])
        """
        return SIGNALS[self.signal](np.asarray(scores, dtype=np.float64)) >= self.threshold

    def tested(self, scores: Array, is_wrong: NDArray[np.bool_]) -> Abstention:
        """The rule with what it does on other queries: (n, >= 2), (n,)."""
        answered = self.answers(scores)
        wrong = int((answered & is_wrong).sum())
        return replace(self, queries=len(scores), answered=int(answered.sum()), wrong=wrong)

    def measure(self, model: SentenceTransformer, data: RetrievalData) -> Abstention:
        """The rule with what it does on other data."""
        return self.tested(*first_documents(model, data, self.similarity))

    @classmethod
    def load(cls, path: str | Path) -> Abstention:
        """Reads the file of `save`."""
        given = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**given | {"threshold": float(given["threshold"])})  # JSON has no infinity

    def tables(self) -> list[str]:
        rule = f"Answer a query if its {self.signal} is at least {self.threshold:.4g}:"
        if math.isinf(self.threshold):
            rule = "Answer no query: for the guarantee, use more queries or a larger risk:"
        lines = [
            f"{rule}\nrisk at most {self.max_risk:g} with probability {1 - self.delta:g}, if "
            f"{self.unanswerable:.0%} of the queries have no answer"
        ]
        counts = (("coverage", self.answered, self.queries), ("risk", self.wrong, self.answered))
        for name, count, total in counts:
            if total:
                exact = binomtest(count, total).proportion_ci(method="exact")
                share = f"{count / total:.3f} [{exact.low:.3f}, {exact.high:.3f}]"
                lines.append(f"{name:8} {share} of {total}")
        return ["\n".join(lines)]


def calibrate_abstention(
    model: SentenceTransformer,
    data: RetrievalData,
    risk: float = 0.1,
    delta: float = 0.05,
    similarity: Similarity | str | None = None,
    encode: Mapping[str, object] | None = None,
) -> Abstention:
    """Finds when to answer: at most a share ``risk`` of the answers is wrong.

    The answer to a query is its first document, and wrong if that is not relevant. A random 30 % of
    the queries choose the signal, score or gap, by the area of risk over coverage, and a first
    threshold. The others test this threshold and then lower ones, up to the first that fails the
    exact binomial test:

        P( Binomial(answers, risk) <= wrong answers ) <= delta

    The guarantee is for new queries from the same source, with the same share of unanswerable ones.

    Args:
        data: Validation queries, with those that no document answers, the corpus and judgments.
        risk: Largest share of wrong answers among the answers given.
        delta: Probability, over the draw of the validation queries, that the guarantee fails.
        similarity: The similarity that ranks; by default the model's own, cosine if it normalises.
        encode: Options of `st_magnitude.data.task.encode_texts`, such as ``{"batch_size": 64}``.

    Raises:
        ValueError: If an argument is out of its range.

    Source: Angelopoulos et al., Learn then Test, arXiv 2110.01052, fixed-sequence testing, with the
    exact binomial tail in place of a bound for any loss.
    """
    for name, value in (("risk", risk), ("delta", delta)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must be strictly between 0 and 1; got {value}.")
    unanswerable = 1 - len(data.relevant) / len(data.queries)
    if not unanswerable:
        logger.warning(
            "Every query has a relevant document, so the guarantee is for such queries only. Add "
            "real queries that no document answers: qrels lines with an empty corpus-id and "
            "score 0."
        )
    exponent = raw_scoring_of(model, similarity).exponents[1]
    rule = Abstention("auto", math.inf, exponent, risk, delta, unanswerable)
    return calibrated(rule, *first_documents(model, data, rule.similarity, encode))


def calibrated(
    rule: Abstention, scores: Array, is_wrong: NDArray[np.bool_], seed: int = 0
) -> Abstention:
    """A rule with the signal and the threshold that the result of `first_documents` gives."""
    chooses = np.random.default_rng(seed).permutation(len(scores)) < CHOOSING * len(scores)
    right = ~is_wrong[chooses]
    names = [*SIGNALS] if rule.signal == "auto" else [rule.signal]
    signal = min(names, key=lambda name: risk_coverage(SIGNALS[name](scores[chooses]), right)[2])
    values = SIGNALS[signal](scores)
    _, coverage, tails = _tests(values[chooses], ~right, rule.max_risk)
    start = coverage[tails.argmin()]
    others = (values[~chooses], is_wrong[~chooses])
    threshold = controlled_threshold(*others, start, rule.max_risk, rule.delta)
    found = replace(rule, signal=signal, threshold=threshold)
    return found.tested(scores[~chooses], is_wrong[~chooses])


def controlled_threshold(
    values: Array, is_wrong: NDArray[np.bool_], start: float, risk: float, delta: float
) -> float:
    """The smallest threshold that passes the tests from the coverage ``start`` on, else infinity.

    Other queries must have chosen ``start``. Signals and wrong answers are (n,).
    """
    thresholds, coverage, tails = _tests(values, is_wrong, risk)
    first = int(np.searchsorted(coverage, start))
    passed = np.cumprod(tails[first:] <= delta).sum()
    return float(thresholds[first + passed - 1]) if passed else math.inf


def _tests(values: Array, is_wrong: NDArray[np.bool_], risk: float) -> tuple[Array, Array, Array]:
    """All thresholds from the highest down, their coverage, and the tails of wrong answers."""
    order = np.argsort(-values, kind="stable")
    last = np.flatnonzero(np.append(np.diff(values[order]) != 0, True))  # of each group of equals
    wrong = np.cumsum(is_wrong[order])[last]
    distinct = values[order][last]
    thresholds = np.append((distinct[:-1] + distinct[1:]) / 2, distinct[-1])  # safe from rounding
    return thresholds, (last + 1) / len(values), bdtr(wrong, last + 1, risk)


def first_documents(
    model: SentenceTransformer,
    data: RetrievalData,
    similarity: Similarity,
    encode: Mapping[str, Any] | None = None,
) -> tuple[Array, NDArray[np.bool_]]:
    """The two best scores of every query, (n, 2), and whether its first document is wrong, (n,)."""
    options = dict(encode or {}) | {"before_normalize": True}
    encoded = encode_texts(model, data.queries, data.corpus, **options)
    encoded = replace(encoded, own=data.own_columns(data.queries))
    top = encoded.top(similarity, 2)
    first = [data.document_ids[column] for column in top[:, 0].tolist()]
    pairs = zip(data.queries, first, strict=True)
    is_wrong = np.array([found not in data.relevant.get(query, {}) for query, found in pairs])
    return encoded.scores(similarity, top).double().numpy(), is_wrong

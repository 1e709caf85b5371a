"""Abstention with a guarantee: answer a query only where wrong answers stay rare."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr
from scipy.stats import binomtest
from sentence_transformers import SentenceTransformer

from st_magnitude._checks import InputError
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.geometry import Array
from st_magnitude.result import Result
from st_magnitude.similarity import Similarity

logger = logging.getLogger(__name__)

SIGNALS: dict[str, Callable[[Array], Array]] = {  # from the best scores, (n, >= 2) -> (n,)
    "score": lambda scores: scores[:, 0],
    "gap": lambda scores: scores[:, 0] - scores[:, 1],
}
STARTS = (0.125, 0.25, 0.5)  # shares of answered queries at which sequences of tests begin


@dataclass(frozen=True)
class Abstention(Result):
    """A rule that decides which queries to answer, with its counts on a sample of queries.

    Attributes:
        signal: ``"score"`` of the first document, or ``"gap"`` between the first two scores.
        threshold: Smallest signal that is answered; infinity if none gives the guarantee.
        document_exponent: Document exponent of the scores.
        max_risk, delta: The share of wrong answers is above ``max_risk`` with probability at most
            ``delta``.
        unanswerable: Share of queries without a relevant document for which this holds.
        queries, answered, wrong: Numbers of queries, of answered queries and of wrong answers. In
            the result of `calibrate_abstention`, they count the queries that chose the threshold;
            `measure` counts other queries.
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
            >>> rule = Abstention("gap", 0.1, 1.0, max_risk=0.1, delta=0.05, unanswerable=0.2)
            >>> rule.answers([[0.9, 0.85], [0.7, 0.4]])
            array([False,  True])
        """
        return SIGNALS[self.signal](np.asarray(scores, dtype=np.float64)) >= self.threshold

    def tested(self, scores: Array, is_wrong: NDArray[np.bool_]) -> Abstention:
        """The same rule with its counts on other queries, by scores (n, >= 2) and errors (n,)."""
        answered = self.answers(scores)
        wrong = int((answered & is_wrong).sum())
        return replace(self, queries=len(scores), answered=int(answered.sum()), wrong=wrong)

    def measure(self, model: SentenceTransformer, data: RetrievalData, **encode: Any) -> Abstention:
        """The same rule with its counts on other data."""
        task = data.encode(model, self.similarity, only=data.queries, **encode)
        return self.tested(*first_documents(task.search(2)))

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
    **encode: Any,
) -> Abstention:
    """Calibrates a threshold at which at most a share ``risk`` of the answers is wrong.

    The answer to a query is its first document, and wrong if that is not relevant. For each signal,
    score and gap, and each start, an eighth, a quarter and a half of the queries, the queries are
    answered in the order of the signal, one more at a time, as long as the exact binomial test
    holds:

        P( Binomial(answers, risk) <= wrong answers ) <= delta / 6

    The threshold lies below the last of them, and of the six the one that answers most is taken.
    The guarantee is for new queries from the same source, with the same share of unanswerable ones.

    Args:
        data: Validation queries, with those that no document answers, the corpus and judgments.
        risk: Largest share of wrong answers among the answers given.
        delta: Probability, over the draw of the validation queries, that the guarantee fails.
        similarity: The similarity that ranks; by default the model's.
        **encode: Options of `RetrievalData.encode`, such as ``batch_size=128``.

    Raises:
        ValueError: If an argument is out of its range, or the corpus has a single document.

    Source: Angelopoulos et al., Learn then Test, arXiv 2110.01052, with thresholds at order
    statistics, at which all queries choose and test; docs/research/abstention.md has the proof.
    """
    check_range(risk, delta)
    return rule_of(data.encode(model, similarity, only=data.queries, **encode), risk, delta)


def check_range(risk: float, delta: float = 0.05) -> None:
    """Refuses a risk or a delta outside (0, 1), before anything is encoded."""
    for name, value in (("risk", risk), ("delta", delta)):
        if not 0 < value < 1:
            raise InputError(f"{name} must be strictly between 0 and 1; got {value}.")


def rule_of(task: EncodedTask, risk: float, delta: float = 0.05) -> Abstention:
    """The rule of `calibrate_abstention`, from the embeddings of all queries."""
    exponent = task.similarity.exponents[1]
    found = replace(task, similarity=Similarity(1.0, exponent)).search(2)
    unanswerable = float(1 - found.has_answer.mean())
    if not unanswerable:
        logger.warning(
            "Every query has a relevant document, so the guarantee is for such queries only. Add "
            "real queries that no document answers: qrels lines with an empty corpus-id and "
            "score 0."
        )
    scores, is_wrong = first_documents(found)
    signal, threshold = choose_threshold(scores, is_wrong, risk, delta)
    rule = Abstention(signal, threshold, exponent, risk, delta, unanswerable)
    return rule.tested(scores, is_wrong)


def choose_threshold(
    scores: Array, is_wrong: NDArray[np.bool_], risk: float, delta: float
) -> tuple[str, float]:
    """The signal and its threshold that answer most, by a result of `first_documents`."""
    level = delta / (len(SIGNALS) * len(STARTS))
    found = []
    for name, signal_of in SIGNALS.items():
        values = signal_of(scores)
        for start in STARTS:
            threshold = controlled_threshold(values, is_wrong, start, risk, level)
            found.append((name, threshold, (values >= threshold).sum()))
    name, threshold, _ = max(found, key=lambda one: one[2])
    return name, threshold


def controlled_threshold(
    values: Array, is_wrong: NDArray[np.bool_], start: float, risk: float, delta: float
) -> float:
    """The smallest threshold that passes all tests from the coverage ``start`` on, or infinity.

    Signals and wrong answers are (n,). Of equal signals, the wrong answers come first.
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


def first_documents(found: Ranking) -> tuple[Array, NDArray[np.bool_]]:
    """The two best scores of every query, (n, 2), and whether its first document is wrong, (n,)."""
    if len(found.data.corpus) < 2:
        raise InputError("Abstention compares the first two documents, and the corpus has one.")
    return found.scores[:, :2], found.gains[:, 0] == 0

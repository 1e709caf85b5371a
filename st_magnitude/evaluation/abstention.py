"""Abstention with a guarantee: answer a query only where wrong answers stay rare."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import bdtr
from sentence_transformers import SentenceTransformer

from st_magnitude._checks import one_of
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import encode_texts
from st_magnitude.evaluation.metrics import raw_scoring_of, share_interval
from st_magnitude.geometry import risk_coverage
from st_magnitude.result import Result, Table
from st_magnitude.similarity import Similarity

__all__ = ["Abstention", "Answers", "answerable", "calibrate_abstention", "controlled_threshold"]

Array = NDArray[np.float64]
First = tuple[Array, NDArray[np.bool_], float]  # of `first_documents`

SIGNALS = ("score", "gap")
UNANSWERABLE = 0.25  # the share of queries whose documents are left out where the data has no query without an answer
CHOOSING = 0.3  # the share of queries that choose signal and first threshold; the others test


@dataclass(frozen=True)
class Answers:
    """How many queries are answered, and how many answers are wrong, as shares with exact 95 % intervals.

    ``coverage`` is the share of the queries that are answered, and ``risk`` the share of the answers that are wrong.
    """

    queries: int
    answered: int
    wrong: int

    @property
    def coverage(self) -> tuple[float, float, float]:
        return share_interval(self.answered, self.queries)

    @property
    def risk(self) -> tuple[float, float, float]:
        return share_interval(self.wrong, self.answered)

    def __str__(self) -> str:
        coverage, risk = ("{:.3f} [{:.3f}, {:.3f}]".format(*share) for share in (self.coverage, self.risk))
        return f"coverage {coverage} of {self.queries} queries\nrisk     {risk} of {self.answered} answers"


@dataclass(frozen=True)
class Abstention(Result):
    """A rule that says which queries to answer, and its guarantee.

    Attributes:
        signal: ``"score"`` of the first document, or ``"gap"`` between the first two scores.
        threshold: Smallest signal that is answered; infinity if no threshold gives the guarantee.
        document_exponent: Document exponent of the scores.
        max_risk: Largest share of wrong answers that the rule allows.
        delta: Probability, over the draw of the validation queries, that the share is larger after all.
        unanswerable: Share of the validation queries without an answer. The guarantee is for queries of this mix.
        calibration: Answers on the queries that tested the threshold.
        areas: Area of risk by coverage of every signal, on the queries that chose the signal.
    """

    signal: str
    threshold: float
    document_exponent: float
    max_risk: float
    delta: float
    unanswerable: float
    calibration: Answers
    areas: dict[str, float]

    @property
    def similarity(self) -> Similarity:
        """The similarity of the scores. It divides by the norm of the query, so scores of all queries compare."""
        return Similarity(1.0, self.document_exponent)

    def measure(
        self,
        model: SentenceTransformer,
        data: RetrievalData,
        unanswerable: float | None = None,
        encode: Mapping[str, Any] | None = None,
    ) -> Answers:
        """Applies the rule to other queries; the arguments are those of `calibrate_abstention`."""
        scores, is_wrong, _ = first_documents(model, data, self.similarity, unanswerable, 0, encode)
        return answers_of(_values(self.signal, scores), is_wrong, self.threshold)

    def save(self, folder: str | Path) -> Path:
        """Writes ``abstention.json`` into a folder, which is usually that of the model."""
        return super().save(Path(folder) / "abstention.json")

    @classmethod
    def load(cls, folder: str | Path) -> Abstention:
        """Reads the file of `save`."""
        given = json.loads((Path(folder) / "abstention.json").read_text(encoding="utf-8"))
        given["threshold"] = float(given["threshold"])  # JSON has no infinity
        return cls(**given | {"calibration": Answers(**given["calibration"])})

    def tables(self) -> list[Table | str]:
        """The rule, its guarantee, and the area of every signal."""
        rule = f"Answer a query if its {self.signal} is at least {self.threshold:.4g}:"
        if math.isinf(self.threshold):
            rule = "Answer no query: no threshold of this signal gives the guarantee. Use more\n"
            rule += "validation queries, a larger risk, or a better model:"
        guarantee = f"risk at most {self.max_risk:g} with probability {1 - self.delta:g}, "
        guarantee += f"if {self.unanswerable:.0%} of the queries have no answer"
        table = Table(["signal", "area of risk by coverage"], list(self.areas.items()))
        return [f"{rule}\n{guarantee}\n{self.calibration}", table]


def calibrate_abstention(
    model: SentenceTransformer,
    data: RetrievalData,
    risk: float = 0.1,
    delta: float = 0.05,
    signal: str = "auto",
    similarity: Similarity | str | None = None,
    unanswerable: float | None = None,
    seed: int = 0,
    encode: Mapping[str, Any] | None = None,
) -> Abstention:
    """Finds when to answer: at most a share ``risk`` of the answers is wrong, with probability 1 - ``delta``.

    The answer to a query is its first document. It is wrong if that document is not relevant, and so every answer to a
    query that no document answers is wrong. A random 30 % of the queries choose the signal and a first threshold. The
    others test this threshold and then lower ones, up to the first that fails the exact binomial test:

        P( Binomial(answers, risk) <= wrong answers ) <= delta

    The guarantee is for new queries from the same source, with the same share of unanswerable ones.

    Args:
        model: Any SentenceTransformer.
        data: Validation queries, the corpus and judgments, as `RetrievalData.from_beir` reads them.
        risk: Largest share of wrong answers among the answers given.
        delta: Probability, over the draw of the validation queries, that the guarantee fails.
        signal: ``"score"``, ``"gap"`` (first score minus second), or ``"auto"`` for the one with the smaller area of
            risk by coverage.
        similarity: The similarity that ranks; by default the model's own, which is cosine if it normalises.
        unanswerable: Share of the queries whose relevant documents are left out; choose the one that you expect. By
            default 0 if the data has queries without a relevant document, else 0.25.
        seed: Seed for the queries that are left out, and for the two parts.
        encode: Options of encoding, such as ``{"batch_size": 64}``, see `st_magnitude.data.task.encode_texts`.

    Raises:
        ValueError: If risk or delta are not strictly between 0 and 1, or another argument is out of its range.

    Example:
        ::

            rule = stm.calibrate_abstention(model, RetrievalData.from_beir("my-data", "dev"), risk=0.1)
            rule.save("my-model")
            answerable("my-model", scores)

    Source: Angelopoulos et al., Learn then Test: Calibrating Predictive Algorithms to Achieve Risk Control, arXiv
    2110.01052, fixed-sequence testing, with the exact binomial tail in place of a bound for any loss.
    """
    for name, value in (("risk", risk), ("delta", delta)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must be strictly between 0 and 1; got {value}.")
    one_of("signal", signal, ("auto", *SIGNALS))
    similarity = Similarity(1.0, raw_scoring_of(model, similarity).exponents[1])
    found = first_documents(model, data, similarity, unanswerable, seed, encode)
    return rule_of(found, similarity, risk, delta, signal, seed)


def rule_of(found: First, similarity: Similarity, risk: float, delta: float, signal: str, seed: int = 0) -> Abstention:
    """The rule from the result of `first_documents`; the other arguments are those of `calibrate_abstention`."""
    scores, is_wrong, unanswerable = found
    choosing = np.random.default_rng(seed).permutation(len(scores)) < CHOOSING * len(scores)  # the others test
    areas = {name: risk_coverage(_values(name, scores[choosing]), ~is_wrong[choosing])[2] for name in SIGNALS}
    if signal == "auto":
        signal = min(areas, key=lambda name: areas[name])
    values = _values(signal, scores)
    _, coverage, tails = _tests(values[choosing], is_wrong[choosing], risk)
    threshold = controlled_threshold(values[~choosing], is_wrong[~choosing], coverage[tails.argmin()], risk, delta)
    answers = answers_of(values[~choosing], is_wrong[~choosing], threshold)
    return Abstention(signal, threshold, similarity.exponents[1], risk, delta, unanswerable, answers, areas)


def _values(signal: str, scores: Array) -> Array:
    """The signal of every query from its best scores: (n, >= 2) -> (n,)."""
    return scores[:, 0] - scores[:, 1] if signal == "gap" else scores[:, 0]


def controlled_threshold(values: Array, is_wrong: Any, start: float, risk: float, delta: float) -> float:
    """The smallest threshold that passes fixed-sequence testing; infinity if the first one fails.

    The tests go from the coverage ``start``, which other queries must have chosen, to larger ones, on the signals and
    the wrong answers of n queries: (n,), (n,).

    Example:
        >>> signal = np.linspace(0, 1, 200)
        >>> round(controlled_threshold(signal, signal < 0.5, start=0.25, risk=0.1, delta=0.05), 2)
        0.47
    """
    thresholds, coverage, tails = _tests(values, is_wrong, risk)
    first = int(np.searchsorted(coverage, start))
    passed = np.cumprod(tails[first:] <= delta).sum()
    return float(thresholds[first + passed - 1]) if passed else math.inf


def _tests(values: Array, is_wrong: Any, risk: float) -> tuple[Array, Array, Array]:
    """All thresholds from the highest down, their coverage, and the binomial tails of their wrong answers.

    A threshold lies in the middle between two values: rounding elsewhere does not move a query across it.
    """
    order = np.argsort(-values, kind="stable")
    last = np.flatnonzero(np.append(np.diff(values[order]) != 0, True))  # of each group of equal values
    wrong, distinct = np.cumsum(np.asarray(is_wrong)[order])[last], values[order][last]
    thresholds = np.append((distinct[:-1] + distinct[1:]) / 2, distinct[-1])
    return thresholds, (last + 1) / len(values), bdtr(wrong, last + 1, risk)


def answers_of(values: Array, is_wrong: Any, threshold: float) -> Answers:
    answered = values >= threshold
    return Answers(len(values), int(answered.sum()), int((answered & is_wrong).sum()))


def first_documents(
    model: SentenceTransformer,
    data: RetrievalData,
    similarity: Similarity,
    unanswerable: float | None,
    seed: int,
    encode: Mapping[str, Any] | None = None,
) -> First:
    """The two best scores of every query, (n, 2), whether the first is wrong, (n,), and the share without an answer."""
    column = {document: i for i, document in enumerate(data.document_ids)}
    relevant = [{column[d]: 1 for d in data.relevant.get(query, ())} for query in data.queries]
    has_answer = np.array([bool(documents) for documents in relevant])
    if unanswerable is None:
        unanswerable = UNANSWERABLE if has_answer.all() else 0.0
    if not 0 <= unanswerable < 1:
        raise ValueError(f"unanswerable must be a share of the queries in [0, 1); got {unanswerable}.")
    candidates = np.random.default_rng(seed + 1).permutation(np.flatnonzero(has_answer))
    left_out = np.zeros(len(relevant), dtype=bool)
    left_out[candidates[: round(unanswerable * len(relevant))]] = True
    depth = 2 + max((len(documents) for documents, out in zip(relevant, left_out, strict=True) if out), default=0)
    if len(data.corpus) < depth:
        raise ValueError(f"The corpus has {len(data.corpus)} documents, but at least {depth} are needed; enlarge it.")

    encoded = encode_texts(model, data.queries, data.corpus, before_normalize=True, **(encode or {}))
    top = encoded.top(similarity, depth)  # (n, depth)
    is_relevant = replace(encoded, columns=relevant).hits(top)
    order = np.argsort(is_relevant & left_out[:, None], axis=1, kind="stable")[:, :2]  # documents left out go last
    first_two = top.gather(1, torch.from_numpy(order))  # (n, 2)
    scores = encoded.scores(similarity, first_two).double().numpy()
    is_wrong = ~np.take_along_axis(is_relevant, order, axis=1)[:, 0]
    return scores, is_wrong, float((~has_answer | left_out).mean())


def answerable(rule: Abstention | str | Path, scores: Any) -> NDArray[np.bool_]:
    """Whether to answer each query with its first document: -> booleans (n,).

    Args:
        rule: The result of `calibrate_abstention`, or the folder where it was saved.
        scores: Scores of the two or more best documents under ``rule.similarity``, best first, (n, k).

    Example:
        >>> rule = Abstention("score", 0.6, 1.0, 0.1, 0.05, 0.25, Answers(100, 50, 2), {})
        >>> answerable(rule, [[0.9, 0.5], [0.55, 0.5]])
        array([ True, False])
    """
    if not isinstance(rule, Abstention):
        rule = Abstention.load(rule)
    return _values(rule.signal, np.asarray(scores, dtype=np.float64)) >= rule.threshold

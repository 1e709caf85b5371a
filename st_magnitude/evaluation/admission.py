"""Index admission: which documents to index, and what leaving out the others costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from st_magnitude._checks import one_of
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask, ndcg
from st_magnitude.evaluation.metrics import scoring_of, share_interval
from st_magnitude.geometry import norms
from st_magnitude.result import Result, Table, to_plain
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.raw import normalizes_output

__all__ = ["SCORERS", "Admission", "Criterion", "admit", "surface_features"]

Array = NDArray[np.float64]
Score = Callable[[Sequence[str], NDArray[Any]], Array]

SCORERS = ("norm", "surface", "embedding")
FOLDS = 5
FEWEST = 20  # judged queries
LABELLED = 10_000  # documents that a regression sees next to the relevant ones
DEPTH = 50  # documents of a ranking before any is dropped


@dataclass(frozen=True)
class Criterion:
    """Answers and ranking under one score at the share of the result."""

    answers_kept: tuple[float, float, float]  # as in Admission
    ndcg: float  # mean nDCG@10 in the index that is left; documents that were dropped count as missed
    share: float | None  # of the corpus that has to be kept for the asked recall


@dataclass(frozen=True, repr=False)
class Admission(Result):
    """Which documents to index, and what was measured on queries that had no part in the choice.

    Attributes:
        ids: Ids of all documents, sorted.
        kept: Whether to index each of them, (m,).
        scorer: The score that decides: ``"norm"``, ``"surface"`` or ``"embedding"``.
        scores: This score for every document, (m,).
        threshold: The smallest score that is kept.
        score: The scorer itself, for documents that come later: ``score(texts, embeddings) >= threshold``.
        answers_kept: Mean share of the relevant documents of a query that is kept, with its 95 % interval over queries
            (Clopper and Pearson): (share, low, high). Other queries chose scorer and threshold.
        ndcg: Mean nDCG@10 before, on the same queries.
        criteria: A `Criterion` for each score, all at the same share.
        queries: Number of judged queries.
    """

    ids: list[str]
    kept: NDArray[np.bool_]
    scorer: str
    scores: Array
    threshold: float
    score: Score
    answers_kept: tuple[float, float, float]
    ndcg: float
    criteria: dict[str, Criterion]
    queries: int

    @property
    def share(self) -> float:
        """Share of the documents that is kept."""
        return float(self.kept.mean())

    @property
    def kept_ids(self) -> list[str]:
        """Sorted ids of the documents to index."""
        return [self.ids[i] for i in np.flatnonzero(self.kept)]

    def to_dict(self) -> dict[str, Any]:
        """All figures, without the documents."""
        names = ("scorer", "threshold", "share", "answers_kept", "ndcg", "queries")
        counts = {"documents": len(self.ids), "kept": int(self.kept.sum())}
        return {name: getattr(self, name) for name in names} | counts | {"criteria": to_plain(self.criteria)}

    def save(self, folder: str | Path) -> Path:
        """Writes ``kept.txt``, an id in each line, and ``admission.json``, the figures, into a folder."""
        path = super().save(Path(folder) / "admission.json")
        path.with_name("kept.txt").write_text("".join(f"{key}\n" for key in self.kept_ids), encoding="utf-8")
        return path

    def tables(self) -> list[Table | str]:
        """The choice, and a row for each score at the same share."""
        choice = (
            f"Index {self.kept.sum():,} of {len(self.ids):,} documents ({self.share:.1%}):\n"
            f"those whose {self.scorer} score is at least {self.threshold:.4g}.\n"
            f"Answers kept {_percent(self.answers_kept)} of {self.queries:,} queries,\n"
            "each measured by a choice of the other queries."
        )
        rows = [
            [name, _percent(row.answers_kept), row.ndcg, "-" if row.share is None else f"{row.share:.1%}"]
            for name, row in self.criteria.items()
        ]
        title = f"nDCG@10 before: {self.ndcg:.4f}. Each score at this share:"
        return [choice, Table(["score", "answers kept", "nDCG@10", "share for the recall"], rows, title)]


def _percent(share: tuple[float, float, float]) -> str:
    return "{:.1%} [{:.1%}, {:.1%}]".format(*share)


def admit(
    model: SentenceTransformer,
    data: RetrievalData,
    *,
    keep: float | None = None,
    recall: float | None = None,
    scorer: str = "best",
    similarity: Similarity | str | None = None,
    seed: int = 0,
    encode: Mapping[str, Any] | None = None,
) -> Admission:
    """Chooses which documents to index, and measures on validation queries what the others cost.

    A document's score is one of

    - ``"norm"``: the norm of its embedding;
    - ``"surface"``: a logistic regression on length, punctuation, digits and capitals of its text;
    - ``"embedding"``: a logistic regression on the direction and the norm of its embedding.

    The regressions learn to tell documents that are relevant to a validation query from a sample of the others. All
    figures are cross-fitted over five parts of the queries: a part is measured with regressions, a scorer and a
    threshold that the other four parts have chosen. Its own relevant documents count like any others there, as the
    relevant documents of new queries will.

    Args:
        model: Any SentenceTransformer. The norm means something for models that were trained with it.
        data: Validation queries, the corpus and judgments. Queries without a relevant document do not count.
        keep: Share of the documents to keep, between 0 and 1.
        recall: Share of the answers to keep, between 0 and 1, instead of ``keep``: drops as many documents as it can.
        scorer: ``"norm"``, ``"surface"``, ``"embedding"``, or ``"best"``: for ``recall`` the score that keeps fewest
            documents; for ``keep`` the score with the best nDCG@10 among those whose 95 % interval of answers lost,
            against the score that keeps most, reaches 0.
        similarity: The similarity that ranks; by default the model's own.
        seed: Seed for the parts of the queries and for the sample of documents.
        encode: Options of encoding, such as ``{"batch_size": 64}``, see `st_magnitude.data.task.encode_texts`.

    Raises:
        ValueError: Before anything is encoded, if not exactly one of keep and recall is given and between 0 and 1,
            there are fewer than 20 judged queries, or the norm has to decide and the model normalises.

    Example:
        ::

            found = stm.admit(model, RetrievalData.from_beir("my-data", "dev"), keep=0.5)
            print(found)
            index_these = found.kept_ids

    Source: Chang et al., Neural Passage Quality Estimation for Static Pruning, arXiv 2407.12170.
    """
    one_of("scorer", scorer, ("best", *SCORERS))
    if (keep is None) == (recall is None) or not 0 < (recall if keep is None else keep) < 1:  # type: ignore[operator]
        raise ValueError(
            "Give either keep=, the share of the documents, or recall=, the share of the answers, strictly between 0 "
            f"and 1; got keep={keep}, recall={recall}."
        )
    names = [name for name in SCORERS if name != "norm" or not normalizes_output(model)]
    if scorer == "norm" and "norm" not in names:
        raise ValueError(
            "The model normalises, so all norms are 1: use stm.strip_normalize(model) first if it was trained with the "
            "norm, or another scorer=."
        )
    similarity = scoring_of(model, similarity)
    if len(data.query_ids) < FEWEST:
        raise ValueError(
            f"{len(data.query_ids)} of {len(data.queries)} queries have a relevant document, but at least {FEWEST} are "
            "needed to measure a loss, better several hundred."
        )
    texts = [data.corpus[document] for document in data.document_ids]
    study = _Study(data.encode(model, **(encode or {})), texts, similarity, names, seed)
    allowed, everyone = names if scorer == "best" else [scorer], np.ones(len(data.query_ids), dtype=bool)
    chosen, drop = study.choose(allowed, keep, recall, everyone)
    decide = study.fitted(chosen)
    scores = decide(study.rows[chosen])
    threshold = float(np.sort(scores)[min(int(drop * len(scores) + 1e-9), len(scores) - 1)])
    criteria = {
        name: Criterion(
            _mean_share(study.kept(name, drop)),
            study.ndcg(name, drop),
            None if recall is None else 1 - study.drop(name, recall, everyone),
        )
        for name in names
    }
    return Admission(
        data.document_ids,
        scores >= threshold,
        chosen,
        scores,
        threshold,
        lambda texts, embeddings: decide(_features(chosen, texts, embeddings)),
        _mean_share(study.outcomes(allowed, keep, recall)),
        study.ndcg(chosen, drop=0.0),
        criteria,
        len(data.query_ids),
    )


class _Study:
    """Where the answers stand among all documents by each score, under regressions that did not see their queries."""

    def __init__(
        self, encoded: EncodedTask, texts: Sequence[str], similarity: Similarity, names: Sequence[str], seed: int
    ) -> None:
        rng, size = np.random.default_rng(seed), len(texts)
        self.rows = {name: _features(name, texts, encoded.documents.cpu().numpy()) for name in names}
        self.labelled = rng.choice(size, min(size, LABELLED), replace=False)
        self.grades = [list(row.values()) for row in encoded.columns]
        self.number = np.array([len(row) for row in encoded.columns])
        self.query = np.repeat(np.arange(len(self.number)), self.number)  # of every pair of a query and an answer
        self.answers = np.concatenate([list(row) for row in encoded.columns])
        top = encoded.top(similarity, DEPTH)
        self.best, self.gains = top.numpy(), encoded.gains(top)  # (n, depth)
        self.fold = rng.permutation(len(self.number)) % FOLDS
        # The share of the corpus with at most the score of each document, (FOLDS, m). It is kept if this is above drop.
        self.rank: dict[str, Array] = {}
        for name in names:
            scores = [self.fitted(name, self.fold[self.query] != fold)(self.rows[name]) for fold in range(FOLDS)]
            self.rank[name] = np.stack([np.searchsorted(np.sort(row), row, side="right") / size for row in scores])

    def fitted(self, name: str, pairs: Any = slice(None)) -> Callable[[Array], Array]:
        """A function from features to scores, learned from the relevant documents of these pairs and the sample."""
        if name == "norm":
            return lambda rows: rows[:, 0]
        positive = np.unique(self.answers[pairs])
        seen = np.union1d(positive, self.labelled)
        # Hundreds of dimensions need a stronger penalty than the surface features.
        regression = LogisticRegression(C=1.0 if name == "surface" else 0.01, max_iter=1000)
        learned = make_pipeline(StandardScaler(), regression).fit(self.rows[name][seen], np.isin(seen, positive))
        decide: Callable[[Array], Array] = learned.decision_function
        return decide

    def kept(self, name: str, drop: float) -> Array:
        """Share of the relevant documents of each query that is kept, (n,)."""
        stay = self.rank[name][self.fold[self.query], self.answers] > drop
        return np.bincount(self.query, stay) / self.number

    def drop(self, name: str, recall: float, queries: NDArray[np.bool_]) -> float:
        """The largest share of the corpus whose loss keeps the recall on these queries."""
        pairs = queries[self.query]
        at = self.rank[name][self.fold[self.query], self.answers][pairs]
        order = np.argsort(at)
        lost = np.cumsum((1 / self.number[self.query[pairs]])[order]) / queries.sum()
        first = int(np.searchsorted(lost, 1 - recall + 1e-9, side="right"))  # the first answer that has to stay
        return max(0.0, float(at[order][first]) - 0.5 / self.rank[name].shape[1])

    def choose(
        self, names: Sequence[str], keep: float | None, recall: float | None, on: NDArray[np.bool_]
    ) -> tuple[str, float]:
        """The scorer and the share to drop that are best on some queries."""
        if recall is not None:
            drops = {name: self.drop(name, recall, on) for name in names}
            best = max(drops, key=lambda name: drops[name])
            return best, drops[best]
        drop = 1 - float(keep or 0)
        kept = {name: self.kept(name, drop)[on] for name in names}
        most = max(kept.values(), key=np.mean)
        lost = {name: most - shares for name, shares in kept.items()}
        level = [name for name in names if lost[name].mean() <= 1.96 * lost[name].std() / np.sqrt(on.sum())]
        return max(level, key=lambda name: self.ndcg(name, drop, on)), drop

    def outcomes(self, names: Sequence[str], keep: float | None, recall: float | None) -> Array:
        """Share of the relevant documents of each query that is kept by a choice of the other folds, (n,)."""
        found = np.empty(len(self.number))
        for fold in range(FOLDS):
            name, drop = self.choose(names, keep, recall, self.fold != fold)
            found[self.fold == fold] = self.kept(name, drop)[self.fold == fold]
        return found

    def ndcg(self, name: str, drop: float, queries: Any = slice(None)) -> float:
        """Mean nDCG@10 in the index that is left."""
        stay = self.rank[name][self.fold[:, None], self.best] > drop
        order = np.argsort(~stay, axis=1, kind="stable")  # documents that are dropped go last
        gains = np.take_along_axis(self.gains * stay, order, axis=1)
        return float(ndcg(gains, self.grades)[queries].mean())


def _mean_share(shares: Array) -> tuple[float, float, float]:
    return share_interval(float(shares.sum()), len(shares))


def _features(name: str, texts: Sequence[str], embeddings: NDArray[Any]) -> Array:
    if name == "surface":
        return surface_features(texts)
    if name == "norm":
        return norms(embeddings)[:, None]
    sizes = norms(embeddings)[:, None].clip(min=np.finfo(np.float32).tiny)
    return np.concatenate([embeddings / sizes, np.log(sizes)], axis=1)


def surface_features(texts: Sequence[str]) -> Array:
    """Length, punctuation, digits and capitals of texts: n texts -> (n, 18).

    Example:
        >>> surface_features(["Sorts a list.", "key : default=None"])[:, 0].round(2)  # the logarithm of 1 + words
        array([1.39, 1.39])
    """
    rows = []
    for text in texts:
        words, characters = text.split(), max(len(text), 1)
        marks = [text.count(mark) / characters for mark in ".,:;()[]`'\"=_/-"]
        shares = [sum(map(kind, text)) / characters for kind in (str.isdigit, str.isupper)]
        word_length = sum(map(len, words)) / max(len(words), 1)
        ends = [text[:1].isupper(), text.endswith(".")]
        rows.append([np.log1p(len(words)), *shares, word_length, *marks, *map(float, ends)])
    return np.array(rows)

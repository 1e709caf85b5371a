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
from st_magnitude.data.task import ndcg
from st_magnitude.evaluation.metrics import scoring_of, share_interval
from st_magnitude.geometry import norms
from st_magnitude.result import Result, Table
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.raw import normalizes_output

__all__ = ["SCORERS", "Admission", "admit", "surface_features"]

Array = NDArray[np.float64]
Score = Callable[[Sequence[str], NDArray[Any]], Array]

SCORERS = ("surface", "norm")
FOLDS = 5
FEWEST = 20  # judged queries
LABELLED = 10_000  # documents that a regression sees next to the relevant ones
DEPTH = 50  # documents of a ranking before any is dropped


@dataclass(frozen=True, repr=False)
class Admission(Result):
    """Which documents to index, and what was measured on queries that had no part in the choice.

    Attributes:
        ids: Ids of all documents, sorted.
        scorer: The score that decides: ``"surface"`` or ``"norm"``.
        scores: This score for every document, (m,).
        threshold: The smallest score that is kept.
        score: The scorer itself, for documents that come later: ``score(texts, embeddings) >= threshold``.
        answers_kept: Mean share of the relevant documents of a query that is kept, with its 95 % interval over queries
            (Clopper and Pearson): (share, low, high).
        ndcg: Mean nDCG@10 of the same queries, before and in the index that is left.
        queries: Number of judged queries.
    """

    ids: list[str]
    scorer: str
    scores: Array
    threshold: float
    score: Score
    answers_kept: tuple[float, float, float]
    ndcg: tuple[float, float]
    queries: int

    @property
    def kept_ids(self) -> list[str]:
        """Sorted ids of the documents to index."""
        return [self.ids[i] for i in np.flatnonzero(self.scores >= self.threshold)]

    @property
    def share(self) -> float:
        """Share of the documents that is kept."""
        return len(self.kept_ids) / len(self.ids)

    def to_dict(self) -> dict[str, Any]:
        """All figures, without the documents."""
        names = ("scorer", "threshold", "share", "answers_kept", "ndcg", "queries")
        counts = {"documents": len(self.ids), "kept": len(self.kept_ids)}
        return {name: getattr(self, name) for name in names} | counts

    def save(self, folder: str | Path) -> Path:
        """Writes ``kept.txt``, an id in each line, and ``admission.json``, the figures, into a folder."""
        path = super().save(Path(folder) / "admission.json")
        path.with_name("kept.txt").write_text("".join(f"{key}\n" for key in self.kept_ids), encoding="utf-8")
        return path

    def tables(self) -> list[Table | str]:
        """The choice and its cost."""
        kept = "{:.1%} [{:.1%}, {:.1%}]".format(*self.answers_kept)
        return [
            f"Index {len(self.kept_ids):,} of {len(self.ids):,} documents ({self.share:.1%}):\n"
            f"those whose {self.scorer} score is at least {self.threshold:.4g}.\n"
            f"Answers kept {kept} of {self.queries:,} queries,\n"
            "each measured by a choice of the other queries.\n"
            "nDCG@10 {:.4f} before, {:.4f} in this index.".format(*self.ndcg)
        ]


def admit(
    model: SentenceTransformer,
    data: RetrievalData,
    *,
    keep: float | None = None,
    recall: float | None = None,
    scorer: str = "surface",
    similarity: Similarity | str | None = None,
    seed: int = 0,
    encode: Mapping[str, Any] | None = None,
) -> Admission:
    """Chooses which documents to index, and measures on validation queries what the others cost.

    A document's score is ``"surface"``, a logistic regression on length, punctuation, digits and capitals of its text,
    or ``"norm"``, the norm of its embedding. The regression learns to tell documents that are relevant to a validation
    query from a sample of the others. All figures are cross-fitted: each fifth of the queries is measured with a
    regression and a threshold of the others, where its relevant documents count like those of new queries.

    Args:
        model: Any SentenceTransformer. The norm means something for models that were trained with it.
        data: Validation queries, the corpus and judgments. Queries without a relevant document do not count.
        keep: Share of the documents to keep, between 0 and 1.
        recall: Share of the answers to keep, between 0 and 1, instead of ``keep``: drops as many documents as it can.
        scorer: ``"surface"`` or ``"norm"``.
        similarity: The similarity that ranks; by default the model's own.
        seed: Seed for the parts of the queries and for the sample of documents.
        encode: Options of encoding, such as ``{"batch_size": 64}``, see `st_magnitude.data.task.encode_texts`.

    Raises:
        ValueError: If not exactly one of keep and recall is given and between 0 and 1, there are fewer than 20 judged
            queries, or the norm has to decide and the model normalises.

    Example:
        ::

            found = stm.admit(model, RetrievalData.from_beir("my-data", "dev"), keep=0.5)
            index_these = found.kept_ids

    Source: Chang et al., Neural Passage Quality Estimation for Static Pruning, arXiv 2407.12170.
    """
    one_of("scorer", scorer, SCORERS)
    if (keep is None) == (recall is None) or not 0 < (recall if keep is None else keep) < 1:  # type: ignore[operator]
        raise ValueError(f"Give either keep= or recall=, strictly between 0 and 1; got keep={keep}, recall={recall}.")
    if scorer == "norm" and normalizes_output(model):
        raise ValueError(
            "The model normalises, so all norms are 1: use stm.strip_normalize(model) first if it was trained with the "
            "norm, or another scorer=."
        )
    similarity = scoring_of(model, similarity)
    if (judged := len(data.query_ids)) < FEWEST:
        raise ValueError(f"{judged} queries have a relevant document, but at least {FEWEST} are needed.")
    encoded, size = data.encode(model, **(encode or {})), len(data.document_ids)
    rows = _features(scorer, [data.corpus[document] for document in data.document_ids], encoded.documents.cpu().numpy())
    rng = np.random.default_rng(seed)
    labelled = rng.choice(size, min(size, LABELLED), replace=False)
    number = np.array([len(row) for row in encoded.columns])
    query = np.repeat(np.arange(len(number)), number)  # of every pair of a query and an answer
    answers = np.concatenate([list(row) for row in encoded.columns])
    fold = rng.permutation(len(number)) % FOLDS
    # The share of the corpus with at most the score of each document, (FOLDS, m). It is kept if this is above drop.
    scores = [_fitted(scorer, rows, answers[fold[query] != i], labelled)(rows) for i in range(FOLDS)]
    ranks = np.stack([np.searchsorted(np.sort(row), row, side="right") / size for row in scores])
    at, weights = ranks[fold[query], answers], 1 / number[query]  # of every pair

    def drop(pairs: Any) -> float:
        return 1 - float(keep or 0) if recall is None else _largest_drop(at[pairs], weights[pairs], recall, size)

    drops = np.array([drop(fold[query] != i) for i in range(FOLDS)])  # each is chosen by the other folds
    shares = np.bincount(query, at > drops[fold[query]]) / number  # of the answers of each query, (n,)
    top = encoded.top(similarity, DEPTH)
    stay = ranks[fold[:, None], top.numpy()] > drops[fold][:, None]
    order = np.argsort(~stay, axis=1, kind="stable")  # documents that are dropped go last
    left = np.take_along_axis(encoded.gains(top) * stay, order, axis=1)

    decide = _fitted(scorer, rows, answers, labelled)
    final = decide(rows)
    threshold = float(np.sort(final)[min(int(drop(slice(None)) * size + 1e-9), size - 1)])

    def score(texts: Sequence[str], embeddings: NDArray[Any]) -> Array:
        return decide(_features(scorer, texts, embeddings))

    answers_kept = share_interval(float(shares.sum()), judged)
    after = ndcg(left, [row.values() for row in encoded.columns])
    both = float(encoded.ndcg(top).mean()), float(after.mean())
    return Admission(data.document_ids, scorer, final, threshold, score, answers_kept, both, judged)


def _largest_drop(at: Array, weights: Array, recall: float, size: int) -> float:
    """The largest share of the corpus whose loss keeps the recall, from the ranks and the weights of the answers."""
    order = np.argsort(at)
    lost = np.cumsum(weights[order]) / weights.sum()
    first = int(np.searchsorted(lost, 1 - recall + 1e-9, side="right"))  # the first answer that has to stay
    return max(0.0, float(at[order][first]) - 0.5 / size)


def _fitted(scorer: str, rows: Array, answers: Any, labelled: Any) -> Callable[[Array], Array]:
    """A function from features to scores, learned from these relevant documents and the sample."""
    if scorer == "norm":
        return lambda rows: rows[:, 0]
    positive = np.unique(answers)
    seen = np.union1d(positive, labelled)
    learned: Any = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return learned.fit(rows[seen], np.isin(seen, positive)).decision_function


def _features(scorer: str, texts: Sequence[str], embeddings: NDArray[Any]) -> Array:
    return surface_features(texts) if scorer == "surface" else norms(embeddings)[:, None]


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

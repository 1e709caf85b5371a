"""Index admission: which documents to index, and what leaving out the others costs.

Many documents of a real corpus are never relevant. `admit` scores every document, keeps a share of them, and measures
on validation queries how many answers are lost. The score is the norm under a magnitude model, or what a logistic
regression makes of the surface of the text or of the embedding: whichever keeps most answers, or as many as this one
but for chance and gives the best ranking.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from scipy.special import betaincinv
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from st_magnitude._checks import one_of
from st_magnitude._files import whole_file
from st_magnitude.corpus.encoding import embedding_batches, encode_corpus, read_record
from st_magnitude.corpus.texts import documents_of
from st_magnitude.data.retrieval import Judgments
from st_magnitude.data.task import EncodedTask, ndcg, rank
from st_magnitude.evaluation.base import judged as judged_data
from st_magnitude.geometry import norms
from st_magnitude.result import to_plain
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.raw import normalizes_output

__all__ = ["SCORERS", "Admission", "Criterion", "admit", "surface_features"]

logger = logging.getLogger(__name__)

Array = NDArray[np.float64]
Vectors = NDArray[np.float32]
Score = Callable[[Sequence[str], NDArray[Any]], Array]

SCORERS = ("norm", "surface", "embedding")
FOLDS = 5
FEWEST = 20  # judged queries
LABELLED = 10_000  # documents that a regression sees beside the relevant ones
REFERENCE = 20_000  # documents that stand for the corpus where a share is measured
DEPTH = 50  # documents of a ranking before any is dropped


@dataclass(frozen=True)
class Criterion:
    """What one score keeps at the share of the result; the intervals are 95 % ones over queries (Clopper and Pearson).

    Attributes:
        answers_kept: Mean share of the relevant documents of a query that is kept: (share, low, high).
        ndcg: Mean nDCG@10 in the index that is left; documents that were dropped count as missed.
        share: Share of the corpus that has to be kept for the asked recall; None if `admit` was given ``keep``.
    """

    answers_kept: tuple[float, float, float]
    ndcg: float
    share: float | None


@dataclass(frozen=True, repr=False)
class Admission:
    """Which documents to index, and what was measured on queries that had no part in the choice.

    Attributes:
        ids: Ids of all documents, in the order of the corpus.
        kept: Whether to index each of them, (m,).
        scorer: The score that decides: ``"norm"``, ``"surface"`` or ``"embedding"``.
        scores: This score for every document, (m,).
        threshold: The smallest score that is kept.
        score: The scorer itself, for documents that come later: ``score(texts, embeddings) >= threshold``.
        answers_kept: Mean share of the relevant documents of a query that is kept, with its 95 % interval:
            (share, low, high). Other queries chose scorer and threshold. None without judgments.
        ndcg: Mean nDCG@10 before, on the same queries; nan without judgments.
        criteria: A `Criterion` for each score, all at the same share.
        queries: Number of judged queries.
    """

    ids: list[str]
    kept: NDArray[np.bool_]
    scorer: str
    scores: Array
    threshold: float
    score: Score
    answers_kept: tuple[float, float, float] | None
    ndcg: float
    criteria: dict[str, Criterion]
    queries: int

    @property
    def share(self) -> float:
        """Share of the documents that is kept."""
        return float(self.kept.mean())

    @property
    def kept_ids(self) -> list[str]:
        """Ids of the documents to index, in the order of the corpus."""
        return [self.ids[i] for i in np.flatnonzero(self.kept)]

    @property
    def warning(self) -> str:
        """A sentence where surface features keep more answers than the norm, else empty."""
        if {"norm", "surface"} - set(self.criteria):
            return ""
        norm, surface = (100 * self.criteria[name].answers_kept[0] for name in ("norm", "surface"))
        if surface <= norm:
            return ""
        return (
            f"The norm keeps {norm:.1f} % of the answers, the surface features of the text {surface:.1f} %: the norm "
            "of this model is not the best reason to drop these documents. Use scorer='surface' or 'best', or show "
            "the model such documents as negatives while it is trained."
        )

    @property
    def figures(self) -> dict[str, Any]:
        """What the command prints as JSON: all but the documents."""
        names = ("scorer", "threshold", "share", "answers_kept", "ndcg", "criteria", "queries")
        figures = {name: getattr(self, name) for name in names}
        return figures | {"documents": len(self.ids), "kept": int(self.kept.sum()), "warning": self.warning}

    def save(self, folder: str | Path) -> None:
        """Writes ``kept.txt``, an id in each line, and ``admission.json``, the figures, into a folder."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        with whole_file(Path(folder) / "kept.txt") as file:
            file.writelines(f"{key}\n".encode() for key in self.kept_ids)
        with whole_file(Path(folder) / "admission.json") as file:
            file.write(json.dumps(to_plain(self.figures), indent=1).encode())

    def __str__(self) -> str:
        lines = [
            f"Index {self.kept.sum():,} of {len(self.ids):,} documents ({self.share:.1%}):",
            f"those whose {self.scorer} score is at least {self.threshold:.4g}.",
        ]
        if self.answers_kept is None:
            return "\n".join([*lines, "The loss is unknown: give queries= and relevant= to measure it."])
        lines += [
            "Answers kept {:.1%} [{:.1%}, {:.1%}]".format(*self.answers_kept) + f" of {self.queries:,} queries,",
            "each measured by what other queries have chosen.",
            f"nDCG@10 before: {self.ndcg:.4f}. Each score at this share:",
            "score      answers kept             nDCG@10",
        ]
        for name, row in self.criteria.items():
            interval = "{:6.1%} [{:.1%}, {:.1%}]".format(*row.answers_kept)
            needed = "" if row.share is None else f"   keeps {row.share:.1%} for the asked recall"
            lines.append(f"{name:10s} {interval:24s} {row.ndcg:.4f}{needed}")
        return "\n".join(lines)


def admit(
    model: SentenceTransformer,
    corpus: Mapping[str, str] | Dataset | str | Path,
    *,
    keep: float | None = None,
    recall: float | None = None,
    queries: Mapping[str, str] | None = None,
    relevant: Judgments | None = None,
    scorer: str = "best",
    similarity: Similarity | str | None = None,
    embeddings: str | Path | None = None,
    batch_size: int = 32,
    seed: int = 0,
    show_progress_bar: bool | None = None,
) -> Admission:
    """Chooses which documents to index, and measures on validation queries what the others cost.

    A document's score is one of

    - ``"norm"``: the norm of its embedding;
    - ``"surface"``: a logistic regression on length, punctuation, digits and capitals of its text;
    - ``"embedding"``: a logistic regression on the direction and the norm of its embedding.

    The regressions learn to tell documents that are relevant to a validation query from a sample of the others. All
    figures are cross-fitted over five parts of the queries: a part is measured with regressions, a scorer and a
    threshold that the other four parts have chosen. Its own relevant documents are there like any others, as those of
    new queries will be.

    The corpus is read and embedded in shards. In memory are the ids, 16 bytes for each document, and embeddings of
    about 30,000 documents and of the best 50 of every query.

    Args:
        model: Any SentenceTransformer. The norm means something for models that were trained with it.
        corpus: What `encode_corpus` takes: a mapping of ids to texts, a Dataset, a file or a folder.
        keep: Share of the documents to keep, between 0 and 1.
        recall: Share of the answers to keep, between 0 and 1, instead of ``keep``: drops as many documents as it can.
        queries: Validation queries, id -> text. Those without a relevant document do not count.
        relevant: Query id -> ids of its relevant documents. Without queries and judgments the norm decides, and the
            loss is unknown.
        scorer: ``"norm"``, ``"surface"``, ``"embedding"``, or ``"best"``: for ``recall`` the one that keeps fewest
            documents; for ``keep`` the one with the best nDCG@10 among those that keep most answers but for chance (the
            95 % interval of the difference to the one that keeps most reaches 0).
        similarity: The similarity that ranks the vectors of ``encode_document``; by default the model's own.
        embeddings: Folder of `encode_corpus` for the same model and corpus, which is completed if it is not; by
            default a temporary one.
        batch_size: Number of texts that are encoded at a time.
        seed: Seed for the parts of the queries and for the samples of documents.
        show_progress_bar: Whether to show a progress bar; None follows the log level.

    Raises:
        ValueError: Before anything is encoded, if not exactly one of keep and recall is given and between 0 and 1,
            there are fewer than 20 judged queries, all documents are relevant, a relevant document is not in the
            corpus, or the norm has to decide and the model normalises.
        DataError, OSError: As `encode_corpus`.

    Example:
        ::

            found = stm.admit(model, data.corpus, keep=0.5, queries=data.queries, relevant=data.relevant)
            print(found)
            index_these = found.kept_ids

    Source: Chang et al., Neural Passage Quality Estimation for Static Pruning, arXiv 2407.12170, drop 25 % of the
    passages of MS MARCO without a significant loss, by a supervised estimate from the text.
    """
    one_of("scorer", scorer, ("best", *SCORERS))
    for name, value in (("keep", keep), ("recall", recall)):
        if value is not None and not 0 < value < 1:
            raise ValueError(f"{name} must be a share strictly between 0 and 1; got {value}.")
    if (keep is None) == (recall is None):
        raise ValueError("Give either keep=, the share of the documents, or recall=, the share of the answers.")
    judged = queries is not None and relevant is not None
    if not judged and (recall is not None or scorer not in ("best", "norm") or queries or relevant):
        raise ValueError("recall=, the regressions and every loss need both queries= and relevant=.")
    names = [name for name in SCORERS if name != "norm" or not normalizes_output(model)]
    if "norm" not in names and (scorer == "norm" or not judged):
        raise ValueError(
            "The model normalises, so that all norms are 1: use stm.strip_normalize(model) first if it was trained "
            "with the norm, or another scorer=."
        )
    ranking = Similarity.named(model.similarity_fn_name if similarity is None else similarity)
    documents = documents_of(corpus)
    ids = [key for key, _ in documents()]
    answers = _answers(queries, relevant, ids) if queries is not None and relevant is not None else {}

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary if embeddings is None else embeddings)
        begun = read_record(folder) or {}
        settings = {name: begun[name] for name in ("prompt", "dtype", "shard_size") if name in begun}
        encode_corpus(model, corpus, folder, batch_size=batch_size, show_progress_bar=show_progress_bar, **settings)

        def walk() -> Iterator[tuple[int, list[str], Vectors]]:
            texts, start = documents(), 0
            for stored in embedding_batches(folder):
                vectors = stored.astype(np.float32)
                yield start, [text for _, text in islice(texts, len(vectors))], vectors
                start += len(vectors)

        sizes = np.concatenate([norms(vectors) for _, _, vectors in walk()])
        if not judged:
            kept, threshold = _kept(sizes, 1 - float(keep or 0))
            return Admission(ids, kept, "norm", sizes, threshold, _norm_score, None, np.nan, {}, 0)

        assert queries is not None
        asked = model.encode_query([queries[query] for query in answers], batch_size=batch_size)
        best = _search(torch.as_tensor(asked), (vectors for _, _, vectors in walk()), ranking)
        study = _Study(walk, len(ids), list(answers.values()), best, names, seed)
        allowed = names if scorer == "best" else [scorer]
        scorer, drop = study.choose(allowed, keep, recall)
        score = _norm_score if scorer == "norm" else study.fitted(scorer)
        scores = sizes if scorer == "norm" else np.concatenate([score(texts, x) for _, texts, x in walk()])

    kept, threshold = _kept(scores, drop)
    criteria = {name: study.criterion(name, drop, recall) for name in names}
    measured = _interval(study.outcomes(allowed, keep, recall))
    found = Admission(ids, kept, scorer, scores, threshold, score, measured, study.ndcg(None), criteria, len(answers))
    if found.warning:
        logger.warning(found.warning)
    return found


class _Study:
    """Where the answers stand among all documents by each score, under regressions that did not see their queries."""

    def __init__(
        self,
        walk: Callable[[], Iterator[tuple[int, list[str], Vectors]]],
        size: int,
        answers: Sequence[Mapping[int, int]],
        best: NDArray[np.int64],
        names: Sequence[str],
        seed: int,
    ) -> None:
        rng = np.random.default_rng(seed)
        labelled, reference = (rng.choice(size, min(size, number), replace=False) for number in (LABELLED, REFERENCE))
        flat = np.concatenate([list(row) for row in answers])
        at = np.unique(np.concatenate([flat, labelled, reference, best.ravel()]))  # documents that are gathered, (g,)
        texts, vectors = [], []
        for start, some, x in walk():
            inside = at[(at >= start) & (at < start + len(x))] - start
            texts += [some[i] for i in inside]
            vectors.append(x[inside])
        self.rows = {name: _features(name, texts, np.concatenate(vectors)) for name in names if name != "norm"}
        self.labelled, self.reference = np.searchsorted(at, labelled), len(reference)
        self.answers, self.query = (
            np.searchsorted(at, flat),
            np.repeat(np.arange(len(answers)), list(map(len, answers))),
        )
        self.best, self.number = np.searchsorted(at, best), np.bincount(self.query)
        relevant = self.query * len(at) + self.answers
        self.grades = [list(row.values()) for row in answers]
        grade = dict(zip(relevant.tolist(), np.concatenate(self.grades).tolist(), strict=True))
        ranked = np.arange(len(answers))[:, None] * len(at) + self.best
        self.gains = np.array([[grade.get(key, 0) for key in row] for row in ranked.tolist()])  # (n, depth)
        self.fold = rng.permutation(len(answers)) % FOLDS
        # The share of the corpus with at most the score of each document: (FOLDS, g). It is kept if this is above drop.
        self.rank: dict[str, Array] = {}
        for name in names:
            self.rank[name] = np.empty((FOLDS, len(at)))
            for fold in range(FOLDS):
                if name == "norm":
                    values = norms(np.concatenate(vectors))
                else:
                    learned = self.learn(name, self.fold[self.query] != fold)
                    values = learned.decision_function(self.rows[name])
                corpus = np.sort(values[np.searchsorted(at, reference)])
                self.rank[name][fold] = np.searchsorted(corpus, values, side="right") / len(corpus)

    def learn(self, name: str, pairs: NDArray[np.bool_]) -> Any:
        """A regression that tells the relevant documents of these pairs from the labelled sample."""
        positive = np.unique(self.answers[pairs])
        seen = np.union1d(positive, self.labelled)
        # Hundreds of dimensions need a stronger penalty than the surface features.
        regression = LogisticRegression(C=1.0 if name == "surface" else 0.01, max_iter=1000)
        return make_pipeline(StandardScaler(), regression).fit(self.rows[name][seen], np.isin(seen, positive))

    def fitted(self, name: str) -> Score:
        regression = self.learn(name, np.ones(len(self.query), dtype=bool))

        def score(texts: Sequence[str], embeddings: NDArray[Any]) -> Array:
            found: Array = regression.decision_function(_features(name, texts, embeddings))
            return found

        return score

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
        return max(0.0, float(at[order][first]) - 0.5 / self.reference)

    def choose(
        self, names: Sequence[str], keep: float | None, recall: float | None, queries: NDArray[np.bool_] | None = None
    ) -> tuple[str, float]:
        """The scorer and the share to drop that are best on some queries, by default on all."""
        on = np.ones(len(self.number), dtype=bool) if queries is None else queries
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
        """Share of the relevant documents of each query that is kept by what the other folds choose, (n,)."""
        found = np.empty(len(self.number))
        for fold in range(FOLDS):
            name, drop = self.choose(names, keep, recall, self.fold != fold)
            found[self.fold == fold] = self.kept(name, drop)[self.fold == fold]
        return found

    def ndcg(self, name: str | None, drop: float = 0.0, queries: Any = slice(None)) -> float:
        """Mean nDCG@10 in what is left; with None, in all of the corpus."""
        gains = self.gains
        if name is not None:
            stay = self.rank[name][self.fold[:, None], self.best] > drop
            order = np.argsort(~stay, axis=1, kind="stable")  # documents that are dropped go last
            gains = np.take_along_axis(gains * stay, order, axis=1)
        return float(ndcg(gains, self.grades)[queries].mean())

    def criterion(self, name: str, drop: float, recall: float | None) -> Criterion:
        everyone = np.ones(len(self.number), dtype=bool)
        needed = None if recall is None else 1 - self.drop(name, recall, everyone)
        return Criterion(_interval(self.kept(name, drop)), self.ndcg(name, drop), needed)


def _answers(queries: Mapping[str, str], relevant: Judgments, ids: Sequence[str]) -> dict[str, dict[int, int]]:
    """Positions of the relevant documents of every judged query, with their grades."""
    position = {key: i for i, key in enumerate(ids)}
    judgments = judged_data(queries, position, relevant).relevant  # type: ignore[arg-type]
    found = {
        query: dict(sorted((position[key], grade) for key, grade in judgments[query].items()))
        for query in queries
        if judgments.get(query)
    }
    if len(found) < FEWEST:
        raise ValueError(
            f"{len(found)} of {len(queries)} queries have a relevant document, but at least {FEWEST} are needed to "
            "measure a loss; several hundred give a useful interval."
        )
    if len(set().union(*found.values())) == len(ids):
        raise ValueError("Every document of the corpus is relevant to a query, so that there is nothing to drop.")
    return found


def _search(queries: torch.Tensor, shards: Iterator[Vectors], similarity: Similarity) -> NDArray[np.int64]:
    """Positions of the best `DEPTH` documents of every query, best first, over all shards: -> (n, <= DEPTH)."""
    scores = torch.empty(len(queries), 0)
    best, start = torch.empty(len(queries), 0, dtype=torch.long), 0
    for vectors in shards:
        shard = EncodedTask(queries.cpu(), torch.from_numpy(vectors))
        found = shard.top(similarity, DEPTH)
        scores = torch.cat([scores, shard.scores(similarity, found)], dim=1)
        best = torch.cat([best, found + start], dim=1)
        order = rank(scores, DEPTH)
        scores, best, start = scores.gather(1, order), best.gather(1, order), start + len(vectors)
    return best.numpy()


def _kept(scores: Array, drop: float) -> tuple[NDArray[np.bool_], float]:
    """Whether a document is kept, (m,), and the threshold, if at most a share of the documents is dropped."""
    place = min(int(drop * len(scores) + 1e-9), len(scores) - 1)
    threshold = float(np.partition(scores, place)[place])
    return scores >= threshold, threshold


def _interval(shares: Array) -> tuple[float, float, float]:
    """Mean of shares of queries, with the interval of Clopper and Pearson, which is exact where all are 0 or 1."""
    n, total = len(shares), shares.sum()
    low = betaincinv(total, n - total + 1, 0.025) if total > 0 else 0.0
    high = betaincinv(total + 1, n - total, 0.975) if total < n else 1.0
    return float(total / n), float(low), float(high)


def _norm_score(texts: Sequence[str], embeddings: NDArray[Any]) -> Array:
    return norms(embeddings)


def _features(name: str, texts: Sequence[str], embeddings: NDArray[Any]) -> Array:
    if name == "surface":
        return surface_features(texts)
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
        shares = [
            sum(c.isdigit() for c in text) / characters,
            sum(c.isupper() for c in text) / characters,
            sum(len(w) for w in words) / max(len(words), 1),
        ]
        rows.append([np.log1p(len(words)), *shares, *marks, float(text[:1].isupper()), float(text.endswith("."))])
    return np.array(rows)

"""Measurements of a model and a task: one function per property, each of which returns figures."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from st_magnitude import geometry
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.diagnosis.findings import (
    QUANTILES,
    Array,
    BaselineComparison,
    EffectSize,
    ExponentChoice,
    Geometry,
    Interval,
    Mask,
    NormStatistics,
    TaskSymmetry,
)
from st_magnitude.evaluation.metrics import are_unit
from st_magnitude.similarity import COSINE, Similarity

__all__ = [
    "compare",
    "directions",
    "effect_sizes",
    "exponent_choice",
    "halves",
    "norm_statistics",
    "task_symmetry",
    "ties",
]

Bootstrap = Callable[[Any, Any], Interval]

logger = logging.getLogger(__name__)

SAMPLE = 5000  # documents behind the uniformity and the principal components


def norm_statistics(embeddings: Tensor, words: Array) -> NormStatistics:
    """Statistics of the raw norms of one role: embeddings (n, D), number of words (n,)."""
    values = geometry.norms(embeddings)
    return NormStatistics(
        values=values,
        words=words,
        mean=float(values.mean()),
        cv=geometry.coefficient_of_variation(values),
        quantiles=tuple(float(q) for q in np.quantile(values, QUANTILES)),
        # Norms of 1 differ by rounding only, and a correlation with rounding errors means nothing.
        length_spearman=math.nan if are_unit(values) else geometry.spearman(values, words),
    )


def effect_sizes(task: EncodedTask, is_relevant: Mask, documents: NormStatistics) -> dict[str, EffectSize]:
    """Cohen's d of document norms under ``"corpus"``, which compares by ``is_relevant`` (m,), and ``"hard"``."""
    relevant, others = int(is_relevant.sum()), int((~is_relevant).sum())
    corpus = f"{relevant} documents are relevant to at least one query, {others} to no query"
    rows, flags = _near_queries(task)
    hard = f"{int(flags.sum())} relevant and {int((~flags).sum())} irrelevant documents are near the queries"
    return {
        "corpus": _effect(documents, np.arange(len(is_relevant)), is_relevant, corpus),
        "hard": _effect(documents, rows, flags, hard),
    }


def _near_queries(task: EncodedTask) -> tuple[NDArray[np.int64], Mask]:
    """Every query's relevant documents and its ten best irrelevant ones by cosine: columns, whether relevant."""
    rows: list[int] = []
    flags: list[bool] = []
    deep = task.top(COSINE, k=10 + max(map(len, task.columns)))
    for row, relevant in zip(deep.tolist(), task.columns, strict=True):
        negatives = [c for c in row if c not in relevant][:10]
        rows += [*relevant, *negatives]
        flags += [True] * len(relevant) + [False] * len(negatives)
    return np.array(rows), np.array(flags)


def _effect(documents: NormStatistics, rows: NDArray[np.int64], is_relevant: Mask, why_undefined: str) -> EffectSize:
    if min(is_relevant.sum(), (~is_relevant).sum()) < 2:
        return EffectSize(undefined=why_undefined)
    norms, log_words = documents.values[rows], np.log(np.maximum(documents.words[rows], 1))
    return EffectSize(
        geometry.cohens_d(norms[is_relevant], norms[~is_relevant]),
        geometry.adjusted_cohens_d(norms, log_words, is_relevant),
    )


def halves(task: EncodedTask, seed: int) -> Mask:
    """Which queries choose: about half of them, at random, (n,).

    Queries that share relevant documents stay in one half, unless that leaves less than a quarter for either half.
    """
    n, rng = len(task.columns), np.random.default_rng(seed)
    rows = np.repeat(np.arange(n), [len(c) for c in task.columns])
    columns = n + np.concatenate([list(c) for c in task.columns])
    edges = coo_array((np.ones(len(rows)), (rows, columns)), shape=(n + len(task.documents),) * 2)
    group = connected_components(edges, directed=False)[1][:n]
    chose, sizes = np.zeros(n, dtype=bool), np.bincount(group)
    for g in rng.permutation(np.unique(group)):
        if chose.sum() + sizes[g] <= n / 2:
            chose |= group == g
    if 4 * chose.sum() < n:
        logger.info("Most queries share relevant documents, so the choosing and the measuring half share them too.")
        chose[:] = False
        chose[rng.permutation(n)[: n // 2]] = True
    return chose


def exponent_choice(task: EncodedTask, present: float, seed: int, interval: Bootstrap) -> ExponentChoice:
    """nDCG@10 by document exponent, the best exponents of one half of the queries, and their gains on the other."""
    gammas = np.linspace(0.0, 1.0, 21)
    if np.abs(gammas - present).min() > 1e-9:
        gammas = np.sort(np.append(gammas, present))
    tops = task.tops([Similarity(1.0, float(gamma)) for gamma in gammas])
    per_query = np.stack([task.ndcg(top) for top in tops])
    at, chose = int(np.abs(gammas - present).argmin()), halves(task, seed)
    means = per_query[:, chose].mean(axis=1)

    def best(allowed: Mask) -> int:
        highest = means[allowed].max()
        return int(np.flatnonzero(allowed & (means >= highest - 1e-12))[-1])

    candidate, below_one = best(np.arange(len(gammas)) != at), best(gammas < 1)
    return ExponentChoice(
        exponents=gammas,
        per_query=per_query,
        present=present,
        chose=chose,
        candidate=float(gammas[candidate]),
        gain=interval(per_query[candidate, ~chose], per_query[at, ~chose]),
        magnitude_candidate=float(gammas[below_one]),
        gain_of_magnitude=interval(per_query[below_one, ~chose], per_query[-1, ~chose]),
    )


def compare(
    name: str, baseline: EncodedTask, similarity: Similarity, own: Array, cvs: tuple[float, float], interval: Bootstrap
) -> BaselineComparison:
    """Norms and nDCG@10 of the baseline; ``own`` (n,) and ``cvs`` (queries, documents) are the model's."""
    q, d = (geometry.coefficient_of_variation(geometry.norms(x)) for x in (baseline.queries, baseline.documents))
    q_ratio, d_ratio = (mine / theirs if theirs else math.nan for mine, theirs in zip(cvs, (q, d), strict=True))
    ndcg = baseline.ndcg(baseline.top(similarity))
    return BaselineComparison(name, similarity.name, q, d, q_ratio, d_ratio, ndcg, interval(own, ndcg))


def directions(task: EncodedTask, seed: int) -> Geometry:
    """Geometry of the directions of the documents, and alignment of the relevant pairs."""
    unit = COSINE.document(task.documents)
    m, dim = unit.shape
    sample = np.random.default_rng(seed).permutation(m)[:SAMPLE]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about a small sample, which is_sample_limited reports
        components = geometry.intrinsic_dimension(unit, seed=seed)
    pairs = [(i, c) for i, row in enumerate(task.columns) for c in row]
    return Geometry(
        dim=dim,
        intrinsic_dimension=components,
        is_sample_limited=min(m, SAMPLE) < 4 * dim,
        isoscore=geometry.isoscore(unit) if dim > 1 else math.nan,
        isoscore_ceiling=geometry.isoscore_ceiling(m, dim),
        mean_cosine=geometry.mean_cosine(unit),
        uniformity=geometry.uniformity(unit[sample]),
        alignment=geometry.alignment(task.queries[[i for i, _ in pairs]], unit[[c for _, c in pairs]]),
    )


def ties(task: EncodedTask, similarity: Similarity) -> dict[str, float]:
    """Share of the queries with two equal scores among their 11 best documents, if scores have that precision."""
    scores = task.scores(similarity, task.top(similarity, k=11))
    rounded = {"float32": scores, "float16": scores.half(), "bfloat16": scores.bfloat16()}
    return {name: float((x[:, 1:] == x[:, :-1]).any(dim=1).double().mean()) for name, x in rounded.items()}


def task_symmetry(data: RetrievalData, symmetric: bool | None = None) -> TaskSymmetry:
    """Decides from the texts and the judgments whether queries and documents swap roles.

    Texts are compared by their lower-cased words:

    - shared = the larger of two shares: the queries that are also documents, and the relevant documents that are also
      queries;
    - mutual = the share of the judgments (a, b), in which b is also a query and a is also a document, for which (b, a)
      is judged too;
    - alike = whether the probability that a relevant document has more words than a query lies within 0.35 and 0.65.

    ======================  =====================================  ============
    shared                  and                                    verdict
    ======================  =====================================  ============
    at least half           mutual is at least half                symmetric
    at least half           mutual is at most a tenth              asymmetric
    at least half           mutual is undefined, lengths alike     symmetric
    less than a tenth       lengths not alike                      asymmetric
    ======================  =====================================  ============

    In all other cases the verdict is "unclear": paraphrases of texts that are never queries look like short answers.
    Pass the verdict as ``symmetric`` then.

    Example:
        >>> texts = {"a": "bees make honey", "b": "honey is made by bees"}
        >>> task_symmetry(RetrievalData(texts, texts, {"a": {"b"}, "b": {"a"}})).verdict
        'symmetric'
        >>> answers = {"d": "They collect nectar and thicken it in the hive."}
        >>> task_symmetry(RetrievalData({"q": "who makes honey?"}, answers, {"q": {"d"}})).verdict
        'asymmetric'

    Source: arXiv 2602.09229, section 6.3, has the principle; the definition is ours.
    """
    judged = {query: data.relevant[query] for query in data.query_ids}
    asking = {query: _words(data.queries[query]) for query in judged}
    answering = {document: _words(data.corpus[document]) for document in sorted(set().union(*judged.values()))}
    ask, answer = set(asking.values()), {_words(text) for text in data.corpus.values()}

    in_corpus = float(np.mean([text in answer for text in asking.values()]))
    that_ask = float(np.mean([text in ask for text in answering.values()]))
    pairs = {(asking[q], answering[d]) for q, documents in judged.items() for d in documents}
    both_ways = [(b, a) in pairs for a, b in pairs if a != b and b in ask and a in answer]
    mutual = float(np.mean(both_ways)) if both_ways else math.nan
    longer = geometry.auroc([len(t) for t in answering.values()], [len(t) for t in asking.values()])
    own = float(np.mean([t in answer and (t, t) not in pairs for t in asking.values()]))

    shared, alike = max(in_corpus, that_ask), 0.35 <= longer <= 0.65
    if symmetric is not None:
        verdict, reason = "symmetric" if symmetric else "asymmetric", "as given by the argument symmetric"
    elif shared >= 0.5 and mutual >= 0.5:
        verdict, reason = "symmetric", "the same texts are queries and documents, and judgments hold both ways"
    elif shared >= 0.5 and mutual <= 0.1:
        verdict, reason = "asymmetric", "the same texts are queries and documents, but judgments hold one way only"
    elif shared >= 0.5 and math.isnan(mutual) and alike:
        verdict, reason = "symmetric", "the same texts are queries and documents, and both have similar lengths"
    elif shared < 0.1 and not alike:
        verdict, reason = "asymmetric", "queries and documents share no texts and differ in length"
    else:
        verdict, reason = "unclear", "texts and judgments do not decide it; pass symmetric=True or symmetric=False"
    return TaskSymmetry(verdict, reason, in_corpus, that_ask, mutual, longer, own)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.lower().split())

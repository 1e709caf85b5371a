"""diagnose: will length, compression or isotropy help this model on these queries? Figures first, then advice.

A recommendation is a question to the figures: what would a change gain in nDCG@10, on queries that did not choose it?
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.stats import skew
from sentence_transformers import SentenceTransformer
from torch import Tensor

from st_magnitude import geometry
from st_magnitude.diagnosis.findings import (
    DO,
    NO_BENEFIT,
    NOT_ENOUGH,
    QUANTILES,
    Array,
    BaselineComparison,
    Diagnosis,
    EffectSize,
    Geometry,
    Hubness,
    Interval,
    Mask,
    NormStatistics,
    Provenance,
    ReadOut,
    Recommendation,
    TaskSymmetry,
    nearest,
)
from st_magnitude.evaluation.calibration import ExponentCurve, sweep_exponents
from st_magnitude.evaluation.compression import CompressionCell, bytes_per_document, search_compressed
from st_magnitude.evaluation.magnitude import implied_similarity
from st_magnitude.evaluation.metrics import TILE, are_unit, check_judgments, ndcg, rank
from st_magnitude.similarity import COSINE, Similarity, safe_norm
from st_magnitude.surgery.raw import encode_raw, normalizes_output

__all__ = ["diagnose", "task_symmetry"]

Bootstrap = Callable[[Any, Any], Interval]

logger = logging.getLogger(__name__)

MIN_QUERIES = 25  # behind a verdict: percentile intervals of fewer are too short
UNIFORMITY_ROWS = 5000
DROPPED_SHARES = (0.25, 0.5, 0.75)


# ---------------------------------------------------------------------------------------------------------------------
# The job
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Encoded:
    """Raw embeddings and judgments, documents in the order of their ids (rank() gives a tie to the lower index)."""

    queries: Tensor  # (n, D)
    documents: Tensor  # (m, D)
    columns: list[list[int]]  # of the relevant documents of every query

    def ndcg(self, top: Tensor) -> Array:
        """nDCG@10 of every query from the columns of its best documents: (n, <= 10) -> (n,)."""
        hits = [
            [c in relevant for c in row] for row, relevant in zip(top.tolist(), map(set, self.columns), strict=True)
        ]
        return ndcg(hits, [len(c) for c in self.columns], k=10)

    @property
    def degrees(self) -> NDArray[np.int64]:
        """To how many queries a document is relevant: (m,)."""
        return np.bincount([c for row in self.columns for c in row], minlength=len(self.documents))


def diagnose(
    model: SentenceTransformer,
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    relevant_docs: Mapping[str, Collection[str]],
    *,
    similarity: Similarity | str | None = None,
    baseline: SentenceTransformer | None = None,
    symmetric: bool | None = None,
    min_gain: float = 0.02,
    tolerance: float = 0.05,
    batch_size: int = 32,
    num_samples: int = 10_000,
    seed: int = 0,
    title: str = "",
    show_progress_bar: bool | None = None,
) -> Diagnosis:
    """Encodes once, measures what length, storage and isotropy do on these queries, and says what that carries.

    A change is recommended ("do") only if the 95 % bootstrap interval of its gain in nDCG@10 lies above 0 and reaches
    ``min_gain``, on at least 25 queries that had no part in choosing the change. Exponents and shares to
    drop are chosen on one half of the queries and measured on the other; the halves share no relevant document, where
    the judgments allow it. "No benefit expected" means that the interval excludes a gain of ``min_gain``, and "not
    enough data" that it does not decide. What stores less is held against ``1 - tolerance`` of the full nDCG@10 instead
    of a gain. The verdicts are one interval each: of forty useless changes one would pass.

    Args:
        model: Any SentenceTransformer. A Normalize or ExponentNorm at the end is looked behind.
        queries: Query id -> text. Queries without a relevant document are left out.
        corpus: Document id -> text.
        relevant_docs: Query id -> ids of its relevant documents.
        similarity: What the model is read out with today, a Similarity or its name. By default what the model says,
            cosine if it normalises.
        baseline: Another model, measured beside it as it says: gives the ratio of CVs (delta-CV) and a paired
            difference.
        symmetric: Whether queries and documents are interchangeable, if you know; None looks (`task_symmetry`).
        min_gain: The smallest gain in nDCG@10 that is worth a change. With some hundreds of queries, lower ones cannot
            be told from none.
        tolerance: The share of nDCG@10 that smaller storage may cost.
        batch_size: Texts encoded at a time.
        num_samples: Bootstrap resamples.
        seed: Of the halves, of samples and of the bootstrap.
        title: What reports call it, such as "my-retriever on FiQA dev".
        show_progress_bar: Whether to show one; None follows the log level.

    Raises:
        TypeError: If model or baseline is not a SentenceTransformer.
        ValueError: Before anything is encoded, if the data are empty or inconsistent (see `check_judgments`), fewer
            than two queries have a relevant document or there are fewer than two documents, an argument is out of its
            range, or the similarity of a model is a distance; after, if an embedding is not finite.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bee", "wax"])], similarity_fn_name="dot", device="cpu")
        >>> queries = {f"q{i}": "bee" for i in range(80)}
        >>> corpus = {f"d{i}": "bee " * (2 if i < 80 else 1) for i in range(160)}
        >>> found = diagnose(model, queries, corpus, {f"q{i}": {f"d{i}"} for i in range(80)})
        >>> found.effects["corpus"].d, found["read-out"].verdict
        (inf, 'no benefit expected')

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, section 6.3 (the task symmetry principle), Eq. 8, App. M.
    """
    _check_models(model, baseline)
    relevant = check_judgments(queries, corpus, relevant_docs)
    query_ids, document_ids = [query for query in queries if relevant.get(query)], sorted(corpus)
    _check_arguments(len(query_ids), len(document_ids), min_gain, tolerance, batch_size, num_samples)
    now = _read_out_today(model, similarity)
    baseline_now = None if baseline is None else _read_out_today(baseline, None)

    texts = [queries[query] for query in query_ids], [corpus[document] for document in document_ids]
    position = {document: i for i, document in enumerate(document_ids)}
    columns = [[position[document] for document in relevant[query]] for query in query_ids]
    data = _encode(model, texts, columns, (query_ids, document_ids), batch_size, show_progress_bar)
    words = [np.array([len(text.split()) for text in side], dtype=float) for side in texts]

    def interval(a: Any, b: Any) -> Interval:
        return geometry.paired_bootstrap(a, b, num_samples=num_samples, seed=seed)

    read_out = _read_out(data, query_ids, now.exponents[1], _halves(columns, len(document_ids), seed), interval)
    asked, answers = (_norm_statistics(x, w) for x, w in zip((data.queries, data.documents), words, strict=True))
    compared = None
    if baseline is not None and baseline_now is not None:
        other = _encode(baseline, texts, columns, (query_ids, document_ids), batch_size, show_progress_bar)
        compared = _compare(other, baseline_now, read_out.ndcg(read_out.present), interval)
        asked, answers = (
            replace(s, cv_ratio=s.cv / cv if cv else math.nan)
            for s, cv in ((asked, compared.query_cv), (answers, compared.document_cv))
        )

    symmetry = task_symmetry(queries, corpus, relevant_docs, symmetric)
    has_length, normalizes = not are_unit(answers.values), normalizes_output(model)
    tops = {"cosine": _top(data.queries, data.documents, 1.0), "dot": _top(data.queries, data.documents, 0.0)}
    cells, stored = _storage(data, now, read_out)
    shape = _geometry(data, seed)
    judge = _Judge(data, now, read_out, interval, min_gain, tolerance, has_length, normalizes)
    recommendations = [
        judge.exponent(symmetry),
        judge.training(symmetry, asked, compared),
        judge.pruning(answers),
        *judge.storage(stored),
        judge.isotropy(shape),
    ]
    if compared is not None:
        recommendations.append(judge.versus(compared))
    return Diagnosis(
        similarity=now.name,
        normalizes=normalizes,
        has_length=has_length,
        query_ids=query_ids,
        document_ids=document_ids,
        is_relevant=data.degrees > 0,
        queries=asked,
        documents=answers,
        effects=_effects(data, answers),
        read_out=read_out,
        geometry=shape,
        hubness={name: _hubness(top, len(document_ids)) for name, top in tops.items()},
        cells=cells,
        symmetry=symmetry,
        baseline=compared,
        recommendations=recommendations,
        provenance=Provenance(
            title=title,
            model=_name(model),
            baseline="" if baseline is None else _name(baseline),
            seed=seed,
            num_samples=num_samples,
            min_gain=min_gain,
            tolerance=tolerance,
            versions=_versions(),
        ),
    )


def _name(model: SentenceTransformer) -> str:
    """What the model is called, as far as it knows: a hub id, the last two names of a path, or its modules."""
    known = model.model_card_data.model_id or model.model_card_data.base_model
    for module in model.modules():
        known = known or getattr(module, "name_or_path", None)  # of a model of transformers
    if not known:
        return " + ".join(type(module).__name__ for module in model)
    path = Path(known)
    return "/".join(path.parts[-2:]) if path.is_absolute() else str(known)


def _versions() -> dict[str, str]:
    from st_magnitude import __version__

    others = ("sentence-transformers", "transformers", "torch", "numpy")
    return {"st-magnitude": __version__} | {name: version(name) for name in others}


def _check_models(model: Any, baseline: Any) -> None:
    for name, value in {"model": model, "baseline": baseline}.items():
        if not isinstance(value, SentenceTransformer) and not (name == "baseline" and value is None):
            raise TypeError(
                f"{name} is a SentenceTransformer, got {type(value).__name__} {value!r}: load a folder or hub id with "
                "st_magnitude.load(path)."
            )


def _check_arguments(
    num_queries: int, num_documents: int, min_gain: float, tolerance: float, batch_size: int, num_samples: int
) -> None:
    if num_queries < 2 or num_documents < 2:
        raise ValueError(
            f"A diagnosis compares: it needs at least two queries with a relevant document and two documents, got "
            f"{num_queries} and {num_documents}. Verdicts begin at {2 * MIN_QUERIES} queries; use some hundreds."
        )
    if not 0 <= min_gain < 1:
        raise ValueError(f"min_gain is a difference of nDCG@10 in [0, 1), got {min_gain}; 0.02 is the default.")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance is a share of nDCG@10 strictly between 0 and 1, got {tolerance}; try 0.05.")
    for name, value, usual in (("batch_size", batch_size, 32), ("num_samples", num_samples, 10_000)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is a whole number of at least 1, got {value!r}; the default is {usual}.")


def _read_out_today(model: SentenceTransformer, similarity: Similarity | str | None) -> Similarity:
    if similarity is None:
        similarity = COSINE if normalizes_output(model) else implied_similarity(model)
    return Similarity(*Similarity.named(similarity).exponents)  # plain numbers


def _encode(
    model: SentenceTransformer,
    texts: tuple[list[str], list[str]],
    columns: list[list[int]],
    ids: tuple[list[str], list[str]],
    batch_size: int,
    show_progress_bar: bool | None,
) -> _Encoded:
    sides = []
    for role, side, names in zip(("query", "document"), texts, ids, strict=True):
        embeddings = encode_raw(model, side, role, batch_size, show_progress_bar).float().cpu()
        broken = (~embeddings.isfinite().all(dim=1)).nonzero()[:, 0].tolist()
        if broken:
            raise ValueError(
                f"{len(broken)} of {len(embeddings)} {role} embeddings are not finite, such as that of "
                f"{names[broken[0]]!r}: the model has diverged, or overflows in half precision; load it in float32."
            )
        sides.append(embeddings)
    return _Encoded(sides[0], sides[1], columns)


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def task_symmetry(
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    relevant_docs: Mapping[str, Collection[str]],
    symmetric: bool | None = None,
) -> TaskSymmetry:
    """Do queries and documents swap roles? Told from texts and judgments alone.

    With texts compared by their lower-cased words,

    - shared = the larger of the share of queries that are documents too, and of relevant documents that are queries;
    - mutual = of the judgments (a, b) in which b is a query and a a document too, the share for which (b, a) is judged;
    - alike = the probability that a relevant document has more words than a query lies within 0.35 and 0.65.

    ======================  ==================================  ============
    shared                  and                                 verdict
    ======================  ==================================  ============
    at least half           mutual at least half                symmetric
    at least half           mutual at most a tenth              asymmetric
    at least half           nothing to be mutual, alike         symmetric
    less than a tenth       not alike                           asymmetric
    ======================  ==================================  ============

    and unclear otherwise: paraphrases of texts that are no queries look like short answers. Then say which.

    Args:
        queries: As in `diagnose`.
        corpus: Likewise.
        relevant_docs: Likewise.
        symmetric: The verdict, if it is known.

    Example:
        >>> texts = {"a": "bees make honey", "b": "honey is made by bees"}
        >>> task_symmetry(texts, texts, {"a": {"b"}, "b": {"a"}}).verdict
        'symmetric'
        >>> answers = {"d": "They collect nectar and thicken it in the hive."}
        >>> task_symmetry({"q": "who makes honey?"}, answers, {"q": {"d"}}).verdict
        'asymmetric'

    Source: the principle is that of arXiv 2602.09229, section 6.3; the definition is ours.
    """
    relevant = check_judgments(queries, corpus, relevant_docs)
    judged = {query: documents for query in queries if (documents := relevant.get(query))}
    asking = {query: _words(queries[query]) for query in judged}
    answering = {document: _words(corpus[document]) for document in sorted(set().union(*judged.values()))}
    ask, answer = set(asking.values()), {_words(text) for text in corpus.values()}

    in_corpus = float(np.mean([text in answer for text in asking.values()]))
    that_ask = float(np.mean([text in ask for text in answering.values()]))
    pairs = {(asking[q], answering[d]) for q, documents in judged.items() for d in documents}
    both_ways = [(b, a) in pairs for a, b in pairs if a != b and b in ask and a in answer]
    mutual = float(np.mean(both_ways)) if both_ways else math.nan
    longer = geometry.auroc([len(t) for t in answering.values()], [len(t) for t in asking.values()])
    own = float(np.mean([t in answer and (t, t) not in pairs for t in asking.values()]))

    shared, alike = max(in_corpus, that_ask), 0.35 <= longer <= 0.65
    if symmetric is not None:
        verdict, reason = "symmetric" if symmetric else "asymmetric", "as you said"
    elif shared >= 0.5 and mutual >= 0.5:
        verdict, reason = "symmetric", "the same texts are queries and documents, and judgments hold both ways"
    elif shared >= 0.5 and mutual <= 0.1:
        verdict, reason = "asymmetric", "the same texts are queries and documents, but judgments hold one way only"
    elif shared >= 0.5 and math.isnan(mutual) and alike:
        verdict, reason = "symmetric", "the same texts are queries and documents, and both are of one length"
    elif shared < 0.1 and not alike:
        verdict, reason = "asymmetric", "no text plays both roles, and answers differ from queries in length"
    else:
        verdict, reason = "unclear", "texts and judgments do not decide it: pass symmetric=True or False"
    return TaskSymmetry(verdict, reason, in_corpus, that_ask, mutual, longer, own)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.lower().split())


def _halves(columns: list[list[int]], num_documents: int, seed: int) -> Mask:
    """Which queries choose: about half, at random, and so that no relevant document is shared by the halves: (n,).

    Queries that share documents go together. Where that leaves less than a quarter for either half, they do not.
    """
    n, rng = len(columns), np.random.default_rng(seed)
    rows = np.repeat(np.arange(n), [len(c) for c in columns])
    edges = coo_array(
        (np.ones(len(rows)), (rows, n + np.concatenate([np.asarray(c) for c in columns]))),
        shape=(n + num_documents,) * 2,
    )
    group = connected_components(edges, directed=False)[1][:n]
    chose, order = np.zeros(n, dtype=bool), rng.permutation(np.unique(group))
    sizes = np.bincount(group)
    for g in order:
        if chose.sum() + sizes[g] <= n / 2:
            chose |= group == g
    if 4 * chose.sum() < n:
        logger.info("Most queries share relevant documents: the halves that choose and measure share them too.")
        chose[:] = False
        chose[rng.permutation(n)[: n // 2]] = True
    return chose


def _top(queries: Tensor, documents: Tensor, gamma: float, k: int = 10) -> Tensor:
    """Columns of the k best documents by q · d / |d|^gamma, best first: (n, D), (m, D) -> (n, <= k)."""
    powers = safe_norm(documents).T ** -gamma
    rows = max(1, TILE // len(documents))
    return torch.cat([rank(tile @ documents.T * powers, k) for tile in queries.split(rows)])


def _read_out(data: _Encoded, query_ids: list[str], present: float, chose: Mask, interval: Bootstrap) -> ReadOut:
    gammas = np.linspace(0.0, 1.0, 21)
    if np.abs(gammas - present).min() > 1e-9:
        gammas = np.sort(np.append(gammas, present))
    hits = sweep_exponents(data.queries, data.documents, data.columns, gammas)
    per_query = np.stack([ndcg(h, [len(c) for c in data.columns]) for h in hits])
    at = nearest(gammas, present)

    def best(means: Array, allowed: Mask) -> int:
        means = np.where(allowed, means, -np.inf)
        return int(np.flatnonzero(means >= means.max() - 1e-12)[-1])

    means, others = per_query[:, chose].mean(axis=1), np.arange(len(gammas))
    candidate, below_one = best(means, others != at), best(means, gammas < 1)
    overall = best(per_query.mean(axis=1), np.full(len(gammas), True))
    curve = ExponentCurve(
        gammas,
        per_query,
        query_ids,
        float(gammas[overall]),
        interval(per_query[overall], per_query[-1]),
        interval(per_query[overall], per_query[0]),
        0.95,
    )
    return ReadOut(
        curve,
        present,
        chose,
        float(gammas[candidate]),
        interval(per_query[candidate, ~chose], per_query[at, ~chose]),
        float(gammas[below_one]),
        interval(per_query[below_one, ~chose], per_query[-1, ~chose]),
    )


def _norm_statistics(embeddings: Tensor, words: Array) -> NormStatistics:
    values = geometry.norms(embeddings)
    is_unit = are_unit(values)  # of which the rest is rounding
    return NormStatistics(
        values=values,
        words=words,
        mean=float(values.mean()),
        cv=geometry.coefficient_of_variation(values),
        quantiles=tuple(float(q) for q in np.quantile(values, QUANTILES)),
        length_spearman=math.nan if is_unit else geometry.spearman(values, words),
    )


def _effects(data: _Encoded, documents: NormStatistics) -> dict[str, EffectSize]:
    """Cohen's d of document norms in three variants."""
    lengths, log_words, degrees = documents.values, np.log(np.maximum(documents.words, 1)), data.degrees
    effects: dict[str, EffectSize] = {}

    def effect(rows: Any, is_relevant: Mask, what: str) -> EffectSize:
        if min(is_relevant.sum(), (~is_relevant).sum()) < 2:
            return EffectSize(undefined=what.format(int(is_relevant.sum()), int((~is_relevant).sum())))
        return EffectSize(
            geometry.cohens_d(lengths[rows][is_relevant], lengths[rows][~is_relevant]),
            geometry.adjusted_cohens_d(lengths[rows], log_words[rows], is_relevant),
        )

    everything = np.arange(len(lengths))
    effects["corpus"] = effect(everything, degrees > 0, "{} documents are relevant to some query, {} to none")

    # Each query's ten best irrelevant documents by cosine, and its relevant ones.
    rows: list[int] = []
    flags: list[bool] = []
    most = max(len(c) for c in data.columns)
    deep = _top(data.queries, data.documents, 1.0, k=10 + most)
    for row, relevant in zip(deep.tolist(), map(set, data.columns), strict=True):
        negatives = [c for c in row if c not in relevant][:10]
        rows += [*relevant, *negatives]
        flags += [True] * len(relevant) + [False] * len(negatives)
    effects["hard"] = effect(np.array(rows), np.array(flags), "{} relevant and {} irrelevant documents near queries")

    if np.ptp(degrees) == 0:
        reason = f"every document is relevant to {degrees[0]} of the queries, which makes it 0 by construction"
        effects["pairs"] = EffectSize(undefined=reason)
    else:
        x = log_words - log_words.mean()
        residual = lengths - (x @ lengths / (x @ x) if x.any() else 0.0) * x  # every document is in n pairs
        counts = degrees, len(data.queries) - degrees
        if counts[1].sum() < 2:
            effects["pairs"] = EffectSize(undefined="all but one of the pairs are relevant")
        else:
            effects["pairs"] = EffectSize(_weighted_d(lengths, *counts), _weighted_d(residual, *counts))
    return effects


def _weighted_d(values: Array, relevant: NDArray[np.int64], irrelevant: NDArray[np.int64]) -> float:
    """cohens_d of values that are repeated so many times: (m,), (m,), (m,) -> d.

    Example:
        >>> x = np.array([1.0, 2.0, 4.0])
        >>> _weighted_d(x, np.array([1, 0, 2]), np.array([2, 3, 1])) == geometry.cohens_d([1, 4, 4], [1, 1, 2, 2, 2, 4])
        True
    """
    if np.ptp(values) <= 1e-6 * np.abs(values).max():
        return 0.0
    n, m = int(relevant.sum()), int(irrelevant.sum())
    means = relevant @ values / n, irrelevant @ values / m
    squares = relevant @ (values - means[0]) ** 2 + irrelevant @ (values - means[1]) ** 2
    difference = float(means[0] - means[1])
    return difference / math.sqrt(squares / (n + m - 2)) if squares else math.copysign(math.inf, difference)


def _compare(other: _Encoded, similarity: Similarity, own: Array, interval: Bootstrap) -> BaselineComparison:
    """Norms and nDCG@10 of the baseline, beside the model's own nDCG@10 of every query."""
    cvs = [geometry.coefficient_of_variation(geometry.norms(x)) for x in (other.queries, other.documents)]
    theirs = other.ndcg(_top(other.queries, other.documents, similarity.exponents[1]))
    return BaselineComparison(similarity.name, cvs[0], cvs[1], theirs, interval(own, theirs))


def _geometry(data: _Encoded, seed: int) -> Geometry:
    unit = COSINE.document(data.documents)
    m, dim = unit.shape
    sample = np.random.default_rng(seed).permutation(m)[:UNIFORMITY_ROWS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of few rows: is_sample_limited says it
        components = geometry.intrinsic_dimension(unit, seed=seed)
    pairs = [(i, c) for i, row in enumerate(data.columns) for c in row]
    return Geometry(
        dim=dim,
        num_documents=m,
        intrinsic_dimension=components,
        is_sample_limited=min(m, 5000) < 4 * dim,
        isoscore=geometry.isoscore(unit) if dim > 1 else math.nan,
        isoscore_ceiling=geometry.isoscore_ceiling(m, dim),
        mean_cosine=geometry.mean_cosine(unit),
        uniformity=geometry.uniformity(unit[sample]),
        alignment=geometry.alignment(data.queries[[i for i, _ in pairs]], unit[[c for _, c in pairs]]),
        explained=geometry.explained_variance(unit, seed=seed),
    )


def _hubness(top: Tensor, num_documents: int) -> Hubness:
    occurrences = np.bincount(top.numpy().ravel(), minlength=num_documents)
    n, p = len(top), top.shape[1] / num_documents
    return Hubness(
        skewness=float(skew(occurrences)) if np.ptp(occurrences) else math.nan,
        by_chance=(1 - 2 * p) / math.sqrt(n * p * (1 - p)) if p < 1 else math.nan,
        most=float(occurrences.max() / n),
        counts=tuple(np.bincount(occurrences).tolist()),
    )


Stored = dict[tuple[int, str, str], Array]


def _storage(data: _Encoded, now: Similarity, read_out: ReadOut) -> tuple[list[CompressionCell], Stored]:
    """nDCG@10 of every query in all, half and a quarter of the dimensions and at one bit a dimension.

    ``(D, "binary", "candidate")`` has the norm beside the bits at the exponent below 1 that the first half chose.
    """
    dim = data.queries.shape[1]
    stored: Stored = {}

    def search(prefix: int, precision: str, similarity: Similarity) -> dict[str, Array]:
        q = similarity.query(data.queries[:, :prefix].double()).float()
        d = similarity.document(data.documents[:, :prefix].double()).float()
        return {kind: data.ndcg(best) for kind, best in search_compressed(q, d, precision, 100, similarity).items()}

    for prefix in (dim, dim // 2, dim // 4):
        if prefix:
            stored[prefix, "float32", "none"] = search(prefix, "float32", now)["none"]
    stored |= {(dim, "binary", kind): values for kind, values in search(dim, "binary", now).items()}
    reference = float(stored[dim, "float32", "none"].mean())
    cells = [
        CompressionCell(*key, bytes_per_document(*key), mean, mean / reference if reference else math.nan)
        for key, mean in ((key, float(values.mean())) for key, values in stored.items())
    ]
    with_norm = search(dim, "binary", Similarity(1.0, read_out.length_candidate))
    return cells, stored | {(dim, "binary", "candidate"): with_norm["norm"]}


def _whitened(data: _Encoded, gamma: float) -> Tensor:
    """Top 10 with directions centred and whitened by the documents' covariance, lengths as they were: (n, <= 10).

    The covariance is shrunk: its mean eigenvalue is added to each. No judgment has a part in it.
    """
    units = [COSINE.document(x).double() for x in (data.queries, data.documents)]
    mean = units[1].mean(dim=0)
    centred = units[1] - mean
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))
    values = values.clamp(min=0)
    scale = (values + values.mean().clamp(min=1e-12)) ** -0.5
    q, d = (COSINE.document((x - mean) @ vectors * scale) for x in units)
    return _top(q.float(), (d * safe_norm(data.documents) ** (1 - gamma)).float(), 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Judging
# ---------------------------------------------------------------------------------------------------------------------


def _verdict(gain: Interval, num_queries: int, min_gain: float) -> str:
    """What an interval carries.

    Example:
        >>> [_verdict(gain, 100, 0.02) for gain in ((0.05, 0.02, 0.08), (0.0, -0.01, 0.01), (0.05, -0.01, 0.11))]
        ['do', 'no benefit expected', 'not enough data']
    """
    if num_queries < MIN_QUERIES:
        return NOT_ENOUGH
    if gain[2] < min_gain:
        return NO_BENEFIT
    return DO if gain[1] > 0 else NOT_ENOUGH


_NO_LENGTH = (
    "All norms are 1, and what stands before the normalisation cannot be reached from the end of the model: there is "
    "no length to measure."
)


@dataclass(frozen=True)
class _Judge:
    """From figures to recommendations, one method each."""

    data: _Encoded
    now: Similarity
    read_out: ReadOut
    interval: Bootstrap
    min_gain: float
    tolerance: float
    has_length: bool
    normalizes: bool

    @property
    def measured(self) -> Mask:
        """The queries that chose nothing, (n,)."""
        return ~self.read_out.chose

    @property
    def full(self) -> Array:
        """nDCG@10 of every query as read out today, (n,)."""
        return self.read_out.ndcg(self.read_out.present)

    def exponent(self, symmetry: TaskSymmetry) -> Recommendation:
        """Read out with another document exponent?"""
        found, number = self.read_out, int(self.measured.sum())
        best, keep = found.candidate, f"keep {self.now.name}"
        evidence = {
            "ndcg_present": float(self.full[self.measured].mean()),
            "ndcg_candidate": float(found.ndcg(best)[self.measured].mean()),
            "present": found.present,
            "candidate": best,
        }
        action = f"Read out with document exponent {best:.2g} instead of {found.present:.2g}"
        gain_of = f"nDCG@10 at {best:.2g} - at {found.present:.2g}"
        verdict, choice = _verdict(found.gain, number, self.min_gain), keep
        if not self.has_length:
            return Recommendation("read-out", action, NOT_ENOUGH, keep, _NO_LENGTH)
        if verdict == DO and symmetry.own_text_unjudged > 0.1:
            verdict = NOT_ENOUGH
            reason = (
                f"{symmetry.own_text_unjudged:.0%} of the queries are documents too and not judged relevant to "
                "themselves. Cosine puts those first, so the comparison is not fair: judge them or take them out."
            )
        elif verdict == DO:
            reason = "The other half of the queries chose this exponent; these confirm it."
            if self.normalizes:
                reason += " The norms before Normalize say something about relevance, and today they are thrown away."
            query = best if symmetry.verdict == "symmetric" else 1.0  # one exponent for both: s(a, b) = s(b, a)
            similarity = '"cosine"' if best == 1 else f"stm.Similarity({query:.2g}, {best:.2g})"
            choice = f"stm.prepare(model, {similarity})"
        elif verdict == NO_BENEFIT:
            role = "Length ranks no better than noise here" if found.present == 1 else "The present exponent will do"
            reason = f"{role}: the best other exponent of one half of the queries gains nothing on the other half."
        else:
            reason = _undecided(number)
        return Recommendation("read-out", action, verdict, choice, reason, found.gain, gain_of, number, evidence)

    def training(
        self, symmetry: TaskSymmetry, queries: NormStatistics, baseline: BaselineComparison | None
    ) -> Recommendation:
        """Train with length, by the task symmetry principle and by what length is worth now?"""
        found, number = self.read_out, int(self.measured.sum())
        cosine, dot = found.ndcg(1.0), found.ndcg(0.0)
        never = float((self.data.degrees == 0).mean())
        evidence = {
            "ndcg_cosine": float(cosine.mean()),
            "ndcg_dot": float(dot.mean()),
            "never_relevant": never,
            "length_candidate": found.length_candidate,
        }
        if symmetry.verdict == "symmetric":
            gain, everyone = self.interval(dot, cosine), len(cosine)
            dot_pays = self.has_length and _verdict(gain, everyone, self.min_gain) == DO
            return Recommendation(
                "training",
                "Train with qnorm or dnorm, which keep the length of one side",
                NO_BENEFIT,
                "train with dot" if dot_pays else "train with cosine",
                "Symmetric task: s(a, b) has to equal s(b, a), and only cosine and dot do that (the task symmetry "
                "principle, arXiv 2602.09229, section 6.3).",
                gain,
                "nDCG@10 by dot - by cosine",
                everyone,
                evidence,
            )
        gain, gain_of = found.gain_of_length, f"nDCG@10 at {found.length_candidate:.2g} - by cosine"
        verdict = _verdict(gain, number, self.min_gain)
        is_trained_for = self.now.exponents[1] < 1
        choice = "train with cosine until a trial says otherwise"
        if not self.has_length:
            verdict, reason = NOT_ENOUGH, _NO_LENGTH
        elif symmetry.verdict == "unclear":
            verdict = NOT_ENOUGH
            reason = "Whether queries and documents have roles of their own is not clear: pass symmetric=True or False."
        elif verdict == DO:
            reason = "Asymmetric task, and the length of documents already ranks better than cosine alone."
            choice = "train with qnorm"
        elif verdict == NO_BENEFIT and is_trained_for:
            reason = "The task is asymmetric, but a model that is read out with length gains nothing from it here."
            choice = "train with cosine"
        else:
            verdict = NOT_ENOUGH
            reason = (
                f"The task is asymmetric, which allows it. But this length was not trained, and what training would "
                f"make of it only training can tell; it takes explicit negatives that answer nothing ({never:.0%} of "
                "these documents answer no query here). Train both, compare on these queries."
                if not is_trained_for
                else _undecided(number)
            )
        if baseline is not None and queries.cv_ratio is not None and queries.cv_ratio >= 4:
            reason += f" The CV of query norms is {queries.cv_ratio:.1f} x the baseline's; in the paper, models with 4 "
            reason += "x or more from dot to dnorm were better off with dnorm (Fig. 5): try it too."
        action = "Train with qnorm: keep the length of documents"
        if not self.has_length:
            return Recommendation("training", action, verdict, choice, reason, evidence=evidence)
        return Recommendation("training", action, verdict, choice, reason, gain, gain_of, number, evidence)

    def pruning(self, documents: NormStatistics) -> Recommendation:
        """Drop the documents with the smallest norms?"""
        if not self.has_length:
            return Recommendation("pruning", "Drop part of the index by norm", NOT_ENOUGH, "keep all", _NO_LENGTH)
        by_words = documents.words * (-1 if documents.length_spearman < 0 else 1)
        chose = self.read_out.chose
        # At the better exponent: under dot, noise in the length hides what is short, so that dropping it costs nothing.
        exponents = self.read_out.present, self.read_out.candidate
        gamma = max(exponents, key=lambda g: self.read_out.ndcg(g)[chose].mean())
        kept = {share: _largest(documents.values, 1 - share) for share in DROPPED_SHARES}
        pruned = {share: self._of_part(columns, gamma) for share, columns in kept.items()}
        full = self.read_out.ndcg(gamma)
        passing = [s for s in kept if pruned[s][chose].mean() >= (1 - self.tolerance) * full[chose].mean()]
        share = max(passing, default=DROPPED_SHARES[0])
        number, reference = int(self.measured.sum()), full[self.measured]
        gain = self.interval(pruned[share][self.measured], (1 - self.tolerance) * reference)
        verdict = _verdict(gain, number, 0.0)
        answers = np.flatnonzero(self.data.degrees > 0)
        evidence = {
            "share": share,
            "exponent": gamma,
            "ndcg_full": float(reference.mean()),
            "ndcg_pruned": float(pruned[share][self.measured].mean()),
            "ndcg_pruned_by_words": float(self._of_part(_largest(by_words, 1 - share), gamma)[self.measured].mean()),
            "answers_kept": float(np.isin(answers, kept[share]).mean()),
        }
        reason = (
            f"{evidence['answers_kept']:.0%} of the relevant documents stay; nDCG@10 at exponent {gamma:.2g} "
            f"{evidence['ndcg_full']:.3f} -> {evidence['ndcg_pruned']:.3f} "
            f"(dropped by words instead of norm: {evidence['ndcg_pruned_by_words']:.3f})."
        )
        if verdict == DO:
            reason += " Holds for queries like these: what answers none of them may answer others."
        choice = f"keep the {1 - share:.0%} with the largest norms" if verdict == DO else "keep all"
        return Recommendation(
            "pruning",
            f"Drop the {share:.0%} of the documents with the smallest norms",
            verdict,
            choice,
            reason,
            gain,
            self._margin,
            number,
            evidence,
        )

    def storage(self, stored: Stored) -> list[Recommendation]:
        """Fewer dimensions, one bit each, one norm beside the bits?"""
        dim = self.data.queries.shape[1]
        full = stored[dim, "float32", "none"]
        everyone = np.full(len(full), True)
        found = []
        for name, share in (("half", 2), ("quarter", 4)):
            values = stored.get((dim // share, "float32", "none"))
            if values is not None:
                action = f"Keep the first {dim // share} of {dim} dimensions (1/{share} of the memory)"
                found.append(self._smaller(name, action, full, values, everyone, f"truncate_dim={dim // share}"))

        kinds = [kind for kind in ("query", "norm") if (dim, "binary", kind) in stored]
        chose, who = self.read_out.chose, everyone if len(kinds) == 1 else self.measured
        kind = max(kinds, key=lambda k: stored[dim, "binary", k][chose].mean())
        beside = " and one norm" if kind == "norm" else ""
        action = f"Store one bit a dimension{beside}, rescore the best 100 with the float query (1/32 of the memory)"
        values = stored[dim, "binary", kind]
        found.append(self._smaller("1 bit", action, full, values, who, f"binary embeddings{beside}, rescored"))

        without, with_norm = stored[dim, "binary", "query"], stored[dim, "binary", "candidate"]
        number, gamma = int(self.measured.sum()), self.read_out.length_candidate
        gain = self.interval(with_norm[self.measured], without[self.measured])
        verdict = _verdict(gain, number, self.min_gain) if self.has_length else NOT_ENOUGH
        reasons = {
            DO: "Bits know directions only; two bytes bring back what length adds.",
            NO_BENEFIT: "Length adds nothing to the bits.",
            NOT_ENOUGH: _undecided(number) if self.has_length else _NO_LENGTH,
        }
        found.append(
            Recommendation(
                "norm beside bits",
                f"With bits, store one norm a document (2 bytes), at exponent {gamma:.2g}",
                verdict,
                f"similarity=stm.Similarity(1.0, {gamma:.2g}), norm stored" if verdict == DO else "bits alone",
                reasons[verdict],
                gain if self.has_length else None,
                "nDCG@10 with - without",
                number if self.has_length else 0,
                {"ndcg_with": float(with_norm.mean()), "ndcg_without": float(without.mean()), "exponent": gamma},
            )
        )
        return found

    def isotropy(self, shape: Geometry) -> Recommendation:
        """Spread the directions?"""
        white = self.data.ndcg(_whitened(self.data, self.read_out.present))
        gain = self.interval(white, self.full)
        verdict = _verdict(gain, len(white), self.min_gain)
        reasons = {
            DO: "Whitening, which needs no training, gains; a regularizer in training aims at the same.",
            NO_BENEFIT: "Whitening, which evens out the directions without any training, gains nothing.",
            NOT_ENOUGH: _undecided(len(white)),
        }
        return Recommendation(
            "isotropy",
            "Spread the embeddings: centre and whiten them, or train with stm.SIGReg",
            verdict,
            "whiten, or try regularizers=[stm.SIGReg()]" if verdict == DO else "leave them",
            f"IsoScore {shape.isoscore:.3f} of {shape.isoscore_ceiling:.3f} that a sample of this size reaches. "
            + reasons[verdict],
            gain,
            "nDCG@10 whitened - as it is",
            len(white),
            {"isoscore": shape.isoscore, "isoscore_ceiling": shape.isoscore_ceiling, "mean_cosine": shape.mean_cosine},
        )

    def versus(self, baseline: BaselineComparison) -> Recommendation:
        """This model or the baseline?"""
        number = len(self.full)
        verdict = _verdict(baseline.gain, number, self.min_gain)
        reasons = {DO: "Better on the same queries.", NO_BENEFIT: "Not better.", NOT_ENOUGH: _undecided(number)}
        return Recommendation(
            "baseline",
            "Use this model rather than the baseline",
            verdict,
            "this model" if verdict == DO else "nothing speaks for a change",
            f"nDCG@10 {self.full.mean():.3f} against {baseline.ndcg.mean():.3f}. {reasons[verdict]}",
            baseline.gain,
            "nDCG@10 of the model - of the baseline",
            number,
            {"ndcg": float(self.full.mean()), "ndcg_baseline": float(baseline.ndcg.mean())},
        )

    @property
    def _margin(self) -> str:
        return f"nDCG@10 - {1 - self.tolerance:.0%} of the full one"

    def _of_part(self, columns: NDArray[np.int64], gamma: float) -> Array:
        """nDCG@10 of every query at an exponent, of an index with these documents alone: (n,)."""
        top = _top(self.data.queries, self.data.documents[columns], gamma)
        return self.data.ndcg(torch.from_numpy(columns)[top])

    def _smaller(self, name: str, action: str, full: Array, values: Array, who: Mask, choice: str) -> Recommendation:
        gain = self.interval(values[who], (1 - self.tolerance) * full[who])
        number = int(who.sum())
        verdict = _verdict(gain, number, 0.0)
        before, after = float(full[who].mean()), float(values[who].mean())
        retained = after / before if before else math.nan
        ends = {
            DO: f", at least {1 - self.tolerance:.0%}.",
            NO_BENEFIT: f": it costs more than {self.tolerance:.0%}.",
            NOT_ENOUGH: f". {_undecided(number)}",
        }
        return Recommendation(
            name,
            action,
            verdict,
            choice if verdict == DO else "keep float32 in full",
            f"{retained:.1%} of nDCG@10 is kept{ends[verdict]}",
            gain,
            self._margin,
            number,
            {"ndcg_full": before, "ndcg": after, "retention": retained},
        )


def _undecided(number: int) -> str:
    if number < MIN_QUERIES:
        return f"{number} queries to measure on are too few: judge some hundreds."
    return "The interval leaves both open: judge more queries."


def _largest(values: Array, share: float) -> NDArray[np.int64]:
    """Columns of this share of the values, the largest, in rising order; at least one is left out and one kept."""
    number = min(max(round(share * len(values)), 1), len(values) - 1)
    return np.sort(np.argsort(-values, kind="stable")[:number])

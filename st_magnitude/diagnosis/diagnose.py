"""diagnose: whether norms, compression or isotropy help a model on given queries. Numbers first, then advice.

A recommendation asks what a change would gain in nDCG@10 on queries that had no part in choosing it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from st_magnitude import geometry
from st_magnitude._checks import whole_number
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.diagnosis import advice, checks, measure
from st_magnitude.diagnosis.findings import (
    DO,
    BaselineComparison,
    Diagnosis,
    Geometry,
    NormStatistics,
    Provenance,
    Recommendation,
    TaskSymmetry,
)
from st_magnitude.diagnosis.symmetry import task_symmetry
from st_magnitude.evaluation.confidence import word_counts
from st_magnitude.evaluation.metrics import are_unit, model_name, raw_scoring_of
from st_magnitude.similarity import COSINE, DOT, Similarity
from st_magnitude.surgery.raw import normalizes_output

__all__ = ["diagnose"]


def diagnose(
    model: SentenceTransformer,
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    relevant_docs: Mapping[str, Collection[str]],
    *,
    similarity: Similarity | str | None = None,
    baseline: SentenceTransformer | None = None,
    also_relevant: Collection[str] = (),
    symmetric: bool | None = None,
    min_gain: float = 0.02,
    tolerance: float = 0.05,
    batch_size: int = 32,
    num_samples: int = 10_000,
    seed: int = 0,
    title: str = "",
    show_progress_bar: bool | None = None,
) -> Diagnosis:
    """Encodes once, measures what norms, storage and isotropy do on these queries, and recommends what is supported.

    A change is recommended ("do") only if the 95% bootstrap interval of its gain in nDCG@10 lies above 0 and reaches
    ``min_gain``, on at least 25 queries that had no part in choosing the change. Exponents and the share of documents
    to drop are chosen on one half of the queries and measured on the other; the halves share no relevant document where
    the judgments allow it. "No benefit expected" means that the interval excludes a gain of ``min_gain``, and "not
    enough data" that it does neither. Smaller storage is compared with ``1 - tolerance`` of the full nDCG@10 instead.
    Every verdict rests on its own interval: of forty useless changes one would pass.

    The recommendation ``"exponent"`` comes first. All others are measured with the similarity that it advises (today's
    if it advises no change), so that they still hold after it has been followed.

    Args:
        model: Any SentenceTransformer. Embeddings are taken from before a Normalize or ExponentNorm at its end.
        queries: Query id -> text. Queries without a relevant document do not count.
        corpus: Document id -> text.
        relevant_docs: Query id -> ids of its relevant documents.
        similarity: Similarity, or its name, that the model is scored with today. By default the one that the model
            states, and cosine if the model normalizes.
        baseline: Another model to measure on the same texts, scored as it states. It gives the ratio of CVs (delta-CV)
            and a paired difference.
        also_relevant: Ids of documents that are relevant to queries outside of these data, such as training queries.
            They do not count as never relevant. Ids that are not in the corpus are ignored.
        symmetric: Whether queries and documents are interchangeable, if you know it; None decides by `task_symmetry`.
        min_gain: Smallest gain in nDCG@10 that is worth a change. Some hundreds of queries cannot tell smaller gains
            from 0.
        tolerance: Share of nDCG@10 that smaller storage may cost.
        batch_size: Number of texts that are encoded at a time.
        num_samples: Number of bootstrap resamples.
        seed: Seed for the halves, the samples and the bootstrap.
        title: Title for reports, such as "my-retriever on FiQA dev".
        show_progress_bar: Whether to show a progress bar; None follows the log level.

    Raises:
        TypeError: If model or baseline is not a SentenceTransformer.
        ValueError: If the data are inconsistent (see `RetrievalData`), have fewer than two judged queries or documents,
            an argument is out of range, the similarity of a model is a distance, or an embedding is not finite.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bee", "wax"])], similarity_fn_name="dot", device="cpu")
        >>> queries = {f"q{i}": "bee" for i in range(80)}
        >>> corpus = {f"d{i}": "bee " * (2 if i < 80 else 1) for i in range(160)}
        >>> found = diagnose(model, queries, corpus, {f"q{i}": {f"d{i}"} for i in range(80)})
        >>> found.effects["corpus"].d, found["exponent"].verdict
        (inf, 'no benefit expected')

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, section 6.3 (the task symmetry principle), Eq. 8, App. M.
    """
    _check_models(model, baseline)
    judged = RetrievalData(queries, corpus, relevant_docs)
    _check_arguments(len(judged.query_ids), len(judged.document_ids), min_gain, tolerance, batch_size, num_samples)
    today = raw_scoring_of(model, similarity)
    baseline_scoring = None if baseline is None else raw_scoring_of(baseline)
    encode = partial(judged.encode, batch_size=batch_size, show_progress_bar=show_progress_bar, before_normalize=True)
    interval = partial(geometry.paired_bootstrap, num_samples=num_samples, seed=seed)

    task = encode(model)
    choice = measure.exponent_choice(task, judged.query_ids, today.exponents[1], seed, interval)
    asked = measure.norm_statistics(task.queries, word_counts(queries[i] for i in judged.query_ids))
    answers = measure.norm_statistics(task.documents, word_counts(corpus[i] for i in judged.document_ids))
    has_magnitude, normalizes = not are_unit(answers.values), normalizes_output(model)
    symmetry = task_symmetry(queries, corpus, relevant_docs, symmetric)
    gain = checks.exponent(choice, symmetry, has_magnitude, min_gain)
    elsewhere = frozenset(also_relevant)
    is_relevant = (task.degrees > 0) | np.array([document in elsewhere for document in judged.document_ids])
    # On a symmetric task both sides get the exponent, so that s(a, b) = s(b, a).
    query_exponent = choice.candidate if symmetry.verdict == "symmetric" else 1.0
    advised = Similarity(query_exponent, choice.candidate) if gain.verdict == DO else today

    bench = checks.Bench(task, is_relevant, choice, advised, has_magnitude, interval, min_gain, tolerance)
    compared = None
    if baseline is not None and baseline_scoring is not None:
        compared = measure.compare(encode(baseline), baseline_scoring, bench.full, interval)
        asked = replace(asked, cv_ratio=asked.cv / compared.query_cv if compared.query_cv else math.nan)
        answers = replace(answers, cv_ratio=answers.cv / compared.document_cv if compared.document_cv else math.nan)
    shape = measure.directions(task, seed)
    cells, stored = checks.storage(bench)
    names = "" if baseline is None else model_name(baseline)
    return Diagnosis(
        similarity=today.name,
        recommended=advised.name,
        normalizes=normalizes,
        has_magnitude=has_magnitude,
        query_ids=judged.query_ids,
        document_ids=judged.document_ids,
        is_relevant=is_relevant,
        queries=asked,
        documents=answers,
        effects=measure.effect_sizes(task, is_relevant, answers),
        exponent=choice,
        geometry=shape,
        hubness={similarity.name: measure.hubness(task, similarity) for similarity in (COSINE, DOT)},
        cells=cells,
        symmetry=symmetry,
        baseline=compared,
        recommendations=[
            advice.exponent(gain, choice, symmetry, advised, today.name, normalizes),
            *_other_changes(bench, stored, symmetry, asked, answers, shape, compared),
        ],
        provenance=Provenance(title, model_name(model), names, seed, num_samples, min_gain, tolerance, _versions()),
    )


def _other_changes(
    bench: checks.Bench,
    stored: checks.Stored,
    symmetry: TaskSymmetry,
    queries: NormStatistics,
    documents: NormStatistics,
    shape: Geometry,
    compared: BaselineComparison | None,
) -> list[Recommendation]:
    """All recommendations but that of the exponent, measured with the scoring that it advises."""
    scoring, tolerance, dim = bench.scoring.name, bench.tolerance, shape.dim
    full, everyone = stored[dim, "float32", "none"], np.full(len(bench.full), True)
    found = [
        advice.training(checks.training(bench, symmetry), bench, scoring, symmetry, queries, compared is not None),
        advice.pruning(checks.pruning(bench, documents), scoring, tolerance),
    ]
    for name, share in (("half", 2), ("quarter", 4)):
        if (values := stored.get((dim // share, "float32", "none"))) is not None:
            check = checks.smaller(bench, full, values, everyone)
            found.append(advice.prefix(name, share, dim, check, scoring, tolerance))
    # Whether the bits get a norm is chosen on one half of the queries, if there is a choice.
    kinds = [kind for kind in ("query", "norm") if (dim, "binary", kind) in stored]
    kind = max(kinds, key=lambda k: stored[dim, "binary", k][bench.choice.chose].mean())
    who = everyone if len(kinds) == 1 else bench.measuring
    check = checks.smaller(bench, full, stored[dim, "binary", kind], who)
    found.append(advice.one_bit(check, kind == "norm", scoring, tolerance))
    found.append(advice.norm_beside_bits(checks.norm_beside_bits(bench, stored), scoring))
    found.append(advice.isotropy(checks.isotropy(bench, shape), shape, scoring))
    if compared is not None:
        found.append(advice.baseline(checks.baseline(bench, compared), compared, scoring))
    return found


def _versions() -> dict[str, str]:
    from st_magnitude import __version__

    others = ("sentence-transformers", "transformers", "torch", "numpy")
    return {"st-magnitude": __version__} | {name: version(name) for name in others}


def _check_models(model: Any, baseline: Any) -> None:
    for name, value in {"model": model, "baseline": baseline}.items():
        if not isinstance(value, SentenceTransformer) and not (name == "baseline" and value is None):
            raise TypeError(
                f"{name} must be a SentenceTransformer, got {type(value).__name__} {value!r}; load a folder or hub id "
                "with st_magnitude.load(path)."
            )


def _check_arguments(
    num_queries: int, num_documents: int, min_gain: float, tolerance: float, batch_size: int, num_samples: int
) -> None:
    if num_queries < 2 or num_documents < 2:
        raise ValueError(
            "A diagnosis needs at least two queries with a relevant document and two documents, got "
            f"{num_queries} and {num_documents}. Verdicts need {2 * checks.MIN_QUERIES} queries or more; use some "
            "hundreds."
        )
    if not 0 <= min_gain < 1:
        raise ValueError(f"min_gain must be a difference of nDCG@10 in [0, 1), got {min_gain}; the default is 0.02.")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must lie strictly between 0 and 1, got {tolerance}; the default is 0.05.")
    whole_number("batch_size", batch_size)
    whole_number("num_samples", num_samples)

"""From measured gains to recommendations: all sentences about a change are here, one function per change."""

from __future__ import annotations

import math

from st_magnitude.diagnosis.checks import MIN_QUERIES, Bench, Check
from st_magnitude.diagnosis.findings import (
    DO,
    NO_BENEFIT,
    NOT_ENOUGH,
    BaselineComparison,
    Diagnosis,
    ExponentChoice,
    Geometry,
    NormStatistics,
    Recommendation,
    TaskSymmetry,
)
from st_magnitude.similarity import Similarity

__all__ = [
    "baseline",
    "exponent",
    "isotropy",
    "norm_beside_bits",
    "one_bit",
    "prefix",
    "pruning",
    "summary",
    "training",
]

NO_MAGNITUDE = (
    "All norms are 1, and the embeddings before the normalization cannot be reached, so that there are no norms to "
    "measure."
)


def exponent(
    check: Check, choice: ExponentChoice, symmetry: TaskSymmetry, advised: Similarity, today: str, normalizes: bool
) -> Recommendation:
    """Whether to score with another document exponent."""
    candidate, use = choice.candidate, f"keep {today}"
    if check.gain is None:
        reason = NO_MAGNITUDE
    elif check.verdict == DO:
        reason = "One half of the queries chose this exponent, and the other half confirms it."
        if normalizes:
            reason += " The norms before Normalize carry information about relevance that is not used today."
        similarity = '"cosine"' if candidate == 1 else "stm.Similarity({:.2g}, {:.2g})".format(*advised.exponents)
        use = f"stm.prepare(model, {similarity})"
    elif check.verdict == NO_BENEFIT:
        start = "Norms rank no better than noise here" if choice.present == 1 else "Today's exponent is good enough"
        reason = f"{start}: the exponent that one half of the queries chose gains nothing on the other half."
    elif symmetry.own_text_unjudged > 0.1 and check.gain[1] > 0:
        reason = (
            f"{symmetry.own_text_unjudged:.0%} of the queries are also documents, and these are not judged relevant to "
            "them. Cosine ranks such documents first, so that the comparison is not fair: judge these documents or "
            "remove them."
        )
    else:
        reason = _undecided(check)
    action = f"Score with document exponent {candidate:.2g} instead of {choice.present:.2g}"
    gain_of = f"nDCG@10 at exponent {candidate:.2g} minus nDCG@10 at {choice.present:.2g}"
    scoring = f"document exponents {candidate:.2g} and {choice.present:.2g}"
    return _recommend("exponent", action, check, use, reason, scoring, gain_of)


def training(
    check: Check,
    bench: Bench,
    scoring: str,
    symmetry: TaskSymmetry,
    queries: NormStatistics,
    has_baseline: bool,
) -> Recommendation:
    """Whether to train with norms, by the task symmetry principle and by what the norms are worth today."""
    if symmetry.verdict == "symmetric":
        dot_gains = bench.has_magnitude and check.verdict == DO
        action = "Train with qnorm or dnorm, which keep the norms of one side"
        use = "train with dot" if dot_gains else "train with cosine"
        reason = (
            "The task is symmetric, so that s(a, b) has to equal s(b, a). Of the four corners only cosine and dot do "
            "that (the task symmetry principle, arXiv 2602.09229, section 6.3)."
        )
        gain_of = "nDCG@10 by dot minus nDCG@10 by cosine"
        return _recommend("training", action, check, use, reason, scoring, gain_of, NO_BENEFIT)
    uses_norms = bench.scoring.exponents[1] < 1
    verdict, use = check.verdict, "train with cosine until a trial says otherwise"
    if check.gain is None:
        reason = NO_MAGNITUDE
    elif symmetry.verdict == "unclear":
        verdict = NOT_ENOUGH
        reason = (
            "It is not clear whether queries and documents have different roles: pass symmetric=True or "
            "symmetric=False."
        )
    elif verdict == DO:
        use, reason = "train with qnorm", "The task is asymmetric, and the norms already rank better than cosine alone."
    elif verdict == NO_BENEFIT and uses_norms:
        use = "train with cosine"
        reason = "The task is asymmetric, but a model that is scored with its norms gains nothing from them here."
    elif uses_norms:
        reason = _undecided(check)
    else:
        verdict = NOT_ENOUGH
        reason = (
            "The task is asymmetric, so that training with document norms is possible. Whether it helps only training "
            "can tell, because the present norms do not rank better than cosine. It takes explicit negatives that are "
            f"relevant to no query ({check.evidence['never_relevant']:.0%} of these documents are). Train with qnorm "
            "and with cosine, and compare both on these queries."
        )
    if has_baseline and queries.cv_ratio is not None and queries.cv_ratio >= 4:
        reason += (
            f" The CV of query norms is {queries.cv_ratio:.1f} times that of the baseline. In the paper, models whose "
            "CV grew at least 4 times from dot to dnorm were better with dnorm (Fig. 5): try dnorm too."
        )
    gain_of = f"nDCG@10 at exponent {bench.choice.magnitude_candidate:.2g} minus nDCG@10 by cosine"
    action = "Train with qnorm, which keeps the norms of documents"
    return _recommend("training", action, check, use, reason, scoring, gain_of, verdict)


def pruning(check: Check, scoring: str, tolerance: float) -> Recommendation:
    """Whether to drop the documents with the smallest norms."""
    action, use, reason = "Drop part of the index by norm", "keep all documents", NO_MAGNITUDE
    if check.gain is not None:
        found = check.evidence
        action = f"Drop the {found['share']:.0%} of the documents with the smallest norms"
        reason = (
            f"{found['answers_kept']:.0%} of the relevant documents stay in the index. nDCG@10 changes from "
            f"{found['ndcg_full']:.3f} to {found['ndcg_pruned']:.3f}, and to {found['ndcg_pruned_by_words']:.3f} if "
            "the number of words decides instead of the norm."
        )
        if check.verdict == DO:
            use = f"keep the {1 - found['share']:.0%} with the largest norms"
            reason += " This holds for queries like these: other queries may need other documents."
    return _recommend("pruning", action, check, use, reason, scoring, _margin(tolerance))


def prefix(name: str, share: int, dim: int, check: Check, scoring: str, tolerance: float) -> Recommendation:
    """Whether to keep half or a quarter of the dimensions."""
    action = f"Keep the first {dim // share} of {dim} dimensions (1/{share} of the memory)"
    return _smaller(name, action, check, f"truncate_dim={dim // share}", scoring, tolerance)


def one_bit(check: Check, with_norm: bool, scoring: str, tolerance: float) -> Recommendation:
    """Whether to store one bit per dimension."""
    beside = " and one norm per document" if with_norm else ""
    action = f"Store one bit per dimension{beside}, and rescore the best 100 with the float query (1/32 of the memory)"
    return _smaller("1 bit", action, check, f"binary embeddings{beside}, rescored", scoring, tolerance)


def _smaller(name: str, action: str, check: Check, use: str, scoring: str, tolerance: float) -> Recommendation:
    ends = {
        DO: f", at least {1 - tolerance:.0%}.",
        NO_BENEFIT: f", which costs more than {tolerance:.0%}.",
        NOT_ENOUGH: f". {_undecided(check)}",
    }
    retained = check.evidence["retention"]
    kept = "nDCG@10 is 0 already with the full index" if math.isnan(retained) else f"{retained:.1%} of nDCG@10 is kept"
    use = use if check.verdict == DO else "keep all dimensions in float32"
    return _recommend(name, action, check, use, kept + ends[check.verdict], scoring, _margin(tolerance))


def norm_beside_bits(check: Check, scoring: str) -> Recommendation:
    """Whether to store the norm of a document beside its bits."""
    gamma = check.evidence["exponent"]
    reasons = {
        DO: "Bits know directions only. Two bytes per document restore what the norm adds.",
        NO_BENEFIT: "The norm adds nothing to the bits.",
        NOT_ENOUGH: NO_MAGNITUDE if check.gain is None else _undecided(check),
    }
    use = f"similarity=stm.Similarity(1.0, {gamma:.2g}), norm stored" if check.verdict == DO else "bits alone"
    action = f"Store one norm per document (2 bytes) beside the bits, used with exponent {gamma:.2g}"
    gain_of = "nDCG@10 with the norm minus nDCG@10 without"
    return _recommend("norm beside bits", action, check, use, reasons[check.verdict], scoring, gain_of)


def isotropy(check: Check, shape: Geometry, scoring: str) -> Recommendation:
    """Whether to spread the directions."""
    reasons = {
        DO: "Whitening, which needs no training, improves the ranking. A regularizer in training aims at the same.",
        NO_BENEFIT: "Whitening, which evens out the directions without any training, gains nothing.",
        NOT_ENOUGH: _undecided(check),
    }
    reason = f"IsoScore is {shape.isoscore:.3f}; a sample of this size reaches at most {shape.isoscore_ceiling:.3f}. "
    action = "Spread the embeddings: center and whiten them, or train with stm.SIGReg"
    use = "whiten, or try regularizers=[stm.SIGReg()]" if check.verdict == DO else "leave the embeddings as they are"
    gain_of = "nDCG@10 whitened minus nDCG@10 as it is"
    return _recommend("isotropy", action, check, use, reason + reasons[check.verdict], scoring, gain_of)


def baseline(check: Check, comparison: BaselineComparison, scoring: str) -> Recommendation:
    """Whether to use this model rather than the baseline."""
    reasons = {
        DO: "The model is better on the same queries.",
        NO_BENEFIT: "The model is not better.",
        NOT_ENOUGH: _undecided(check),
    }
    reason = "nDCG@10 is {ndcg:.3f} against {ndcg_baseline:.3f}. ".format(**check.evidence) + reasons[check.verdict]
    scoring = f"{scoring}; the baseline {comparison.similarity}"
    use = "this model" if check.verdict == DO else "no reason to change the model"
    gain_of = "nDCG@10 of the model minus nDCG@10 of the baseline"
    return _recommend("baseline", "Use this model rather than the baseline", check, use, reason, scoring, gain_of)


def summary(d: Diagnosis) -> list[str]:
    """One line for each change to make, and one for the names under each other verdict."""
    by_verdict = {v: [r for r in d.recommendations if r.verdict == v] for v in (DO, NO_BENEFIT, NOT_ENOUGH)}
    lines = [f"Do: {r.choice} ({r.name})" for r in by_verdict[DO]] or ["These measurements support no change."]
    for verdict in (NO_BENEFIT, NOT_ENOUGH):
        if names := ", ".join(r.name for r in by_verdict[verdict]):
            lines.append(f"{verdict.capitalize()}: {names}")
    return lines


def _recommend(
    name: str,
    action: str,
    check: Check,
    use: str,
    reason: str,
    scoring: str,
    gain_of: str,
    verdict: str | None = None,
) -> Recommendation:
    """A recommendation of a check; without a gain nothing about the measurement is said."""
    measured = check.gain is not None
    return Recommendation(
        name=name,
        action=action,
        verdict=verdict or check.verdict,
        choice=use,
        reason=reason,
        scoring=scoring,
        gain=check.gain,
        gain_of=gain_of if measured else "",
        num_queries=check.num_queries,
        evidence=check.evidence,
    )


def _margin(tolerance: float) -> str:
    return f"nDCG@10 minus {1 - tolerance:.0%} of the full nDCG@10"


def _undecided(check: Check) -> str:
    if check.num_queries < MIN_QUERIES:
        return f"{check.num_queries} queries are too few to measure with: judge some hundreds."
    return "The interval allows both: judge more queries."

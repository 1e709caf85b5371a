"""Recommendations: one function per change, which measures its gain and has all sentences about it."""

from __future__ import annotations

import math
from dataclasses import replace

from st_magnitude import geometry
from st_magnitude.diagnosis.findings import (
    DO,
    NO_BENEFIT,
    NOT_ENOUGH,
    ExponentChoice,
    Geometry,
    NormStatistics,
    Recommendation,
)
from st_magnitude.diagnosis.measure import MIN_QUERIES, Bench, Check, Stored, centred, pruned
from st_magnitude.evaluation.calibration import PriorCurve
from st_magnitude.similarity import Similarity

NO_MAGNITUDE = (
    "All norms are 1, and the embeddings before the normalization cannot be reached, so there are no norms to measure."
)
DROPPED_SHARES = (0.25, 0.5, 0.75)


def exponent(
    choice: ExponentChoice, check: Check, own_text_unjudged: float, today: Similarity, new: Similarity, normalizes: bool
) -> Recommendation:
    """Whether to score by the similarity ``new``, which has the exponent that one half of the queries chose."""
    verdict, use = check.verdict, f"keep {today.name}"
    if own_text_unjudged > 0.1 and check.gain and check.gain[1] > 0:
        verdict = NOT_ENOUGH
        reason = (
            f"{own_text_unjudged:.0%} of the queries are also documents that are not judged relevant to them. Cosine "
            "ranks such documents first, so the comparison is not fair: judge these documents or remove them."
        )
    elif verdict == DO:
        reason = "One half of the queries chose this exponent, and the other half confirms it."
        if normalizes:
            reason += " The norms before Normalize carry information about relevance that is not used today."
        similarity = "stm.Similarity({:.2g}, {:.2g})".format(*new.exponents)
        use = 'stm.prepare(model, "cosine")' if choice.candidate == 1 else f"stm.prepare(model, {similarity})"
    elif verdict == NO_BENEFIT:
        start = "Norms rank no better than noise here" if choice.present == 1 else "Today's exponent is good enough"
        reason = f"{start}: the exponent that one half of the queries chose gains nothing on the other half."
    else:
        reason = _undecided(check)
    chosen, present = f"{choice.candidate:.2g}", f"{choice.present:.2g}"
    action = f"Score with document exponent {chosen} instead of {present}"
    scoring = f"document exponents {chosen} and {present}"
    gain_of = f"nDCG@10 at exponent {chosen} minus nDCG@10 at {present}"
    measured = check.gain, gain_of, check.num_queries
    return Recommendation("exponent", action, verdict, use, reason, scoring, *measured)


def training(bench: Bench, symmetric: bool) -> Recommendation:
    """Whether to train with norms, by the task symmetry principle and by the present worth of the norms."""
    choice = bench.choice
    if symmetric:
        check = bench.gain(choice.ndcg(0.0), choice.ndcg(1.0))
        action = "Train with qnorm or dnorm, which keep the norms of one side"
        use = "train with dot" if bench.has_magnitude and check.verdict == DO else "train with cosine"
        reason = (
            "The task is symmetric, so s(a, b) has to equal s(b, a). Of the four corners only cosine and dot do that "
            "(the task symmetry principle, arXiv 2602.09229, section 6.3)."
        )
        gain_of = "nDCG@10 by dot minus nDCG@10 by cosine"
        return replace(_recommend(bench, "training", action, check, use, reason, gain_of), verdict=NO_BENEFIT)
    number = int(bench.measuring.sum())
    check = Check(choice.gain_of_magnitude, number, bench.min_gain) if bench.has_magnitude else Check()
    uses_norms = bench.scoring.exponents[1] < 1
    verdict, use = check.verdict, "train with cosine until a trial says otherwise"
    if verdict == DO:
        use, reason = "train with qnorm", "The task is asymmetric, and the norms already rank better than cosine alone."
    elif verdict == NO_BENEFIT and uses_norms:
        use = "train with cosine"
        reason = "The task is asymmetric, but a model that is scored with its norms gains nothing from them here."
    elif uses_norms or check.gain is None:
        reason = _undecided(check)
    else:
        verdict = NOT_ENOUGH
        reason = (
            "The task is asymmetric, so training with document norms is possible. The present norms do not rank better "
            "than cosine, so only training can tell whether it helps. It takes explicit negatives that are relevant to "
            f"no query ({(~bench.is_relevant).mean():.0%} of these documents are). Train with qnorm and with cosine, "
            "and compare both on these queries."
        )
    gain_of = f"nDCG@10 at exponent {choice.magnitude_candidate:.2g} minus nDCG@10 by cosine"
    action = "Train with qnorm, which keeps the norms of documents"
    return replace(_recommend(bench, "training", action, check, use, reason, gain_of), verdict=verdict)


def pruning(bench: Bench, documents: NormStatistics) -> Recommendation:
    """Whether to drop the documents with the smallest norms; one half of the queries chooses the share to drop."""
    use = "keep all documents"
    if not bench.has_magnitude:
        return _recommend(bench, "pruning", "Drop part of the index by norm", Check(), use, NO_MAGNITUDE, "")
    chose, who, full = bench.choice.chose, bench.measuring, bench.full
    found = {share: pruned(bench, documents.values, share) for share in DROPPED_SHARES}
    floor = (1 - bench.tolerance) * full[chose].mean()
    share = max((s for s in found if found[s][0][chose].mean() >= floor), default=DROPPED_SHARES[0])
    values, kept = found[share]
    by_words, _ = pruned(bench, documents.words * (-1 if documents.length_spearman < 0 else 1), share)
    check = bench.margin(values[who], full[who])
    evidence = {
        "share_dropped": share,
        "share_of_answers_kept": float(kept[bench.is_relevant].mean()),
        "ndcg_full": float(full[who].mean()),
        "ndcg_pruned": float(values[who].mean()),
        "ndcg_pruned_by_words": float(by_words[who].mean()),
    }
    reason = (
        "{share_of_answers_kept:.0%} of the relevant documents stay in the index. nDCG@10 changes from {ndcg_full:.3f} "
        "to {ndcg_pruned:.3f}, and to {ndcg_pruned_by_words:.3f} if the number of words decides instead of the norm."
    ).format(**evidence)
    verdict, relevant = check.verdict, bench.is_relevant
    warning = ""
    if min(relevant.sum(), (~relevant).sum()) > 1:
        d = geometry.cohens_d(documents.values[relevant], documents.values[~relevant])
        warning = geometry.norm_warning(d)
    if warning:
        verdict = NO_BENEFIT
        reason += f" {warning}"
    elif verdict == DO:
        use = f"keep the {1 - share:.0%} with the largest norms"
        reason += " This holds for queries like these: other queries may need other documents."
    action = f"Drop the {share:.0%} of the documents with the smallest norms"
    gain_of = f"nDCG@10 minus {1 - bench.tolerance:.0%} of the full nDCG@10"
    advice = _recommend(bench, "pruning", action, check, use, reason, gain_of, **evidence)
    return replace(advice, verdict=verdict)


def storage(bench: Bench, stored: Stored) -> list[Recommendation]:
    """Whether to keep half or a quarter of the dimensions, or one bit per dimension."""
    dim = bench.task.queries.shape[1]
    changes = [
        (name, f"Keep the first {dim // n} of {dim} dimensions (1/{n} of the memory)", f"truncate_dim={dim // n}", key)
        for name, n in (("half", 2), ("quarter", 4))
        if (key := (dim // n, "float32", "none")) in stored
    ]
    # A model that is scored with norms gets a stored norm.
    bits = (dim, "binary", "norm" if (dim, "binary", "norm") in stored else "query")
    norm = " and one norm per document" if bits[2] == "norm" else ""
    action = f"Store one bit per dimension{norm}, and rescore the best 100 with the float query (1/32 of the memory)"
    changes.append(("1 bit", action, f"binary embeddings{norm}, rescored", bits))
    full, gain_of = stored[dim, "float32", "none"], f"nDCG@10 minus {1 - bench.tolerance:.0%} of the full nDCG@10"
    found = []
    for name, action, use, key in changes:
        check = bench.margin(stored[key], full)
        before, after = float(full.mean()), float(stored[key].mean())
        kept = after / before if before else math.nan
        ends = {
            DO: f", at least {1 - bench.tolerance:.0%}.",
            NO_BENEFIT: f", which costs more than {bench.tolerance:.0%}.",
            NOT_ENOUGH: f". {_undecided(check)}",
        }
        reason = f"{kept:.1%} of nDCG@10 is kept" if before else "nDCG@10 is 0 already with the full index"
        use = use if check.verdict == DO else "keep all dimensions in float32"
        evidence = {"ndcg_full": before, "ndcg": after, "share_of_ndcg_kept": kept}
        reason += ends[check.verdict]
        found.append(_recommend(bench, name, action, check, use, reason, gain_of, **evidence))
    return found


def bits_and_norm(bench: Bench, stored: Stored) -> Recommendation:
    """Whether to store the norm of a document next to its bits, both rescored."""
    dim, who, gamma = bench.task.queries.shape[1], bench.measuring, bench.choice.magnitude_candidate
    without, with_norm = stored[dim, "binary", "query"], stored[dim, "binary", "candidate"]
    check = bench.gain(with_norm[who], without[who]) if bench.has_magnitude else Check()
    reasons = {
        DO: "Bits hold directions only. Two bytes per document restore the contribution of the norm.",
        NO_BENEFIT: "The norm adds nothing to the bits.",
        NOT_ENOUGH: _undecided(check),
    }
    use = f"store the norm, and rescore by stm.Similarity(1.0, {gamma:.2g})" if check.verdict == DO else "bits alone"
    action = f"Store one norm per document (2 bytes) next to the bits, used with exponent {gamma:.2g}"
    gain_of = "nDCG@10 with the norm minus nDCG@10 without"
    return _recommend(bench, "bits and norm", action, check, use, reasons[check.verdict], gain_of)


def centring(bench: Bench, shape: Geometry) -> Recommendation:
    """Whether to remove the mean direction."""
    check = bench.gain(centred(bench), bench.full)
    reasons = {
        DO: "All directions share a part that tells no documents apart.",
        NO_BENEFIT: "Without the mean direction the ranking is no better.",
        NOT_ENOUGH: _undecided(check),
    }
    reason = f"The mean cosine of two documents is {shape.mean_cosine:.3f}. {reasons[check.verdict]}"
    action = "Subtract the mean direction of the documents from queries and documents"
    use = "subtract the mean of the unit vectors of the documents" if check.verdict == DO else "keep the mean direction"
    return _recommend(bench, "centring", action, check, use, reason, "nDCG@10 centred minus nDCG@10 as it is")


def prior(bench: Bench, curve: PriorCurve) -> Recommendation:
    """Whether to add log p(d) to the scores."""
    check = Check(curve.gain, len(curve.queries), bench.min_gain)
    reasons = {
        DO: "Some documents answer far more queries than others, which the scores leave out.",
        NO_BENEFIT: "Which documents answered the other queries says nothing more about these queries.",
        NOT_ENOUGH: _undecided(check),
    }
    use = f"st_magnitude.serving.with_prior(documents, log_p, weight={curve.weight:.3g})"
    action = "Add log p(d), the prior of a document, to its scores"
    gain_of = "nDCG@10 with the prior minus nDCG@10 without"
    use = use if check.verdict == DO else "no prior"
    return _recommend(bench, "prior", action, check, use, reasons[check.verdict], gain_of, weight=curve.highest)


def _recommend(
    bench: Bench, name: str, action: str, check: Check, use: str, reason: str, gain_of: str, **evidence: float
) -> Recommendation:
    scoring, measured = bench.scoring.name, (check.gain, gain_of, check.num_queries, evidence)
    return Recommendation(name, action, check.verdict, use, reason, scoring, *measured)


def _undecided(check: Check) -> str:
    if check.gain is None:
        return NO_MAGNITUDE
    if check.num_queries < MIN_QUERIES:
        return f"{check.num_queries} queries are too few to measure with: judge some hundreds."
    return "The interval allows both: judge more queries."

"""Recommendations: one function per change, which measures its gain and has its sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from st_magnitude.diagnosis.findings import DO, NO_BENEFIT, NO_MAGNITUDE, NOT_ENOUGH, Recommendation
from st_magnitude.diagnosis.measure import Bench
from st_magnitude.evaluation.calibration import prior_curve
from st_magnitude.evaluation.compression import CompressionCell
from st_magnitude.geometry import Array
from st_magnitude.judge import Difference, judge, nothing_found
from st_magnitude.similarity import Similarity

UNDECIDED = "The interval allows both: judge more queries."
VERDICTS = {"better": DO, "no better": NO_BENEFIT, "worse": NO_BENEFIT, "undecided": NOT_ENOUGH}


def exponent(bench: Bench, new: Similarity) -> Recommendation:
    """Whether to score by the similarity ``new``, whose exponent one half of the queries chose.

    A tie keeps today's exponent, as in `ExponentCurve.best`.
    """
    choice = bench.choice
    measuring = ~choice.chose
    today = choice.present
    gamma = choice.candidate
    judged = None
    if bench.has_magnitude:
        differences = choice.ndcg(gamma)[measuring] - choice.ndcg(today)[measuring]
        judged = judge(differences, bench.min_gain, seed=bench.seed)
    reasons = {
        DO: "One half of the queries chose this exponent, and the other half confirms it.",
        NO_BENEFIT: "The exponent that one half of the queries chose gains nothing on the other.",
    }
    similarity = "stm.Similarity({:.2g}, {:.2g})".format(*new.exponents)
    use = f"stm.prepare(model, {similarity})" if gamma < 1 else 'stm.prepare(model, "cosine")'
    keep = f"keep {bench.scoring.name}"
    action = f"Score with document exponent {gamma:.2g} instead of {today:.2g}"
    gain_of = f"nDCG@10 at exponent {gamma:.2g} minus nDCG@10 at {today:.2g}"
    compared = choice.per_query
    found = _recommend(bench, "exponent", action, judged, gain_of, (use, keep), reasons, compared)
    found = replace(found, scoring=f"document exponents {gamma:.2g} and {today:.2g}")
    if found.verdict == DO and gamma != choice.calibrated:
        reason = "The half of the queries that chooses finds no difference: judge more queries."
        return replace(found, verdict=NOT_ENOUGH, choice=keep, reason=reason)
    return found


def storage(
    bench: Bench, cells: Sequence[CompressionCell], per_query: Sequence[Array]
) -> Recommendation:
    """The smallest format of `CompressionEvaluator` that keeps enough of nDCG@10.

    ``per_query`` has nDCG@10 of every query in the format of each cell; the first is the full one.
    """
    full, *others = per_query
    tolerance = bench.tolerance
    kept = (1 - tolerance) * full
    judged = [judge(values - kept, seed=bench.seed) for values in others]
    fitting = [i for i, margin in enumerate(judged) if margin.verdict == "better"]
    if fitting:
        best = min(fitting, key=lambda i: (cells[i + 1].bytes_per_document, -cells[i + 1].ndcg))
    else:
        best = max(range(len(others)), key=lambda i: judged[i].low)
    cell = cells[best + 1]
    ratio = cells[0].bytes_per_document / cell.bytes_per_document
    said = f"{cell.retention:.1%} of nDCG@10 is kept at 1/{ratio:.3g} of the memory"
    reasons = {
        DO: f"{said}. Of {len(fitting)} formats that fit it is the smallest.",
        NO_BENEFIT: f"{said}, which costs more than {tolerance:.0%}; no format costs less.",
        NOT_ENOUGH: f"{said}. {UNDECIDED}",
    }
    action = f"Store {cell} ({cell.bytes_per_document:,} bytes a document)"
    gain_of = f"nDCG@10 minus {1 - tolerance:.0%} of the full nDCG@10"
    uses = (str(cell), f"keep all {cells[0].dim} dimensions in float32")
    return _recommend(bench, "storage", action, judged[best], gain_of, uses, reasons, full)


def prior(bench: Bench, query_ids: list[str], log_p: Array) -> Recommendation:
    """Whether to add log p(d), (m,), to the scores."""
    curve = prior_curve(bench.task, query_ids, log_p, bench.scoring, seed=bench.seed)
    reasons = {
        DO: "Some documents answer far more queries than others, which the scores leave out.",
        NO_BENEFIT: "Which documents answered the other queries says nothing more about these.",
    }
    column = f"np.c_[documents, {curve.weight:.3g} * log_p], by inner product (docs/prior.md)"
    action = "Add log p(d), the prior of a document, to its scores"
    gain_of = "nDCG@10 with the prior minus nDCG@10 without"
    judged = judge(curve.held_out - curve.per_query[0], bench.min_gain, seed=bench.seed)
    uses = (column, "no prior")
    return _recommend(bench, "prior", action, judged, gain_of, uses, reasons, curve.per_query)


def _recommend(
    bench: Bench,
    name: str,
    action: str,
    judged: Difference | None,
    gain_of: str,
    uses: tuple[str, str],
    reasons: Mapping[str, str],
    compared: Array,
) -> Recommendation:
    """A recommendation; ``uses`` are the settings if the verdict is "do" and if not.

    ``compared`` is nDCG@10 of every query, without which nothing can be compared.
    """
    nothing = nothing_found(float(compared.mean()))
    verdict = VERDICTS[judged.verdict] if judged and not nothing else NOT_ENOUGH
    return Recommendation(
        name=name,
        action=action,
        verdict=verdict,
        choice=uses[verdict != DO],
        reason=nothing or reasons.get(verdict, UNDECIDED if judged else NO_MAGNITUDE),
        scoring=bench.scoring.name,
        gain=judged,
        gain_of=gain_of if judged else "",
    )

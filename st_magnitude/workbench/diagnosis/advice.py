"""Recommendations: one function per change, which measures its gain and has its sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from st_magnitude.data.ranking import Ranking
from st_magnitude.evaluation.compression import Format, cells_of
from st_magnitude.geometry import Array
from st_magnitude.judge import Difference, judge, nothing_found
from st_magnitude.workbench.calibration import prior_curve
from st_magnitude.workbench.choice import Choice
from st_magnitude.workbench.diagnosis.findings import (
    DO,
    NO_BENEFIT,
    NO_MAGNITUDE,
    NOT_ENOUGH,
    Recommendation,
)
from st_magnitude.workbench.diagnosis.measure import Bench

UNDECIDED = "The interval allows both: judge more queries."
VERDICTS = {"better": DO, "no better": NO_BENEFIT, "worse": NO_BENEFIT, "undecided": NOT_ENOUGH}


def exponent(bench: Bench, change: Choice[float]) -> Recommendation:
    """Whether to score by another document exponent, which the other folds choose."""
    curve = bench.curve
    today = curve.present
    gamma = change.value
    judged = None
    if bench.has_magnitude:
        held_out = change.of(curve.rankings)
        judged = held_out.minus(curve.at(today), bench.min_gain, bench.seed)
    reasons = {
        DO: "Four fifths of the queries chose this exponent, and the last fifth confirms it.",
        NO_BENEFIT: "The exponent that four fifths of the queries choose gains nothing on the"
        " last one.",
    }
    similarity = f"stm.Similarity(1, {gamma:.2g})"
    use = f"stm.prepare(model, {similarity})" if gamma < 1 else 'stm.prepare(model, "cosine")'
    keep = f"keep {bench.task.similarity.name}"
    action = f"Score with document exponent {gamma:.2g} instead of {today:.2g}"
    gain_of = f"nDCG@10 at the exponent that other queries choose minus nDCG@10 at {today:.2g}"
    nothing = nothing_found(*curve.ndcg)
    found = _recommend(bench, "exponent", action, judged, gain_of, (use, keep), reasons, nothing)
    found = replace(found, scoring=f"document exponents {gamma:.2g} and {today:.2g}")
    if found.verdict == DO and gamma != curve.best:
        reason = "All queries together find no difference: judge more queries."
        return replace(found, verdict=NOT_ENOUGH, choice=keep, reason=reason)
    return found


def storage(bench: Bench, formats: Mapping[Format, Ranking]) -> Recommendation:
    """The smallest format that keeps enough of nDCG@10; the first is full."""
    cells = cells_of(formats)
    full, *others = (ranking.ndcg for ranking in formats.values())
    tolerance = bench.tolerance
    kept = (1 - tolerance) * full
    judged = [judge(values - kept, seed=bench.seed) for values in others]
    fitting = [i for i, margin in enumerate(judged) if margin.is_better]
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
    nothing = nothing_found(cells[0].ndcg)
    return _recommend(bench, "storage", action, judged[best], gain_of, uses, reasons, nothing)


def prior(bench: Bench, log_p: Array) -> Recommendation:
    """Whether to add log p(d), (m,), to the scores."""
    curve = prior_curve(bench.task, log_p, seed=bench.seed)
    reasons = {
        DO: "Some documents answer far more queries than others, which the scores leave out.",
        NO_BENEFIT: "Which documents answered the other queries says nothing more about these.",
    }
    column = f"np.c_[documents, {curve.weight:.3g} * log_p], by inner product (docs/prior.md)"
    action = "Add log p(d), the prior of a document, to its scores"
    gain_of = "nDCG@10 with the prior minus nDCG@10 without"
    judged = curve.held_out.minus(curve.rankings[0.0], bench.min_gain, bench.seed)
    uses = (column, "no prior")
    nothing = nothing_found(*curve.ndcg)
    return _recommend(bench, "prior", action, judged, gain_of, uses, reasons, nothing)


def _recommend(
    bench: Bench,
    name: str,
    action: str,
    judged: Difference | None,
    gain_of: str,
    uses: tuple[str, str],
    reasons: Mapping[str, str],
    nothing: str,
) -> Recommendation:
    """A recommendation; ``uses`` are the settings if the verdict is "do" and if not, and
    ``nothing`` is the sentence of `nothing_found` or empty."""
    verdict = VERDICTS[judged.verdict] if judged and not nothing else NOT_ENOUGH
    return Recommendation(
        name=name,
        action=action,
        verdict=verdict,
        choice=uses[verdict != DO],
        reason=nothing or reasons.get(verdict, UNDECIDED if judged else NO_MAGNITUDE),
        scoring=bench.task.similarity.name,
        gain=judged,
        gain_of=gain_of if judged else "",
    )

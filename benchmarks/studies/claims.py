"""The claims of the sources, each with our figure: from the stored cells, or from the page that
reports it.

A figure that is not from cells is quoted in quoted.json from a page of the docs as it stands there.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

from benchmarks.studies.boilerplate import forgetting, fragments, pages
from benchmarks.studies.cells import best_of, best_of_all, gain
from benchmarks.studies.compression import compression
from benchmarks.studies.convergence import convergence
from benchmarks.studies.estimates import Estimate, Gain, markdown, over
from benchmarks.studies.inheritance import inheritance
from benchmarks.studies.revela import revela_text
from benchmarks.studies.temperature.temperature import LOW, PLACES, STUDIES, TAUS

CONDITION = "reproduced under a condition"
NOT = "not reproduced"
MAGNITUDE, TEMPERATURE, SIGREG, REVELA, NORMS = (
    "Magnitude",
    "Temperature",
    "SIGReg",
    "Revela",
    "Norms",
)
OURS = "this package"  # a question that no source asks
SOURCES = (MAGNITUDE, OURS, TEMPERATURE, SIGREG, REVELA, NORMS)
STUDY_PAGES = {  # of scripts whose cells are stored
    "compression.py": "research/compression.md",
    "convergence.py": "research/convergence.md",
    "forgetting.py": "research/boilerplate.md",
    "fragments.py": "research/boilerplate.md",
    "inheritance.py": "research/inheritance.md",
    "pages.py": "research/boilerplate.md",
    "revela_text.py": "research/revela.md",
    "temperature.py": "research/temperature.md",
}
# Claims that several settings test, with the figures of the source.
QNORM = "QNorm is ahead of Cosine (Table 1, BEIR)", "+3.1, +2.8"
DNORM = "DNorm is ahead of Cosine (Table 1, BEIR)", "+1.5, +2.9"
OWN_DOT = "A model trained with Dot is better by dot than by cosine (Table 18)", "+2.0, +3.1"
OWN_QNORM = (
    "A model trained with QNorm is better at the exponent that dev chooses than by cosine (Table 18"
    " has Dot)",
    "+2.0, +3.1",
)


@dataclass(frozen=True)
class Claim:
    """One line of the table.

    Attributes:
        source: The source, or `OURS`.
        claim: What the source says. Lines with the same claim stand together.
        theirs: Its figure.
        setting: Model, data and steps of ours.
        ours: Our figure with its interval; empty if nothing has been measured.
        verdict: Reproduced or not, under a condition, or open.
        script: What prints it.
        page: The page of docs/ that reports our figure; "" for that of the script's study.
    """

    source: str
    claim: str
    theirs: str
    setting: str
    ours: str
    verdict: str
    script: str
    page: str = ""

    def row(self, before: Claim | None = None) -> list[str]:
        """The row of the table under that of ``before``, whose claim it does not repeat."""
        head = ["", ""] if before and before.claim == self.claim else [self.claim, self.theirs]
        verdict = self.verdict
        if self.source == OURS:  # which has no figure, and nothing to reproduce
            head = head[:1]
            verdict = verdict.replace(NOT, "does not hold").replace("reproduced", "holds")
        within = r"(?<=\d),? (?=[\[+-]|± )|(?<=±) "  # an interval stays on one line
        ours = re.sub(within, lambda space: space[0].replace(" ", "\u00a0"), self.ours)
        page = self.page or STUDY_PAGES.get(self.script.split()[0])
        script = f"[{self.script}]({posixpath.relpath(page, 'research')})" if page else self.script
        return [*head, f"{self.setting}: {script}", ours, verdict]


def judge(found: Estimate, sign: float, condition: str = "") -> str:
    """The verdict on a difference whose sign the source gives.

    What is open says which effect would have shown.
    """
    if found.low == found.high == 0:
        return f"{NOT}: both give the same rankings"
    verdict = found.verdict(sign)
    if verdict == "open":
        half = 100 * max(found.high - found.mean, found.mean - found.low)
        return f"open: an effect of {half:.1f} would have shown"
    reproduced = f"{CONDITION}: {condition}" if condition else "reproduced"
    return reproduced if verdict == "agrees" else NOT


def line(
    source: str,
    claim: str | tuple[str, str],
    setting: str,
    found: Gain | Estimate | None,
    script: str,
    sign: float = 1,
    condition: str = "",
    verdict: str = "{}",
) -> Iterator[Claim]:
    """The line of a gain, with the number of its seeds if it is known; none without cells.

    Args:
        claim: The claim, and the figure of the source if it has one.
        verdict: Where `judge`'s verdict stands in another one.
    """
    if found is None:
        return
    estimate = found if isinstance(found, Estimate) else found[0]
    where = setting if isinstance(found, Estimate) else f"{setting}, {seeds(found[1])}"
    what, theirs = (claim, "") if isinstance(claim, str) else claim
    judged = verdict.format(judge(estimate, sign, condition))
    yield Claim(source, what, theirs, where, estimate.show(), judged, script)


def seeds(number: int) -> str:
    return f"{number} seed{'s' * (number > 1)}"


def from_cells() -> Iterator[Claim]:
    """Lines of the studies that have stored cells."""
    yield from of_temperatures("static", ("foldoc",))
    yield from of_temperatures("L3, bf16", PLACES)
    yield from of_steps("static, long", ("foldoc",))
    yield from of_steps("L3", ("foldoc",))
    yield from of_steps("L3, long", PLACES)
    yield from of_steps("MiniLM", PLACES)
    yield from of_inheritance()
    yield from of_low_temperature()
    yield from of_never_relevant()
    yield from of_forgetting()
    yield from of_fragments()
    yield from of_sums()
    yield from of_sigreg()
    yield from of_revela()
    yield from of_convergence()


def horizon(name: str) -> str:
    """Base, steps and batch of a study."""
    base = name.split(",")[0].replace("static", "static table")
    return f"{base}, {STUDIES[name].steps:,} steps of {STUDIES[name].batch}"


def of_temperatures(name: str, tests: Iterable[str]) -> Iterator[Claim]:
    """QNorm and DNorm over Cosine, each at the temperature that is best on dev."""
    study = STUDIES[name]
    for claim, loss, scoring, how in (
        (QNORM, "qnorm", "matched", "as trained"),
        (QNORM, "qnorm", "calibrated", "calibrated"),
        (DNORM, "dnorm", "matched", "as trained"),
    ):
        best = best_of_all(study.cosines, scoring)
        own = best_of_all(study.of_loss(loss, "auto", TAUS), scoring)
        for test in tests if best and own else ():
            setting = f"{horizon(name)}, both at their best τ; {how}, {PLACES[test]}"
            found = gain(own, best, [test], scoring)
            yield from line(MAGNITUDE, claim, setting, found, f'temperature.py "{name}"')


def of_steps(name: str, tests: Iterable[str]) -> Iterator[Claim]:
    """More steps: QNorm over Cosine, and what scoring with the norm is worth to its model."""
    study = STUDIES[name]
    if study.chosen is None:
        return
    qnorm, dot = (study.of_loss(loss, "auto")[0] for loss in ("qnorm", "dot"))
    noted = "an encoder in its own domain, one seed; not planned"
    for test in tests:
        for claim, condition, found in (
            (QNORM, "", gain(qnorm, study.chosen, [test], "matched")),
            (OWN_DOT, "", gain(dot, dot, [test], "matched", plain="cosine")),
            (OWN_QNORM, noted, gain(qnorm, qnorm, [test], "calibrated", plain="cosine")),
        ):
            how = ", as trained" if claim == QNORM else ""
            setting = f"{horizon(name)}{how}; {PLACES[test]}"
            script = f'temperature.py "{name}"'
            yield from line(MAGNITUDE, claim, setting, found, script, condition=condition)


def of_low_temperature() -> Iterator[Claim]:
    """Learnable over Cosine at the low temperature."""
    claim = f"Learned exponents are ahead of Cosine at the same low temperature, {LOW:g}"
    condition = "a temperature that is too low; not planned; .05 or TempAgg does more"
    for name, test in (("static", "foldoc"), ("L3, bf16", "wordnet"), ("L3, bf16", "foldoc")):
        study = STUDIES[name]
        if study.chosen is None:
            continue
        how = "both at their best rates"
        both = [study.at_low(loss) for loss in ("learnable", "cosine")]
        if name != "static":
            how = "both at the rate that is best at .05"
            both = [[x for x in cells if x.rate == study.chosen.rate] for cells in both]
        learned, plain = (best_of_all(cells, "matched") for cells in both)
        found = gain(learned, plain, [test], "matched") if learned and plain else None
        setting = f"{horizon(name)}, as trained, {how}; {PLACES[test]}"
        script = f'temperature.py "{name}"'
        yield from line(OURS, claim, setting, found, script, condition=condition)


def of_inheritance() -> Iterator[Claim]:
    """QNorm and DNorm as trained over Cosine at its best temperature, by base."""
    where = f"{inheritance.STEPS} steps of 32, as trained; FOLDOC and docstrings"
    tests = ["foldoc", "docstrings"]
    claims = {"qnorm": QNORM, "dnorm": DNORM}
    for (base, how), (loss, claim) in product(inheritance.NAMES.items(), claims.items()):
        cell = inheritance.best(base, loss, "matched")
        found = gain(cell, inheritance.control(base), tests, "matched")
        yield from line(MAGNITUDE, claim, f"{how}, {where}", found, "inheritance.py")
    passed_on = (
        "A base pretrained with dot passes its norm on: gain over Cosine, minus the same gain from"
        " the base pretrained with cosine"
    )
    losses = {"qnorm": "QNorm", "dot": "Dot"}
    for model, (loss, name) in product(inheritance.MODELS, losses.items()):
        found = inheritance.inherited(model, loss, tests)
        yield from line(OURS, passed_on, f"{name}, {model}, {where}", found, "inheritance.py")


def of_never_relevant() -> Iterator[Claim]:
    """QNorm over Cosine and its controls, where the index holds texts that look like queries."""
    claim = (
        "The norm tells answers from pages that name the query and do not answer it: QNorm over"
        " Cosine, trained with the same negatives"
    )
    rows, how = pages.rows("L3"), f"L3, {pages.CELLS['L3'].steps} steps of 32, best τ"
    controls = ("", " + surface prior", " + embedding prior", " with prompts")
    for control, (test, place) in product(controls, pages.TESTS.items()):
        after, before = rows.get("QNorm calibrated"), rows.get(f"Cosine{control}")
        if after and before and (test == "wordnet" or "prior" not in control):
            setting = f"over Cosine{control}: {how}; {place}"
            condition = "" if control else "no prompts, no filter"
            found = pages.gain(after, before, test, "with all")
            yield from line(OURS, claim, setting, found, "pages.py L3", condition=condition)


def of_forgetting() -> Iterator[Claim]:
    """Dot over Cosine on the same rows, and over Cosine without their negatives."""
    claim = "A norm that takes up the boilerplate protects the directions: Dot over Cosine"
    controls = {forgetting.WITH: "with the same", forgetting.WITHOUT: "without these"}
    for scoring, (before, rows) in product(("calibrated", "by cosine"), controls.items()):
        cell, key = forgetting.ROWS[f"Dot with boilerplate, {scoring}"]
        setting = f"{scoring}, over Cosine {rows} negatives: MiniLM, docstrings, 40 steps of 32"
        found = gain(cell, before, forgetting.OTHERS, key, plain="matched")
        yield from line(OURS, claim, f"{setting}; five other domains", found, "forgetting.py")


def of_fragments() -> Iterator[Claim]:
    """Fragments that training has not shown: ranking with the norm, and dropping by it."""
    if not (found := fragments.stored()):
        return
    where, number = "L3, docstrings, fragments that training has not shown", seeds(len(found))
    helps = "A norm that knows what is never relevant helps (d = 1.22 on BRIGHT): QNorm as trained"
    for share in (0.0, 0.75):
        gained = fragments.gain_at(found, "docstrings", share, "QNorm as trained")
        setting = f"{where}, {share:.0%} of the index; {number}"
        yield from line(MAGNITUDE, f"{helps} over Cosine", setting, gained, "fragments.py")
    drops = "The norm tells what to drop from an index: answers kept by half of it, %"
    for name in ("text length", "surface features", "embeddings of Cosine"):
        setting = f"over {name}: {where}; {number}"
        yield from line(OURS, drops, setting, fragments.kept_gain(found, name), "fragments.py")


def of_convergence() -> Iterator[Claim]:
    """GradScale and cut-init over plain training, each at its own best rate."""
    for start, way in convergence.NAMES:
        cell, control = convergence.best(start, way), convergence.best(start, "plain")
        if way != "plain" and cell and control:
            claim = f"{way} converges to a better model, here with AdamW, both at their best rates"
            setting = f"{convergence.STARTS[start].words}, {cell.steps:,} steps of {cell.batch}"
            found = gain(cell, control, ["wordnet"], "matched")
            yield from line(NORMS, claim, setting, found, "convergence.py")


def of_revela() -> Iterator[Claim]:
    """What a part of Revela is worth: the setting without it, less Revela."""
    where = "token vectors of SmolLM2 under a linear map, 48 steps of 64 chunks"
    for name, claim, verdict in (
        (
            "random groups",
            ("Random groups ruin it (33.6 → 3.9)", "-29.7"),
            f"{NOT}: they take a third of the gain",
        ),
        ("no V-norm", ("Without V-normalisation it is worse (Fig. 4)", "-2 to -4"), "{}"),
    ):
        found = revela_text.over_revela(revela_text.ABLATIONS[name])
        yield from line(REVELA, claim, where, found, "revela_text.py", -1, verdict=verdict)


def of_sums() -> Iterator[Claim]:
    """The sums over temperatures against one temperature."""
    sizes = {"full": "in full", "quarter": "at a quarter", "bits": "in bits"}
    texts = compression.other_texts("static")
    rows = compression.stored(texts)
    ahead = "TempAgg is ahead of one temperature, here of the one that dev chooses for each kind"
    for size, where in sizes.items() if len(rows) == len(texts) else ():
        for chosen_at in dict.fromkeys(("full", size)):
            how = "in full" if chosen_at == "full" else "at that size"
            setting = f"{where}, dev chooses {how}: static table, four kinds of text, 1,000 and 300"
            setting += " steps of 128; 3 seeds"
            condition = "" if chosen_at == size else "dev chooses in full"
            found = compression.over_texts(rows, "TempAgg", chosen_at, size)
            claim = f"{ahead} of text"
            yield from line(
                TEMPERATURE, claim, setting, found, "compression.py", condition=condition
            )
    cells, setting = compression.sums("static"), "static table, 1,000 steps of 128; FOLDOC"
    best = best_of([cell for cell in cells.values() if cell.loss == "cosine"], "matched")
    claim = "TempAggMRL is ahead of the one temperature that dev chooses"
    for size in ("quarter", "bits") if best else ():
        found = gain(cells["TempAggMRL"], best, ["foldoc"], "matched", size)
        yield from line(TEMPERATURE, claim, f"{sizes[size]}: {setting}", found, "compression.py")
    if cells:
        claim = f"TempAgg needs no choice of a temperature: over τ {LOW:g}"
        found = gain(cells["TempAgg"], cells[f"τ {LOW:g}"], ["foldoc"], "matched")
        verdict = "{}; level with the one of four that dev chooses"
        where = f"in full: {setting}"
        yield from line(TEMPERATURE, claim, where, found, "compression.py", verdict=verdict)


def of_sigreg() -> Iterator[Claim]:
    """What SIGReg does to the isotropy and to an index."""
    rows = compression.sigreg("static")
    suffers = ("Retrieval suffers slightly", "slight loss")
    for batch in compression.BATCHES if rows else ():
        cell = rows[f"batch {batch}, weight 0.05"]
        plain = replace(cell, sigreg=0.0)
        where = f"static table, 1,000 steps of {batch}, weight .05; FOLDOC"
        scores = compression.isoscores(cell)
        if len(scores):
            rise = over(scores - compression.isoscores(plain)), len(scores)
            setting = f"in hundredths: {where}"
            yield from line(SIGREG, "IsoScore rises", setting, rise, "compression.py")
        for size, name in (("full", "in full"), ("bits", "in bits")):
            found = gain(cell, plain, ["foldoc"], "matched", size)
            yield from line(SIGREG, suffers, f"{name}: {where}", found, "compression.py", -1)


@cache
def every_claim() -> tuple[Claim, ...]:
    """All lines, made once for all tables."""
    quoted = json.loads(Path(__file__).with_name("quoted.json").read_text(encoding="utf-8"))
    return (*from_cells(), *(Claim(**fields) for fields in quoted))


def table(source: str) -> list[str]:
    """The lines of a source, those from cells first, and those with the same claim together."""
    claims = [claim for claim in every_claim() if claim.source == source]
    first = list(dict.fromkeys(claim.claim for claim in claims))
    claims.sort(key=lambda claim: first.index(claim.claim))
    rows = [claim.row(before) for before, claim in zip([None, *claims], claims, strict=False)]
    if source == OURS:
        head = ["claim", "our setting and script", "our figure", "verdict"]
        return markdown(head, rows, "llll")
    head = ["claim", "the source", "our setting and script", "our figure", "verdict"]
    return markdown(head, rows, "lrlll")

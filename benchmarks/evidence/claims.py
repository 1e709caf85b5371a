"""The claims of the sources, each with our figure: from the stored cells, or from the page that reports it.

A figure that is not from cells is quoted from a page of the docs as it stands there; a test checks that it does.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
import compression_control
import convergence
import forgetting
import inheritance
import pages
import reading
import revela_text
from cells import Cell, best_of, gain
from fragments import gain_at, kept_gain, stored
from magnitude_tables import Estimate, over
from temperature_control import LOW, PLACES, STUDIES, TAUS, best_of_all

REPRODUCED, CONDITION, NOT, OPEN = "reproduced", "reproduced under a condition", "not reproduced", "open"
MAGNITUDE, TEMPERATURE, SIGREG, REVELA, NORMS = "Magnitude", "Temperature", "SIGReg", "Revela", "Norms"
OURS = "this package"  # a question that no source asks
SOURCES = (MAGNITUDE, OURS, TEMPERATURE, SIGREG, REVELA, NORMS)
STUDY_PAGES = {  # of scripts whose cells are stored
    "compression_control.py": "research/compression.md",
    "convergence.py": "research/convergence.md",
    "forgetting.py": "research/boilerplate.md",
    "fragments.py": "research/boilerplate.md",
    "inheritance.py": "research/inheritance.md",
    "pages.py": "research/boilerplate.md",
    "reading.py": "research/reading.md",
    "revela_text.py": "research/revela.md",
    "temperature_control.py": "research/temperature.md",
}
REVELA_SETTING = "token vectors of SmolLM2 under a linear map, 48 steps of 64 chunks"
# Claims that several settings test, with the figures of the source.
QNORM = "QNorm is ahead of Cosine (Table 1, BEIR)", "+3.1, +2.8"
DNORM = "DNorm is ahead of Cosine (Table 1, BEIR)", "+1.5, +2.9"
OWN_DOT = "A model trained with Dot is better by dot than by cosine (Table 18)", "+2.0, +3.1"
OWN_QNORM = (
    "A model trained with QNorm is better at the exponent that dev chooses than by cosine (Table 18 has Dot)",
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
        verdict: One of the four, with the condition or what is missing.
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

    def row(self, before: Claim | None = None) -> str:
        """The row of the table under that of ``before``, whose claim it does not repeat."""
        head = ("", "") if before and before.claim == self.claim else (self.claim, self.theirs)
        verdict = self.verdict
        if self.source == OURS:  # which has no figure, and nothing to reproduce
            head = head[:1]
            verdict = verdict.replace(NOT, "does not hold").replace(REPRODUCED, "holds")
        # An interval stays on one line.
        ours = re.sub(r"(?<=\d),? (?=[\[+-]|± )|(?<=±) ", lambda space: space[0].replace(" ", "\u00a0"), self.ours)
        page = self.page or STUDY_PAGES.get(self.script.split()[0])
        script = f"[{self.script}]({posixpath.relpath(page, 'research')})" if page else self.script
        return "| " + " | ".join((*head, f"{self.setting}: {script}", ours, verdict)) + " |"


def judge(found: Estimate, sign: float, condition: str = "") -> str:
    """The verdict on a difference whose sign the source gives; what is open says which effect would have shown."""
    if found.low == found.high == 0:
        return f"{NOT}: both give the same rankings"
    verdict = found.verdict(sign)
    if verdict == "open":
        half = 100 * max(found.high - found.mean, found.mean - found.low)
        return f"{OPEN}: an effect of {half:.1f} would have shown"
    reproduced = f"{CONDITION}: {condition}" if condition else REPRODUCED
    return reproduced if verdict == "agrees" else NOT


def from_cells() -> Iterator[Claim]:
    """Lines of the parts that have stored cells."""
    yield from of_temperatures("static", ("foldoc",))
    yield from of_temperatures("L3, bf16", PLACES)
    yield from of_steps("static, long", ("foldoc",))
    yield from of_steps("L3", ("foldoc",))
    yield from of_steps("L3, long", PLACES)
    yield from of_steps("MiniLM", PLACES)
    yield from of_inheritance()
    yield from of_reading()
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
    for (claim, theirs), loss, scoring, how in (
        (QNORM, "qnorm", "matched", "as trained"),
        (QNORM, "qnorm", "calibrated", "calibrated"),
        (DNORM, "dnorm", "matched", "as trained"),
    ):
        best, own = (best_of_all(x, scoring) for x in (study.cosines, study.of_loss(loss, "auto", TAUS)))
        for test in tests if best and own else ():
            found = gain(own, best, [test], scoring)  # type: ignore[arg-type]
            if found is not None:
                setting = f"{horizon(name)}, both at their best τ; {how}"
                where = f"{setting}, {PLACES[test]}, {seeds(found[1])}"
                script = f'temperature_control.py "{name}"'
                yield Claim(MAGNITUDE, claim, theirs, where, found[0].show(), judge(found[0], 1), script)


def of_steps(name: str, tests: Iterable[str]) -> Iterator[Claim]:
    """More steps: QNorm over Cosine, and what scoring with the norm is worth to a model trained with it."""
    study = STUDIES[name]
    if study.chosen is None:
        return
    qnorm, dot = (study.of_loss(loss, "auto")[0] for loss in ("qnorm", "dot"))
    for test in tests:
        for (claim, theirs), condition, found in (
            (QNORM, "", gain(qnorm, study.chosen, [test], "matched")),
            (OWN_DOT, "", gain(dot, dot, [test], "matched", plain="cosine")),
            (
                OWN_QNORM,
                "an encoder in its own domain, one seed; not planned",
                gain(qnorm, qnorm, [test], "calibrated", plain="cosine"),
            ),
        ):
            if found is not None:
                how = ", as trained" if claim == QNORM[0] else ""
                setting = f"{horizon(name)}{how}; {PLACES[test]}, {seeds(found[1])}"
                script = f'temperature_control.py "{name}"'
                yield Claim(MAGNITUDE, claim, theirs, setting, found[0].show(), judge(found[0], 1, condition), script)


def of_low_temperature() -> Iterator[Claim]:
    """Learnable over Cosine at the low temperature."""
    for name, test, tuned in (
        ("static", "foldoc", True),
        ("L3, bf16", "wordnet", False),
        ("L3, bf16", "foldoc", False),
    ):
        study = STUDIES[name]
        if study.chosen is None:
            continue
        at_low = [study.at_low(loss) for loss in ("learnable", "cosine")]
        if not tuned:
            at_low = [[cell for cell in cells if cell.rate == study.chosen.rate] for cells in at_low]
        how = "both at their best rates" if tuned else "both at the rate that is best at .05"
        learned, cosine = (best_of_all(cells, "matched") for cells in at_low)
        found = gain(learned, cosine, [test], "matched") if learned and cosine else None
        if found is not None:
            yield Claim(
                OURS,
                f"Learned exponents are ahead of Cosine at the same low temperature, {LOW:g}",
                "",
                f"{horizon(name)}, as trained, {how}; {PLACES[test]}, {seeds(found[1])}",
                found[0].show(),
                judge(found[0], 1, "a temperature that is too low; not planned; .05 or TempAgg does more"),
                f'temperature_control.py "{name}"',
            )


def of_inheritance() -> Iterator[Claim]:
    """QNorm and DNorm as trained over Cosine at its best temperature, by base."""
    where = f"{inheritance.STEPS} steps of 32, as trained; FOLDOC and docstrings"
    claims = {"qnorm": QNORM, "dnorm": DNORM}
    for (base, how), (loss, (claim, theirs)) in product(inheritance.NAMES.items(), claims.items()):
        plain, cell = inheritance.control(base), inheritance.kept(base, loss, "matched")
        found = gain(cell, plain, ["foldoc", "docstrings"], "matched")
        if found is not None:
            setting = f"{how}, {where}, {seeds(found[1])}"
            yield Claim(MAGNITUDE, claim, theirs, setting, found[0].show(), judge(found[0], 1), "inheritance.py")
    for model, (loss, name) in product(inheritance.MODELS, {"qnorm": "QNorm", "dot": "Dot"}.items()):
        found = inheritance.inherited(model, loss, ["foldoc", "docstrings"])
        if found is not None:
            yield Claim(
                OURS,
                "A base pretrained with dot passes its norm on: gain over Cosine, minus the same gain from the base "
                "pretrained with cosine",
                "",
                f"{name}, {model}, {where}, {seeds(found[1])}",
                found[0].show(),
                judge(found[0], 1),
                "inheritance.py",
            )


def of_never_relevant() -> Iterator[Claim]:
    """QNorm over Cosine and its controls, where training and index hold texts that look like the queries."""
    for base, part, what in (
        ("L3", "with all", "pages that name the query and do not answer it"),
        ("examples", "with examples", "example sentences that use the word"),
    ):
        rows, how = pages.rows(base), f"L3, {pages.CELLS[base].steps} steps of 32, best τ"
        for control in ("Cosine", "Cosine + surface prior", "Cosine + embedding prior", "Cosine with prompts"):
            for test, place in pages.tests_of(base).items():
                after, before = rows.get("QNorm calibrated"), rows.get(control)
                found = pages.gain(after, before, test, part) if after and before else None
                if found is not None and (test == "wordnet" or "prior" not in control):
                    yield Claim(
                        OURS,
                        f"The norm tells answers from {what}: QNorm over Cosine, trained with the same negatives",
                        "",
                        f"over {control}: {how}; {place}, {seeds(found[1])}",
                        found[0].show(),
                        judge(found[0], 1, "no prompts, no filter" if control == "Cosine" else ""),
                        f"pages.py {base}",
                    )


def of_forgetting() -> Iterator[Claim]:
    """Dot over Cosine on the same rows, and over Cosine without their negatives."""
    for scoring in ("calibrated", "by cosine"):
        cell, key = forgetting.ROWS[f"Dot with boilerplate, {scoring}"]
        for before, rows in (
            (forgetting.WITH, "with the same negatives"),
            (forgetting.WITHOUT, "without these negatives"),
        ):
            found = gain(cell, before, forgetting.OTHERS, key, plain="matched")
            if found is not None:
                yield Claim(
                    OURS,
                    "A norm that takes up the boilerplate protects the directions: Dot over Cosine",
                    "",
                    f"{scoring}, over Cosine {rows}: MiniLM, docstrings, 40 steps of 32; five other domains, "
                    f"{seeds(found[1])}",
                    found[0].show(),
                    judge(found[0], 1),
                    "forgetting.py",
                )


def of_fragments() -> Iterator[Claim]:
    """Fragments that training has not shown: ranking with the norm, and dropping documents by it."""
    if not (pruned := stored()):
        return
    where, number = "L3, docstrings, fragments that training has not shown", seeds(len(pruned))
    for share in (0.0, 0.75):
        found = gain_at(pruned, "docstrings", share, "QNorm as trained")
        claim = "A norm that knows what is never relevant helps (d = 1.22 on BRIGHT): QNorm as trained over Cosine"
        setting = f"{where}, {share:.0%} of the index; {number}"
        yield Claim(MAGNITUDE, claim, "", setting, found.show(), judge(found, 1), "fragments.py")
    for name in ("text length", "surface features", "embeddings of Cosine"):
        found = kept_gain(pruned, name)
        claim = "The norm tells what to drop from an index: answers kept by half of it, %"
        yield Claim(OURS, claim, "", f"over {name}: {where}; {number}", found.show(), judge(found, 1), "fragments.py")


def of_reading() -> Iterator[Claim]:
    """Exact answers with the first document of QNorm less with that of Cosine."""
    claim = "Answers of a reader improve (Table 4, RAG): exact answers, %, QNorm over Cosine"
    if not reading.PATH.is_file():
        yield Claim(MAGNITUDE, claim, "", "", "", f"{OPEN}: not measured", "reading.py")
        return
    for scoring in ("matched", "calibrated"):
        found = reading.over_cosine(f"qnorm, {scoring}", "em")
        setting = f"SmolLM2-135M reads what the static table finds, {scoring}, 1 seed"
        yield Claim(MAGNITUDE, claim, "", setting, found.show(), judge(found, 1), "reading.py")


def of_convergence() -> Iterator[Claim]:
    """GradScale and cut-init over plain training, each at its own best rate."""
    for start, way in convergence.NAMES:
        cell, control = convergence.best(start, way), convergence.best(start, "plain")
        found = gain(cell, control, ["wordnet"], "matched") if way != "plain" and cell and control else None
        if found is not None:
            yield Claim(
                NORMS,
                f"{way} converges to a better model, here with AdamW, both at their best rates",
                "",
                f"{convergence.STARTS[start].words}, {cell.steps:,} steps of {cell.batch}; {seeds(found[1])}",
                found[0].show(),
                judge(found[0], 1),
                "convergence.py",
            )


def of_revela() -> Iterator[Claim]:
    """What a part of Revela is worth: the setting without it, less Revela."""
    for name, claim, theirs in (
        ("random groups", "Random groups ruin it (33.6 → 3.9)", "-29.7"),
        ("no V-norm", "Without V-normalisation it is worse (Fig. 4)", "-2 to -4"),
        ("replug", "REPLUG is behind it (BEIR), here after as many steps", "-5.3"),
    ):
        found = revela_text.with_revela(revela_text.LATEST, cell := revela_text.ABLATIONS[name])
        if found:
            estimate = revela_text.over_revela(revela_text.LATEST, cell)
            ruined = f"{NOT}: they take a third of the gain" if name == "random groups" else None
            setting = f"{REVELA_SETTING}, {seeds(len(found))}"
            verdict = ruined or judge(estimate, -1)
            yield Claim(REVELA, claim, theirs, setting, estimate.show(), verdict, "revela_text.py")


def of_sums() -> Iterator[Claim]:
    """The sums over temperatures against one temperature."""
    script, sizes = "compression_control.py", {"full": "in full", "quarter": "at a quarter", "bits": "in bits"}
    texts = compression_control.other_texts("static")
    rows = compression_control.stored(texts)
    for size, where in sizes.items() if len(rows) == len(texts) else ():
        for chosen_at in dict.fromkeys(("full", size)):
            estimate = compression_control.over_texts(rows, "TempAgg", chosen_at, size)
            if estimate is not None:
                how = f"{where}, dev chooses {'in full' if chosen_at == 'full' else 'at that size'}"
                yield Claim(
                    TEMPERATURE,
                    "TempAgg is ahead of one temperature, here of the one that dev chooses for each kind of text",
                    "",
                    f"{how}: static table, four kinds of text, 1,000 and 300 steps of 128; 3 seeds",
                    estimate.show(),
                    judge(estimate, 1, "" if chosen_at == size else "dev chooses in full"),
                    script,
                )
    cells, setting = compression_control.sums("static"), "static table, 1,000 steps of 128; FOLDOC"
    best = best_of([cell for cell in cells.values() if cell.loss == "cosine"], "matched")
    for size in ("quarter", "bits") if best else ():
        found = gain(cells["TempAggMRL"], best, ["foldoc"], "matched", size)  # type: ignore[arg-type]
        if found is not None:
            claim = "TempAggMRL is ahead of the one temperature that dev chooses"
            where = f"{sizes[size]}: {setting}, {seeds(found[1])}"
            yield Claim(TEMPERATURE, claim, "", where, found[0].show(), judge(found[0], 1), script)
    if cells and (found := gain(cells["TempAgg"], cells[f"τ {LOW:g}"], ["foldoc"], "matched")):
        claim = f"TempAgg needs no choice of a temperature: over τ {LOW:g}"
        verdict = f"{judge(found[0], 1)}; level with the one of four that dev chooses"
        where = f"in full: {setting}, {seeds(found[1])}"
        yield Claim(TEMPERATURE, claim, "", where, found[0].show(), verdict, script)


def of_sigreg() -> Iterator[Claim]:
    """What SIGReg does to the isotropy and to an index."""
    rows, script = compression_control.sigreg("static"), "compression_control.py"
    for batch in compression_control.BATCHES:
        cell = rows.get(f"batch {batch}, weight 0.05")
        where = f"static table, 1,000 steps of {batch}, weight .05; FOLDOC"
        if cell and len(scores := compression_control.isoscores(cell)):
            rise = over(scores - compression_control.isoscores(plain(cell)))
            setting = f"in hundredths: {where}, {seeds(len(scores))}"
            yield Claim(SIGREG, "IsoScore rises", "", setting, rise.show(), judge(rise, 1), script)
        for size, name in (("full", "in full"), ("bits", "in bits")) if cell else ():
            found = gain(cell, plain(cell), ["foldoc"], "matched", size)  # type: ignore[arg-type]
            if found is not None:
                claim, setting = "Retrieval suffers slightly", f"{name}: {where}, {seeds(found[1])}"
                yield Claim(SIGREG, claim, "slight loss", setting, found[0].show(), judge(found[0], -1), script)


def plain(cell: Cell) -> Cell:
    return replace(cell, sigreg=0.0)


def seeds(number: int) -> str:
    return f"{number} seed{'s' * (number > 1)}"


# What the pages report: source, script and page, then claim, the figure of the source, setting, our figure, verdict.
QUOTED = {
    (MAGNITUDE, "magnitude.py", "research/magnitude.md"): (
        (
            "Dot is ahead of Cosine (Table 1, BEIR), here with explicit negatives that are never relevant",
            "+2.5, +1.8",
            "MiniLM, docstrings, 40 steps of 32, calibrated; five other domains",
            "+1.2 [+0.4, +2.1]",
            f"{CONDITION}: such negatives, and calibration; Cosine without them is ahead of it",
        ),
        (
            "Without pretraining the norm does harm (Table 2, BEIR, QNorm)",
            "-8.9",
            "random table, 500 steps of 128; five other domains",
            "-7.5 [-8.4, -6.6]",
            REPRODUCED,
        ),
        (
            "A base that ended in Normalize loses (Table 16, E5, BEIR, QNorm)",
            "-15.2",
            "MiniLM, 40 steps of 32, as trained; five other domains",
            "-2.7 [-3.9, -1.6]",
            f"{REPRODUCED}, a fifth of the size",
        ),
        (
            "The norm comes to stand for relevance (Cohen's d, Table 3, QNorm)",
            "+.32",
            "MiniLM on docstrings with never-relevant negatives; on WordNet without them",
            "+1.48; -0.16",
            f"{CONDITION}: negatives that are never relevant",
        ),
        (
            "Gains follow d (Fig. 3), r over data sets",
            "+.57, +.68",
            "static table; random table",
            "+.65 and +.75",
            f"{REPRODUCED} on two of five bases, open on three",
        ),
        (*OWN_DOT, "five bases, two training sets, dev", "worse by 1 to 8 points", NOT),
        (
            "The learned exponent of documents ends above that of queries",
            "",
            "all runs of Learnable",
            "all 26 runs",
            REPRODUCED,
        ),
    ),
    (MAGNITUDE, "norms.py", "research/magnitude.md"): (
        (
            "One-sided similarities fail on STS (Table 5, Spearman, QNorm against Cosine)",
            "41.3, 78.8",
            "static table, scored pairs, at the paper's scale .01; at the measured scale",
            "14.7 ± 6.0; 83.0 ± 1.7",
            f"{CONDITION}: the paper's scale; at their own they are 3 points behind",
        ),
    ),
    (MAGNITUDE, "clip.py", "research/clip.md"): (
        (
            "CLIP: dot is ahead of cosine in the trained direction (Table 6, NoNorm, I→T)",
            "+3.2",
            "small CLIP on emoji from scratch, unseen style, three seeds",
            "+5.3 ± 3.7",
            REPRODUCED,
        ),
        (
            "The same for nonorm-t2i, txtnorm-t2i and imgnorm-i2t",
            "+3.2; +5.8; +1.6",
            "the same, five seeds",
            "+2.3 ± 1.2; +2.5 ± 1.9; +1.2 ± 2.1",
            f"{REPRODUCED} for the two T→I; {OPEN} for I→T: an effect of 2.1 would have shown",
        ),
        (
            "CLIP: a symmetric loss learns no magnitude (d of texts)",
            "-.06",
            "NoNorm-Sym, unseen style, five seeds",
            "+0.33 ± 0.04",
            NOT,
        ),
    ),
    (TEMPERATURE, "temperature.py", "research/temperature_paper.md"): (
        (
            "A high temperature leaves fewer directions (intrinsic dimension, τ .03 → .3)",
            "-224",
            "MiniLM, 40 steps of 64, three seeds",
            "-45.3 ± 1.2",
            REPRODUCED,
        ),
        ("It retains more at a quarter of the dimensions", "+5.6", "the same", "+7.9 ± 2.4", REPRODUCED),
        (
            "It costs quality at full size",
            "-8.1",
            "the same",
            "-5.1 ± 0.9",
            f"{REPRODUCED}; on the static table .1 is best also at full size",
        ),
        ("It clusters better (v-measure)", "+5.1", "the same", "-4.5 ± 0.1", NOT),
        (
            "The sum over temperatures and prefixes is better than τ .03 at a quarter",
            "+1.5",
            "the same, TempAggMRL",
            "+2.4 ± 0.2",
            f"{CONDITION}: the single temperature is .03; one of .06 to .1 does as well",
        ),
    ),
    (SIGREG, "sigreg.py", "isotropy.md"): (
        (
            "IsoScore rises",
            "",
            "MiniLM, docstrings, one epoch at batch 128 without and with, one seed",
            ".148; .206",
            f"{REPRODUCED} (one seed)",
        ),
        (
            "A small batch with it is more isotropic than a large one without it (64 against 2,048)",
            "",
            "MiniLM, docstrings, batch 32 with; 128 without, one seed",
            ".115; .148",
            f"{NOT} (one seed)",
        ),
        (
            "Retrieval suffers slightly",
            "slight loss",
            "MiniLM, docstrings, batch 32; 128, weight .05, one seed",
            "does not change at batch size 32 and falls by .036 at 128",
            f"{CONDITION}: the weight must fall as the batch grows (one seed)",
        ),
    ),
    (REVELA, "copy_task.py", "research/revela.md"): (
        (
            "Next-token prediction teaches a retriever which text helps",
            "",
            "copy task, τ .05, share of the partner before; after",
            ".25 ± .02; .98 ± .01",
            f"{REPRODUCED} on made-up text",
        ),
        (
            "Random groups teach nothing (33.6 → 3.9)",
            "33.6 → 3.9",
            "copy task, before; after",
            ".25 ± .02; .24 ± .01",
            REPRODUCED,
        ),
    ),
    (REVELA, "revela.py text", "research/revela.md"): (
        (
            "Raw text alone makes a retriever",
            "33.6 to 42.3",
            "MiniLM, 120 steps of 8 chunks, nDCG@10 over the start, one seed",
            "+.005 [-.009, +.020]",
            f"{OPEN}: an effect of 1.5 points would have shown",
        ),
    ),
    (REVELA, "revela_text.py", "research/revela.md"): (
        (
            "The same for a retriever that was never trained contrastively",
            "",
            f"{REVELA_SETTING}, nDCG@10 over the start, three seeds",
            "+16.3 [+13.7, +19.0]",
            f"{CONDITION}: a language model that reads; InfoNCE gains 5.0 more; subtracting the mean does too",
        ),
    ),
    (NORMS, "norms.py", "research/norms.md"): (
        (
            "A step turns an embedding by lr over its squared norm (Theorem 3.4): exponent of the norm",
            "2",
            "free points, norms 1 to 8",
            "1.97",
            REPRODUCED,
        ),
        (
            "Inputs of unseen classes have smaller norms (Fig. 3), ratio",
            "below 1",
            "SimCLR on digits, five seeds",
            ".61 ± .05",
            REPRODUCED,
        ),
        (
            "Frequent classes have larger norms (Fig. 2c)",
            "",
            "latent classes, five seeds",
            "-0.1 ± 4.2",
            f"{OPEN}: an effect of 4.2 would have shown",
        ),
        (
            "Cut-init converges to a better model, imbalanced classes (SGD, kNN accuracy)",
            "+4.6",
            "SimCLR on digits, 100 epochs, five seeds",
            "-3.4 ± 2.9",
            NOT,
        ),
        (
            "GradScale does, imbalanced classes (SGD)",
            "+4.8",
            "the same",
            "-0.3 ± 1.1",
            f"{OPEN}: an effect of 1.1 would have shown",
        ),
    ),
}


def from_pages() -> Iterator[Claim]:
    """Lines of what the pages report already."""
    for (source, script, page), rows in QUOTED.items():
        for claim, theirs, setting, ours, verdict in rows:
            yield Claim(source, claim, theirs, setting, ours, verdict, script, page)


@cache
def every_claim() -> tuple[Claim, ...]:
    """All lines, made once for all tables."""
    return (*from_cells(), *from_pages())


def table(source: str) -> list[str]:
    """The lines of a source, those from cells first, and those with the same claim together."""
    claims = [claim for claim in every_claim() if claim.source == source]
    first = list(dict.fromkeys(claim.claim for claim in claims))
    claims.sort(key=lambda claim: first.index(claim.claim))
    columns = ["claim", "the source", "our setting and script", "our figure", "verdict"]
    ruler = ["---", "---:", "---", "---", "---"]
    if source == OURS:
        del columns[1], ruler[1]
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, ruler)]
    return lines + [claim.row(before) for before, claim in zip([None, *claims], claims, strict=False)]

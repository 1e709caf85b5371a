"""The claims of the sources, each with our figure: from the stored cells, or from the page that reports it.

A figure that is not from cells is quoted from a page of the docs as it stands there; a test checks that it does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from temperature_control import LOW, STUDIES, TAUS, best_of_all

REPRODUCED, CONDITION, NOT, OPEN = "reproduced", "reproduced under a condition", "not reproduced", "open"
MAGNITUDE, TEMPERATURE, SIGREG = "Magnitude, v1", "Temperature", "SIGReg"
STUDY_PAGES = {  # of scripts whose cells are stored
    "compression_control.py": "evidence/compression.md",
    "convergence.py": "evidence/convergence.md",
    "forgetting.py": "evidence/boilerplate.md",
    "fragments.py": "evidence/boilerplate.md",
    "inheritance.py": "evidence/inheritance.md",
    "pages.py": "evidence/boilerplate.md",
    "reading.py": "evidence/reading.md",
    "revela_text.py": "evidence/revela.md",
    "temperature_control.py": "evidence/temperature.md",
}
REVELA, NORMS = "Revela", "Norms"


@dataclass(frozen=True)
class Claim:
    """One line of the table.

    Attributes:
        source: Key of the list of sources on the page.
        claim: What the source says.
        theirs: Its figure.
        setting: Model, data and steps of ours.
        ours: Our figure with its interval; empty if nothing has been measured.
        verdict: One of the four, with the condition or what is missing.
        page: The page of docs/ that reports our figure; "" for that of the script's study.
        script: What prints it.
    """

    source: str
    claim: str
    theirs: str
    setting: str
    ours: str
    verdict: str
    script: str
    page: str = ""

    @property
    def row(self) -> str:
        page = self.page or STUDY_PAGES.get(self.script.split()[0])
        script = f"[{self.script}]({page})" if page else self.script
        # An interval stays on one line.
        ours = re.sub(r"(?<=\d),? (?=[\[+-]|± )|(?<=±) ", lambda space: space[0].replace(" ", "\u00a0"), self.ours)
        cells = (self.source, self.claim, self.theirs, self.setting, ours, self.verdict, script)
        return "| " + " | ".join(cells) + " |"


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
    study = STUDIES["static"]
    if study.chosen:
        where = f"static table, WordNet, {study.steps:,} steps of {study.batch}; FOLDOC"
        script = "temperature_control.py"
        for loss, name, theirs, scoring, how in (
            ("qnorm", "QNorm", "+3.1, +2.8", "matched", "as trained"),
            ("qnorm", "QNorm", "+3.1, +2.8", "calibrated", "calibrated"),
            ("dnorm", "DNorm", "+1.5, +2.9", "matched", "as trained"),
        ):
            best, grid = best_of(study.cosines, scoring), study.of_loss(loss, "auto", TAUS)
            own = best_of(grid, scoring) if all(cell.path.is_file() for cell in [*grid, *study.cosines]) else None
            found = gain(own, best, ["foldoc"], scoring) if own and best else None
            if found is not None:
                claim = f"{name} is ahead of Cosine on BEIR (Table 1; τ .05), here both at their best τ on dev"
                setting = f"{where}; {how}, {seeds(found[1])}"
                yield Claim(MAGNITUDE, claim, theirs, setting, found[0].show(), judge(found[0], 1), script)
        kept, plain_low = (best_of_all(study.at_low(loss), "matched") for loss in ("learnable", "cosine"))
        found = gain(kept, plain_low, ["foldoc"], "matched") if kept and plain_low else None
        if found is not None:
            yield Claim(
                "this package",
                f"Learned exponents are ahead of Cosine at the same low temperature, {LOW:g}, both at their best rates",
                "",
                f"{where}; as trained, {seeds(found[1])}",
                found[0].show(),
                judge(found[0], 1, "a temperature that is too low; not planned; .05 or TempAgg does more"),
                script,
            )
    yield from of_steps()
    yield from of_inheritance()
    yield from of_never_relevant()
    yield from of_forgetting()
    yield from of_compression()
    yield from of_reading()
    yield from of_convergence()
    yield from of_revela()
    if pruned := stored():
        where = f"L3, docstrings, fragments that training has not shown, {seeds(len(pruned))}"
        for share in (0.0, 0.75):
            found_gain = gain_at(pruned, "docstrings", share, "QNorm as trained")
            claim = f"A norm that knows what is never relevant helps (d = 1.22 on BRIGHT), {share:.0%} fragments"
            setting = f"{where}; QNorm as trained, over Cosine"
            yield Claim(MAGNITUDE, claim, "", setting, found_gain.show(), judge(found_gain, 1), "fragments.py")
        for name in ("text length", "surface features", "embeddings of Cosine"):
            found_kept = kept_gain(pruned, name)
            claim = f"The norm tells what to drop from an index: answers kept by half of it, over {name}, %"
            yield Claim("this package", claim, "", where, found_kept.show(), judge(found_kept, 1), "fragments.py")


def of_steps() -> Iterator[Claim]:
    """More steps: QNorm over Cosine, and what scoring with the norm is worth to a model trained with it."""
    for name, where, test, place in (
        ("static, long", "static table", "foldoc", "FOLDOC"),
        ("L3", "L3", "foldoc", "FOLDOC"),
        ("L3, long", "L3", "foldoc", "FOLDOC"),
        ("L3, long", "L3", "wordnet", "in domain"),
        ("MiniLM", "MiniLM", "foldoc", "FOLDOC"),
        ("MiniLM", "MiniLM", "wordnet", "in domain"),
    ):
        study = STUDIES[name]
        if study.chosen is None:
            continue
        setting = f"{where}, WordNet, {study.steps:,} steps of {study.batch}; {place}"
        kept, dot = (study.of_loss(loss, "auto")[0] for loss in ("qnorm", "dot"))
        for claim, theirs, condition, found in (
            (
                "Gains over Cosine need sufficient data (abstract of v2), here more steps: QNorm as trained",
                "+3.1, +2.8",
                "",
                gain(kept, study.chosen, [test], "matched"),
            ),
            (
                "A model trained with Dot is better by dot than by cosine (Table 18)",
                "+2.0, +3.1",
                "",
                gain(dot, dot, [test], "matched", plain="cosine"),
            ),
            (
                "A model trained with QNorm is better at the exponent that dev chooses than by cosine (Table 18: Dot)",
                "+2.0, +3.1",
                "an encoder in its own domain; not planned",
                gain(kept, kept, [test], "calibrated", plain="cosine"),
            ),
        ):
            if found is not None:
                where_and_seeds = f"{setting}, {seeds(found[1])}"
                verdict, script = judge(found[0], 1, condition), f'temperature_control.py "{name}"'
                yield Claim(MAGNITUDE, claim, theirs, where_and_seeds, found[0].show(), verdict, script)


def of_inheritance() -> Iterator[Claim]:
    """QNorm and DNorm as trained over Cosine at its best temperature, by base."""
    where = f"WordNet, {inheritance.STEPS} steps of 32; FOLDOC and docstrings, as trained"
    for model, (loss, name) in product(inheritance.MODELS, {"qnorm": "QNorm", "dot": "Dot"}.items()):
        found = inheritance.inherited(model, loss, ["foldoc", "docstrings"])
        if found is not None:
            yield Claim(
                "this package",
                f"A base pretrained with dot passes its norm on: {name} over Cosine, more than from a base pretrained "
                "with cosine",
                "",
                f"{model}, {where}, {seeds(found[1])}",
                found[0].show(),
                judge(found[0], 1),
                "inheritance.py",
            )
    losses = (("qnorm", "QNorm", "+3.1"), ("dnorm", "DNorm", "+1.5"))
    for (base, how), (loss, name, theirs) in product(inheritance.NAMES.items(), losses):
        plain, cell = inheritance.control(base), inheritance.kept(base, loss, "matched")
        found = gain(cell, plain, ["foldoc", "docstrings"], "matched")
        if found is not None:
            yield Claim(
                MAGNITUDE,
                f"{name} is ahead of Cosine, from {how} (Table 1, Contriever: pretrained with dot)",
                theirs if base.endswith("dot") else "",
                f"{how.split()[0]}, {where}, {seeds(found[1])}",
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
        rows = pages.rows(base)
        for control in ("Cosine", "Cosine + surface prior", "Cosine + embedding prior", "Cosine with prompts"):
            for test, place in pages.tests_of(base).items():
                after, before = rows.get("QNorm calibrated"), rows.get(control)
                found = pages.gain(after, before, test, part) if after and before else None
                if found is not None and (test == "wordnet" or "prior" not in control):
                    yield Claim(
                        "this package",
                        f"The norm tells answers from {what}, over {control} with the same negatives",
                        "",
                        f"L3, WordNet, {pages.CELLS[base].steps} steps of 32, best τ; {place}, {seeds(found[1])}",
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
                    "this package",
                    f"A norm that takes up the boilerplate protects the directions: Dot, {scoring}, over Cosine {rows}",
                    "",
                    f"MiniLM, docstrings, 40 steps of 32; five other domains, {seeds(found[1])}",
                    found[0].show(),
                    judge(found[0], 1),
                    "forgetting.py",
                )


def of_reading() -> Iterator[Claim]:
    """Exact answers with the first document of QNorm less with that of Cosine."""
    claim = "Answers of a reader improve (Table 4, RAG): exact answers, %, QNorm over Cosine"
    if not reading.PATH.is_file():
        yield Claim(MAGNITUDE, claim, "", "", "", f"{OPEN}: not measured", "reading.py")
        return
    for scoring in ("matched", "calibrated"):
        found = reading.over_cosine(f"qnorm, {scoring}", "em")
        setting = f"SmolLM2-135M reads what the static table finds, WordNet, {scoring}, 1 seed"
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
                f"{convergence.STARTS[start].words}, WordNet, {cell.steps:,} steps of {cell.batch}; {seeds(found[1])}",
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
            yield Claim(
                REVELA,
                claim,
                theirs,
                f"token vectors of SmolLM2 under a linear map, 48 steps of 64 chunks, {seeds(len(found))}",
                estimate.show(),
                ruined or judge(estimate, -1),
                "revela_text.py",
            )


def of_compression() -> Iterator[Claim]:
    """The sums against the temperature that dev chooses, and what SIGReg does to an index."""
    where = "static table, WordNet, 1,000 steps of 128; FOLDOC"
    for size, name in (("quarter", "at a quarter of the dimensions"), ("bits", "in bits")):
        rows = compression_control.sums("static")
        best = best_of([cell for cell in rows.values() if cell.loss == "cosine"], "matched")
        for label in ("TempAgg", "TempAggMRL"):
            cell = rows.get(label)
            found = gain(cell, best, ["foldoc"], "matched", size) if cell and best else None
            if found is not None:
                claim = f"{label} is ahead {name}, here of the one temperature that dev chooses"
                yield Claim(
                    TEMPERATURE,
                    claim,
                    "",
                    f"{where}; {seeds(found[1])}",
                    found[0].show(),
                    judge(found[0], 1),
                    "compression_control.py",
                )
    sums, common = compression_control.sums("static"), LOW
    if found := gain(sums["TempAgg"], sums[f"τ {common:g}"], ["foldoc"], "matched") if sums else None:
        claim = f"TempAgg needs no choice of a temperature: in full, over τ {common:g}"
        setting = f"{where}; {seeds(found[1])}"
        verdict = f"{judge(found[0], 1)}; level with the one of four that dev chooses"
        yield Claim(TEMPERATURE, claim, "", setting, found[0].show(), verdict, "compression_control.py")
    rows = compression_control.stored(compression_control.other_texts("static"))
    complete = len(rows) and len(rows) == len(compression_control.other_texts("static"))
    names = {"full": "in full", "quarter": "at a quarter of the dimensions", "bits": "in bits"}
    for size, name in names.items() if complete else ():
        for chosen_at in dict.fromkeys(("full", size)):
            estimate = compression_control.over_texts(rows, "TempAgg", chosen_at, size)
            if estimate is not None:
                how = "in full" if chosen_at == "full" else "at that size"
                yield Claim(
                    TEMPERATURE,
                    f"TempAgg is ahead {name} of the one temperature that dev chooses {how}, for each kind of text",
                    "",
                    "static table, four kinds of text, 1,000 and 300 steps of 128; 3 seeds",
                    estimate.show(),
                    judge(estimate, 1, "" if chosen_at == size else "dev chooses in full"),
                    "compression_control.py",
                )
    rows = compression_control.sigreg("static")
    for batch in compression_control.BATCHES:
        cell = rows.get(f"batch {batch}, weight 0.05")
        if cell and len(scores := compression_control.isoscores(cell)):
            rise = over(scores - compression_control.isoscores(plain(cell)))
            setting = f"{where.replace('128', str(batch))}; {seeds(len(scores))}"
            claim = f"IsoScore rises (batch {batch}, weight .05), in hundredths"
            yield Claim(SIGREG, claim, "", setting, rise.show(), judge(rise, 1), "compression_control.py")
        for size, name in (("full", "in full"), ("bits", "in bits")) if cell else ():
            found = gain(cell, plain(cell), ["foldoc"], "matched", size)  # type: ignore[arg-type]
            if found is not None:
                yield Claim(
                    SIGREG,
                    f"Retrieval suffers slightly (batch {batch}, weight .05, {name})",
                    "slight loss",
                    f"{where.replace('128', str(batch))}; {seeds(found[1])}",
                    found[0].show(),
                    judge(found[0], -1),
                    "compression_control.py",
                )


def plain(cell: Cell) -> Cell:
    return replace(cell, sigreg=0.0)


def seeds(number: int) -> str:
    return f"{number} seed{'s' * (number > 1)}"


def from_pages() -> Iterator[Claim]:
    """Lines of what the pages report already."""
    study, page = "magnitude.py", "magnitude.md"
    yield Claim(
        MAGNITUDE,
        "Fine-tuning that keeps the norm is ahead of Cosine (Table 1, BEIR, QNorm)",
        "+3.1, +2.8",
        "MiniLM, WordNet, 40 steps of 32; five other domains, as trained",
        "-2.7 [-3.9, -1.6]",
        f"{NOT}; at 40 steps, from a base that ended in Normalize",
        study,
        page,
    )
    yield Claim(
        MAGNITUDE,
        "The same with explicit negatives that are never relevant, at an exponent chosen on dev (Dot)",
        "+2.5, +1.8",
        "MiniLM, docstrings, 40 steps of 32; five other domains",
        "+1.2 [+0.4, +2.1]",
        f"{CONDITION}: such negatives, and calibration; Cosine without them is ahead of it",
        study,
        page,
    )
    yield Claim(
        MAGNITUDE,
        "Without pretraining the norm does harm (Table 2, BEIR, QNorm)",
        "-8.9",
        "random table, WordNet, 500 steps of 128; five other domains",
        "-7.5 [-8.4, -6.6]",
        REPRODUCED,
        study,
        page,
    )
    yield Claim(
        MAGNITUDE,
        "A base that ended in Normalize loses (Table 16, E5, BEIR, QNorm)",
        "-15.2",
        "MiniLM, WordNet, 40 steps of 32; five other domains",
        "-2.7 [-3.9, -1.6]",
        f"{REPRODUCED}, a fifth of the size",
        study,
        page,
    )
    yield Claim(
        MAGNITUDE,
        "The norm comes to stand for relevance (Cohen's d, Table 3, QNorm)",
        "+.32",
        "MiniLM on docstrings with never-relevant negatives; on WordNet without them",
        "+1.48; -0.16",
        f"{CONDITION}: negatives that are never relevant",
        study,
        page,
    )
    yield Claim(
        MAGNITUDE,
        "Gains follow d (Fig. 3), r over data sets",
        "+.57, +.68",
        "static table; random table",
        "+.65 and +.75",
        f"{REPRODUCED} on two of five bases, open on three",
        study,
        page,
    )
    yield Claim(
        MAGNITUDE,
        "A model trained with Dot is better by dot than by cosine (Table 18)",
        "+2.0, +3.1",
        "five bases, two training sets, dev",
        "worse by 1 to 8 points",
        NOT,
        study,
        page,
    )
    yield Claim(
        MAGNITUDE,
        "The learned exponent of documents ends above that of queries",
        "",
        "all runs of Learnable",
        "all 26 runs",
        REPRODUCED,
        study,
        page,
    )
    yield Claim(
        MAGNITUDE,
        "One-sided similarities fail on STS (Table 5, Spearman, QNorm against Cosine)",
        "41.3, 78.8",
        "static table, scored pairs, at the paper's scale .01; at the measured scale",
        "14.7 ± 6.0; 83.0 ± 1.7",
        f"{CONDITION}: the paper's scale; at their own they are 3 points behind",
        "norms.py",
        page,
    )
    yield Claim(
        MAGNITUDE,
        "CLIP: dot is ahead of cosine in the trained direction (Table 6, NoNorm, I→T)",
        "+3.2",
        "small CLIP on emoji from scratch, unseen style, three seeds",
        "+5.3 ± 3.7",
        REPRODUCED,
        "clip.py",
        "clip.md",
    )
    yield Claim(
        MAGNITUDE,
        "The same for nonorm-t2i, txtnorm-t2i and imgnorm-i2t",
        "+3.2; +5.8; +1.6",
        "the same, five seeds",
        "+2.3 ± 1.2; +2.5 ± 1.9; +1.2 ± 2.1",
        f"{REPRODUCED} for the two T→I; {OPEN} for I→T: an effect of 2.1 would have shown",
        "clip.py",
        "clip.md",
    )
    yield Claim(
        MAGNITUDE,
        "CLIP: a symmetric loss learns no magnitude (d of texts)",
        "-.06",
        "NoNorm-Sym, unseen style, five seeds",
        "+0.33 ± 0.04",
        NOT,
        "clip.py",
        "clip.md",
    )
    study, page = "temperature.py", "compression.md"
    yield Claim(
        TEMPERATURE,
        "A high temperature leaves fewer directions (intrinsic dimension, τ .03 → .3)",
        "-224",
        "MiniLM, WordNet, 40 steps of 64, three seeds",
        "-45.3 ± 1.2",
        REPRODUCED,
        study,
        page,
    )
    yield Claim(
        TEMPERATURE,
        "It retains more at a quarter of the dimensions",
        "+5.6",
        "the same",
        "+7.9 ± 2.4",
        REPRODUCED,
        study,
        page,
    )
    yield Claim(
        TEMPERATURE,
        "It costs quality at full size",
        "-8.1",
        "the same",
        "-5.1 ± 0.9",
        f"{REPRODUCED}; on the static table .1 is best also at full size",
        study,
        page,
    )
    yield Claim(TEMPERATURE, "It clusters better (v-measure)", "+5.1", "the same", "-4.5 ± 0.1", NOT, study, page)
    yield Claim(
        TEMPERATURE,
        "The sum over temperatures and prefixes is better than τ .03 at a quarter",
        "+1.5",
        "the same, TempAggMRL",
        "+2.4 ± 0.2",
        f"{CONDITION}: the single temperature is .03; one of .06 to .1 does as well",
        study,
        page,
    )
    study, page = "sigreg.py", "isotropy.md"
    yield Claim(
        SIGREG,
        "IsoScore rises",
        "",
        "MiniLM, docstrings, one epoch at batch 128 without and with, one seed",
        ".148; .206",
        f"{REPRODUCED} (one seed)",
        study,
        page,
    )
    yield Claim(
        SIGREG,
        "A small batch with it is more isotropic than a large one without it (64 against 2,048)",
        "",
        "batch 32 with; 128 without",
        ".115; .148",
        f"{NOT} (one seed)",
        study,
        page,
    )
    yield Claim(
        SIGREG,
        "Retrieval suffers slightly",
        "slight loss",
        "batch 32; 128, weight .05",
        "does not change at batch size 32 and falls by .036 at 128",
        f"{CONDITION}: the weight must fall as the batch grows (one seed)",
        study,
        page,
    )
    study, page = "copy_task.py", "revela.md"
    yield Claim(
        REVELA,
        "Next-token prediction teaches a retriever which text helps",
        "",
        "copy task, τ .05, share of the partner before; after",
        ".25 ± .02; .98 ± .01",
        f"{REPRODUCED} on made-up text",
        study,
        page,
    )
    yield Claim(
        REVELA,
        "Random groups teach nothing (33.6 → 3.9)",
        "33.6 → 3.9",
        "copy task, before; after",
        ".25 ± .02; .24 ± .01",
        REPRODUCED,
        study,
        page,
    )
    yield Claim(
        REVELA,
        "Raw text alone makes a retriever",
        "33.6 to 42.3",
        "MiniLM, 120 steps of 8 chunks, nDCG@10 over the start, one seed",
        "+.005 [-.009, +.020]",
        f"{OPEN}: an effect of 1.5 points would have shown",
        "revela.py text",
        page,
    )
    study, where = "revela_text.py", "token vectors of SmolLM2 under a linear map, 48 steps of 64 chunks"
    yield Claim(
        REVELA,
        "The same for a retriever that was never trained contrastively",
        "",
        f"{where}, nDCG@10 over the start, three seeds",
        "+16.3 [+13.7, +19.0]",
        f"{CONDITION}: a language model that reads; InfoNCE gains 5.0 more; subtracting the mean does too",
        study,
        page,
    )
    study, page = "norms.py", "norms.md"
    yield Claim(
        NORMS,
        "A step turns an embedding by lr over its squared norm (Theorem 3.4): exponent of the norm",
        "2",
        "free points, norms 1 to 8",
        "1.97",
        REPRODUCED,
        study,
        page,
    )
    yield Claim(
        NORMS,
        "Inputs of unseen classes have smaller norms (Fig. 3), ratio",
        "below 1",
        "SimCLR on digits, five seeds",
        ".61 ± .05",
        REPRODUCED,
        study,
        page,
    )
    yield Claim(
        NORMS,
        "Frequent classes have larger norms (Fig. 2c)",
        "",
        "latent classes, five seeds",
        "-0.1 ± 4.2",
        f"{OPEN}: an effect of 4.2 would have shown",
        study,
        page,
    )
    yield Claim(
        NORMS,
        "Cut-init converges to a better model, imbalanced classes (SGD, kNN accuracy)",
        "+4.6",
        "SimCLR on digits, 100 epochs, five seeds",
        "-3.4 ± 2.9",
        NOT,
        study,
        page,
    )
    yield Claim(
        NORMS,
        "GradScale does, imbalanced classes (SGD)",
        "+4.8",
        "the same",
        "-0.3 ± 1.1",
        f"{OPEN}: an effect of 1.1 would have shown",
        study,
        page,
    )


def table() -> list[str]:
    """All lines, those from cells first within their source."""
    lines = ["| source | claim | the source | our setting | our figure | verdict | script |"]
    lines.append("| --- | --- | ---: | --- | --- | --- | --- |")
    claims = [*from_cells(), *from_pages()]
    order = list(dict.fromkeys(claim.source for claim in from_pages()))
    rank = {source: i for i, source in enumerate([order[0], "this package", *order[1:]])}
    return lines + [claim.row for claim in sorted(claims, key=lambda claim: rank[claim.source])]

"""Parts B and C of the evidence: how much of a gain is temperature, and how does it change with the number of steps?

    python benchmarks/evidence/temperature_control.py [STUDY] [--curves | --low]

In version 1 of arXiv 2602.09229 the baseline is cosine at a temperature of .05. DNorm ranks as cosine does, and yet it
has all of the gain that QNorm has on RetroMAE (BEIR +2.9 and +2.8): a query norm is a temperature for each query. So
every gain is reported twice, against Cosine at .05 and against Cosine at the temperature that is best on dev.

Training: WordNet, lemma -> definition, in-batch negatives. Dev: 300 queries over 2,500 definitions. Tests: 1,000
queries over 5,000 held-out definitions, and FOLDOC, 500 queries over 3,000 entries. The learning rate is chosen on dev
under Cosine at .05 and is the same for all. Cosine has the temperatures .01, .02, .05, .1, and a learned one. Dot,
QNorm, DNorm and Learnable have scale=20 (raw norms in the softmax), scale="auto" (20 over the mean norms: a temperature
of .05 at the start), and "auto" with the temperature of the same four that is best on dev.

Expected before the run, static table: Cosine is best at .05 or .1 on dev, .01 is 2 points or more behind, and a learned
one ends within a point of .05. DNorm is within 1 point of Cosine at every scale and not ahead of the best temperature.
Dot and QNorm at "auto" are 4 to 10 points behind as trained, 0 to 2 at the calibrated exponent, and a temperature of
their own does not change either sign. No gain over the best Cosine temperature excludes 0 upwards. The gap as trained
shrinks with the steps and does not close.

Expected before the run, L3 (never normalised by its authors, trained contrastively by cosine; token table frozen, 24
tokens): as for the static table, with gaps of half the size, and the gap as trained shrinks with the steps. MiniLM
(which ended in Normalize) as L3.

"L3, bf16" (the temperatures, in bfloat16; expected after .05 and the static table): Cosine is best at .05 or .1 on
dev, and .01 is a point or more behind. At .02 Learnable is 0 to 2 points ahead of Cosine at .02 in domain, half of what
it is on the static table, and so is Cosine at .05. QNorm as trained, both at their best temperature, is within 1 point
of Cosine in domain, and no gain over Cosine at its best excludes 0 upwards.

"L3, long" (nothing frozen, 32 tokens, 6,000 steps in bfloat16; expected after the 1,500 steps, in which the gap went
from 4.7 points to 1.5): the gap as trained is .3 to 1 point at the end, QNorm at the calibrated exponent is level, and
neither is clearly ahead of Cosine.

MiniLM, 3,000 steps in bfloat16 (expected after those 6,000): as trained QNorm is 3 points or more behind before the
training, and .5 to 2 points behind at its end in domain, because a base that ended in Normalize has more to unlearn; on
FOLDOC 2 to 4; calibrated within 1 in domain. Expected before its seeds 1 and 2, after seed 0 (-.3 and +.1 in domain,
-1.4 and +.2 on FOLDOC): QNorm at the exponent that dev chooses is .2 to 1 point ahead of its own cosine in domain, and
within half a point of Cosine, level.

--low asks whether a temperature of .02 only needs another learning rate: Cosine and Learnable at .02 with every rate of
the study. Expected before the run: Cosine gains 1 to 3 points from a lower rate, and Learnable, each at its own best
rate, is 0 to 2 points ahead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent))
from cells import SCORINGS, Cell, best_of, dev_of, gain, per_query, run, seeds_of

from st_magnitude._plot import draw

TAUS = (0.01, 0.02, 0.05, 0.1)
LOW = 0.02  # a temperature that many retrievers are trained with
LOSSES = {"qnorm": "QNorm", "dnorm": "DNorm", "dot": "Dot", "learnable": "Learnable"}
PLACES = {"wordnet": "in domain", "foldoc": "FOLDOC"}
PICTURES = Path(__file__).parents[2] / "docs" / "assets" / "evidence"


def best_of_all(cells: Sequence[Cell], scoring: str) -> Cell | None:
    """The best one on dev with seed 0; None before all of them are stored."""
    return best_of(cells, scoring) if all(replace(cell, seed=0).path.is_file() for cell in cells) else None


@dataclass(frozen=True)
class Study:
    """One base at one horizon, with the rates among which dev chooses."""

    base: str
    steps: int
    batch: int
    rates: tuple[float, ...]
    bf16: bool = False
    pictured: tuple[str, ...] = ("steps",)  # keys of PAINTERS

    def cosine(self, rate: float) -> Cell:
        return Cell(self.base, "wordnet", "cosine", 0, self.steps, self.batch, rate, bf16=self.bf16)

    @property
    def chosen(self) -> Cell | None:
        """Cosine at .05 and the rate that is best on dev; None before all rates were tried."""
        return best_of_all([self.cosine(rate) for rate in self.rates], "matched")

    @property
    def cosines(self) -> list[Cell]:
        return [replace(self.chosen, temperature=tau) for tau in (*TAUS, "learned")] if self.chosen else []

    def of_loss(self, loss: str, scale: float | str, taus: Iterable[float] = (0.05,)) -> list[Cell]:
        return [replace(self.chosen, loss=loss, scale=scale, temperature=tau) for tau in taus] if self.chosen else []

    def at_low(self, loss: str) -> list[Cell]:
        """A loss at the low temperature with each of the rates."""
        cells = self.of_loss(loss, 20.0 if loss == "cosine" else "auto", [LOW])
        return [replace(cell, rate=rate) for cell in cells for rate in self.rates]

    def conditions(self, loss: str, scoring: str) -> dict[str, Cell]:
        """The rows of the table, of a loss that keeps a norm."""
        found = {"scale=20": self.of_loss(loss, 20.0)[0], '"auto"': self.of_loss(loss, "auto")[0]}
        if (own := best_of_all(self.of_loss(loss, "auto", TAUS), scoring)) is not None:
            found[f'"auto", best τ {own.temperature}'] = own
        return found


STUDIES = {
    "static": Study("static", 1000, 128, (0.003, 0.01, 0.03, 0.1), pictured=("temperatures", "steps")),
    "static, long": Study("static", 10_000, 128, (0.001, 0.003, 0.01)),
    "L3": Study("L3frozen", 1500, 32, (1e-4, 3e-4)),
    "L3, bf16": Study("L3frozen", 1500, 32, (1e-4, 3e-4), bf16=True, pictured=("temperatures",)),
    "L3, long": Study("L3", 6000, 32, (1e-4, 3e-4), bf16=True),
    "MiniLM": Study("MiniLM", 3000, 32, (5e-5, 2e-4), bf16=True),
}


def run_curves(study: Study, losses: Sequence[str], seeds: int) -> None:
    """The rate, then every loss at .05 with the automatic scale: the picture of the steps."""
    run(study.cosine(rate) for rate in study.rates)
    cells = [study.cosine(study.chosen.rate)] if study.chosen else []
    cells += [cell for loss in losses for cell in study.of_loss(loss, "auto")]
    run(replace(cell, seed=seed) for seed in range(seeds) for cell in cells)


def run_study(study: Study, losses: Sequence[str], seeds: int) -> None:
    """The rate, then all settings with seed 0, then the other seeds of what the table shows."""
    run(study.cosine(rate) for rate in study.rates)
    kept = [c for loss in losses for c in (*study.of_loss(loss, "auto", TAUS), *study.of_loss(loss, 20.0))]
    run([*study.cosines, *kept])
    shown = [c for loss in losses for scoring in SCORINGS for c in study.conditions(loss, scoring).values()]
    for number in range(2, seeds + 1):
        run(cell for x in [*study.cosines, *shown] for cell in seeds_of(x, number))


def run_low(study: Study, seeds: int) -> None:
    """Cosine and Learnable at the low temperature: all rates, then the other seeds of the best one."""
    for loss in ("cosine", "learnable"):
        run(study.at_low(loss))
        chosen = best_of_all(study.at_low(loss), "matched")
        run(seeds_of(chosen, seeds) if chosen else ())


# --- tables -----------------------------------------------------------------------------------------------------------


def show(found: tuple[Any, int] | None) -> str:
    """A gain in points with its interval; with one seed the interval is over queries alone."""
    return "" if found is None else found[0].show()


def cosine_table(study: Study) -> list[str]:
    """nDCG@10 of Cosine by temperature, mean over seeds, and the gain over .05."""
    lines = ["| τ of Cosine | seeds | dev | in domain | FOLDOC | gain over .05, in domain | gain over .05, FOLDOC |"]
    lines.append("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for cell in study.cosines:
        stored = [seed for seed in seeds_of(cell) if seed.path.is_file()]
        if not stored:
            continue
        means = [100 * dev_of(cell, "matched"), *(100 * per_query(stored, task, "matched").mean() for task in PLACES)]
        gains = [show(gain(cell, study.cosine(cell.rate), [task], "matched")) for task in PLACES]
        gains = ["", ""] if cell.temperature == 0.05 else gains
        row = [str(cell.temperature), str(len(stored)), *(f"{x:.1f}" for x in means), *gains]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def rate_table(study: Study) -> list[str]:
    """nDCG@10 of Cosine at .05 by learning rate, seed 0. Only dev chooses."""
    lines = ["| rate | dev | in domain | FOLDOC |", "| ---: | ---: | ---: | ---: |"]
    for cell in map(study.cosine, study.rates):
        if found := cell.load():
            means = [
                found["scorings"]["matched"]["dev"],
                *(per_query([cell], task, "matched").mean() for task in PLACES),
            ]
            lines.append(f"| {cell.rate:g} | " + " | ".join(f"{100 * x:.1f}" for x in means) + " |")
    return lines


def gain_table(study: Study) -> list[str]:
    """Gains over Cosine at .05 and at the temperature that is best on dev, points of nDCG@10 with 95 % intervals."""
    columns = [f"{place}, over {which}" for place in PLACES.values() for which in ("τ .05", "best τ")]
    lines = [
        "| loss, scale | scoring | seeds | " + " | ".join(columns) + " |",
        "| --- | --- | ---:" + " | ---:" * 4 + " |",
    ]
    for loss, name in LOSSES.items():
        for scoring in SCORINGS:
            best = best_of_all(study.cosines, scoring)
            for condition, cell in study.conditions(loss, scoring).items() if study.cosines else ():
                if not cell.path.is_file():
                    continue
                plain = study.cosine(cell.rate), best
                found = [gain(cell, x, [task], scoring) if x else None for task in PLACES for x in plain]
                seeds = sum(seed.path.is_file() for seed in seeds_of(cell))
                shown = " | ".join(show(x) for x in found)
                lines.append(f"| {name}, {condition} | {scoring} | {seeds} | {shown} |")
    return lines


def same_table(study: Study) -> list[str]:
    """Gains as trained over Cosine at the same temperature, with the automatic scale."""
    lines = ["| loss | τ | seeds | " + " | ".join(PLACES.values()) + " |", "| --- | ---: | ---: | ---: | ---: |"]
    for loss, name in LOSSES.items():
        for cell in study.of_loss(loss, "auto", TAUS):
            plain = replace(study.cosine(cell.rate), temperature=cell.temperature)
            found = [x for task in PLACES if (x := gain(cell, plain, [task], "matched"))]
            if found:
                shown = " | ".join(show(x) for x in found)
                lines.append(f"| {name} | {cell.temperature:g} | {found[0][1]} | {shown} |")
    return lines if len(lines) > 2 else ["(No cells are stored yet.)"]


def low_table(study: Study) -> list[str]:
    """The low temperature at the rate that is best on dev, and the gains over Cosine at that temperature and rate."""
    plain = best_of_all(study.at_low("cosine"), "matched") if study.chosen else None
    if study.chosen is None or plain is None:
        return ["(No cells are stored yet.)"]
    rows = {
        f"Cosine, τ {LOW:g}": plain,
        f"Learnable, τ {LOW:g}": best_of_all(study.at_low("learnable"), "matched"),
        "Cosine, τ 0.05": study.chosen,
        "TempAgg": replace(study.chosen, loss="tempagg"),
    }
    lines = ["| loss | rate | seeds | dev | " + " | ".join(PLACES.values()) + " |", "| --- |" + " ---: |" * 5]
    for name, cell in rows.items():
        if cell is not None and (found := gain(cell, plain, ["wordnet"], "matched")):
            shown = [show(gain(cell, plain, [task], "matched")) if cell != plain else "" for task in PLACES]
            row = [f"{cell.rate:g}", str(found[1]), f"{100 * dev_of(cell, 'matched'):.1f}", *shown]
            lines.append(f"| {name} | " + " | ".join(row) + " |")
    return lines


# --- pictures ---------------------------------------------------------------------------------------------------------


def curve_of(cell: Cell, scoring: str) -> tuple[list[int], np.ndarray[Any, Any]]:
    """Steps, and nDCG@10 on dev at the exponent of training or at the best one, mean over seeds."""
    runs = [x["curve"] for seed in seeds_of(cell) if (x := seed.load())]
    values = [[x["matched"] if scoring == "matched" else max(x["exponents"]) for x in run] for run in runs]
    return [x["step"] for x in runs[0]], np.mean(values, axis=0)


def paint_temperatures(axis: Any, study: Study) -> None:
    rows: dict[str, Sequence[Cell]] = {"Cosine": [x for x in study.cosines if x.temperature != "learned"]}
    rows |= {name: study.of_loss(loss, "auto", TAUS) for loss, name in LOSSES.items()}
    for i, (name, cells) in enumerate(rows.items()):
        stored = [replace(cell, seed=0) for cell in cells if cell.path.is_file()]
        for scoring, style in zip(SCORINGS, ("-", "--"), strict=True):
            values = [100 * cell.load()["scorings"][scoring]["dev"] for cell in stored]  # type: ignore[index]
            label = name if style == "-" and stored else None
            axis.plot(
                [cell.temperature for cell in stored], values, style, marker="o", ms=3, color=f"C{i}", label=label
            )
    axis.set(xscale="log", xlabel="temperature (solid: as trained, dashed: calibrated)", ylabel="nDCG@10 on dev")
    axis.set_xticks(TAUS, [f"{tau:g}" for tau in TAUS], minor=False)
    axis.minorticks_off()
    axis.legend(fontsize=8)
    axis.grid()


def paint_steps(axis: Any, study: Study) -> None:
    """The gain over Cosine at .05 at the same step, on dev."""
    for i, (loss, name) in enumerate(LOSSES.items()):
        cell = study.of_loss(loss, "auto")[0]
        for scoring, style in zip(SCORINGS, ("-", "--"), strict=True):
            if cell.path.is_file():
                steps, values = curve_of(cell, scoring)
                _, plain = curve_of(study.cosine(cell.rate), scoring)
                axis.plot(steps, 100 * (values - plain), style, color=f"C{i}", label=name if style == "-" else None)
    axis.axhline(0, lw=0.6, color="grey", label="Cosine")
    axis.set(xlabel="step (solid: as trained, dashed: calibrated)", ylabel="points over Cosine at .05, dev")
    axis.legend(fontsize=8)
    axis.grid()


PAINTERS = {"temperatures": paint_temperatures, "steps": paint_steps}


def pictures(study: Study, name: str) -> None:
    """The pictures of a study, each with its name behind that of the painter."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    suffix = name.replace(", ", "-")
    for what in study.pictured:
        picture = draw(lambda axis, paint=PAINTERS[what]: paint(axis, study), (5.2, 3.6), "png")
        (PICTURES / f"{what}-{suffix}.png").write_bytes(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", default="static", choices=STUDIES)
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=LOSSES)
    parser.add_argument("--seeds", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--curves", action="store_true", help="temperature .05 and the automatic scale only")
    parser.add_argument("--low", action="store_true", help="the rates of a low temperature only")
    parser.add_argument("--tables", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    study = STUDIES[arguments.study]
    if arguments.low and not arguments.tables:
        run_low(study, arguments.seeds)
    elif not arguments.tables:
        (run_curves if arguments.curves else run_study)(study, arguments.losses, arguments.seeds)
    if study.chosen is None:
        parser.exit(1, f"The rates of {arguments.study} have not been tried yet: call without --tables.\n")
    print(f"\n{arguments.study}: {study.steps} steps of {study.batch}, learning rate {study.chosen.rate:g}\n")
    tables = (rate_table, cosine_table, gain_table, same_table, low_table)
    print("\n\n".join("\n".join(table(study)) for table in tables))
    pictures(study, arguments.study)


if __name__ == "__main__":
    main()

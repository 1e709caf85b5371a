"""How much of a gain is temperature, and how does it change with the number of steps?

    python benchmarks/studies/temperature/temperature.py [STUDY ...] [--curves | --low]

Every gain is reported twice, against Cosine at .05 and against Cosine at the temperature that is
best on dev. The learning rate is chosen on dev under Cosine at .05 and is the same for all. Cosine
has four temperatures and a learned one. Dot, QNorm, DNorm and Learnable have scale=20 (raw norms in
the softmax), scale="auto" (20 over the mean norms), and "auto" with the best of four temperatures.

--curves has temperature .05 and the automatic scale only. --low asks whether a temperature of .02
only needs another learning rate: Cosine and Learnable at .02 with every rate of the study. What was
expected before each run is on the page, docs/research/temperature.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from benchmarks.studies.cells import (
    PICTURES,
    POOL,
    SCORINGS,
    Cell,
    asked,
    best_of_all,
    dev_of,
    gain,
    per_query,
    run,
    seeds_of,
    stored_seeds,
)
from benchmarks.studies.estimates import NOTHING, in_points, markdown, show
from benchmarks.studies.plot import draw
from numpy.typing import NDArray

TAUS = (0.01, 0.02, 0.05, 0.1)
LOW = 0.02  # a temperature that many retrievers are trained with
LOSSES = {"qnorm": "QNorm", "dnorm": "DNorm", "dot": "Dot", "learnable": "Learnable"}
PLACES = {"wordnet": "in domain", "foldoc": "FOLDOC"}


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
        return self.of_loss("cosine", 20.0, (*TAUS, "learned"))

    def of_loss(self, loss: str, scale: float | str, taus: Iterable[Any] = (0.05,)) -> list[Cell]:
        if (base := self.chosen) is None:
            return []
        return [replace(base, loss=loss, scale=scale, temperature=tau) for tau in taus]

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


BOTH = ("temperatures", "steps")
STUDIES = {
    "static": Study("static", 1000, 128, (0.003, 0.01, 0.03, 0.1), pictured=BOTH),
    "static, long": Study("static", 10_000, 128, (0.001, 0.003, 0.01)),
    "L3": Study("L3frozen", 1500, 32, (1e-4, 3e-4)),
    "L3, bf16": Study("L3frozen", 1500, 32, (1e-4, 3e-4), bf16=True, pictured=("temperatures",)),
    "L3, long": Study("L3", 6000, 32, (1e-4, 3e-4), bf16=True),
    "MiniLM": Study("MiniLM", 3000, 32, (5e-5, 2e-4), bf16=True),
}


def run_curves(study: Study, seeds: int) -> None:
    """Every loss at .05 with the automatic scale: the picture of the steps."""
    cells = study.of_loss("cosine", 20.0)
    cells += [cell for loss in LOSSES for cell in study.of_loss(loss, "auto")]
    run(replace(cell, seed=seed) for seed in range(seeds) for cell in cells)


def run_study(study: Study, seeds: int) -> None:
    """All settings with seed 0, then the other seeds of what the table shows."""
    tried = [cell for loss in LOSSES for cell in study.of_loss(loss, "auto", TAUS)]
    tried += [cell for loss in LOSSES for cell in study.of_loss(loss, 20.0)]
    run([*study.cosines, *tried])
    shown = [study.conditions(loss, x).values() for loss in LOSSES for x in SCORINGS]
    cells = [*study.cosines, *(cell for rows in shown for cell in rows)]
    run(replace(cell, seed=seed) for seed in range(1, seeds) for cell in cells)


def run_low(study: Study, seeds: int) -> None:
    """The low temperature at all rates, then the other seeds of the best one."""
    for loss in ("cosine", "learnable"):
        run(study.at_low(loss))
        chosen = best_of_all(study.at_low(loss), "matched")
        run(seeds_of(chosen, seeds) if chosen else ())


# --- tables ---------------------------------------------------------------------------------------


def cosine_table(study: Study) -> list[str]:
    """nDCG@10 of Cosine by temperature, mean over seeds, and the gain over .05."""
    rows = []
    for cell in study.cosines:
        if stored := stored_seeds(cell):
            plain = replace(cell, temperature=0.05)
            gains = [show(gain(cell, plain, [place], "matched")) for place in PLACES]
            means = [in_points(per_query(stored, place, "matched")) for place in PLACES]
            row = [cell.temperature, len(stored), in_points(dev_of(cell, "matched")), *means]
            rows.append([*row, *(["", ""] if cell == plain else gains)])
    head = "τ of Cosine|seeds|dev|in domain|FOLDOC|gain over .05, in domain|gain over .05, FOLDOC"
    return markdown(head.split("|"), rows, "r")


def rate_table(study: Study) -> list[str]:
    """nDCG@10 of Cosine at .05 by learning rate, seed 0. Only dev chooses."""
    rows = []
    for cell in map(study.cosine, study.rates):
        if found := cell.load():
            tests = [per_query([cell], place, "matched") for place in PLACES]
            means = map(in_points, (found["scorings"]["matched"]["dev"], *tests))
            rows.append([f"{cell.rate:g}", *means])
    return markdown(["rate", "dev", *PLACES.values()], rows, "r")


def gain_table(study: Study) -> list[str]:
    """Gains over Cosine at .05 and at the temperature that is best on dev."""
    rows = []
    for loss, name in LOSSES.items() if study.cosines else ():
        for scoring in SCORINGS:
            best = best_of_all(study.cosines, scoring)
            for condition, cell in study.conditions(loss, scoring).items():
                pairs = [(p, x) for p in PLACES for x in (study.cosine(cell.rate), best)]
                gains = [show(gain(cell, x, [p], scoring) if x else None) for p, x in pairs]
                if cell.is_stored:
                    row = [f"{name}, {condition}", scoring, len(stored_seeds(cell))]
                    rows.append([*row, *gains])
    columns = [f"{place}, over {tau}" for place in PLACES.values() for tau in ("τ .05", "best τ")]
    return markdown(["loss, scale", "scoring", "seeds", *columns], rows, "ll")


def same_table(study: Study) -> list[str]:
    """Gains as trained over Cosine at the same temperature, with the automatic scale."""
    rows = []
    for loss, name in LOSSES.items():
        for cell in study.of_loss(loss, "auto", TAUS):
            plain = replace(study.cosine(cell.rate), temperature=cell.temperature)
            found = [x for place in PLACES if (x := gain(cell, plain, [place], "matched"))]
            if found:
                rows.append([name, f"{cell.temperature:g}", found[0][1], *map(show, found)])
    return markdown(["loss", "τ", "seeds", *PLACES.values()], rows)


def low_table(study: Study) -> list[str]:
    """The low temperature at the rate that is best on dev, and the gains over Cosine there."""
    plain = best_of_all(study.at_low("cosine"), "matched") if study.chosen else None
    if study.chosen is None or plain is None:
        return NOTHING
    cells = {
        f"Cosine, τ {LOW:g}": plain,
        f"Learnable, τ {LOW:g}": best_of_all(study.at_low("learnable"), "matched"),
        "Cosine, τ 0.05": study.chosen,
        "TempAgg": replace(study.chosen, loss="tempagg"),
    }
    rows = []
    for name, cell in cells.items():
        if cell is not None and (found := gain(cell, plain, ["wordnet"], "matched")):
            gains = [show(gain(cell, plain, [place], "matched")) for place in PLACES]
            row = [name, f"{cell.rate:g}", found[1], in_points(dev_of(cell, "matched"))]
            rows.append([*row, *(gains if cell != plain else ["", ""])])
    return markdown(["loss", "rate", "seeds", "dev", *PLACES.values()], rows)


TABLES = {
    "temperatures of Cosine": cosine_table,
    "rates": rate_table,
    "gains": gain_table,
    "same temperature": same_table,
    "low temperature": low_table,
}


# --- pictures -------------------------------------------------------------------------------------


def curve_of(cell: Cell, scoring: str) -> tuple[list[int], NDArray[np.float64]]:
    """Steps, and nDCG@10 on dev at the exponent of training or at the best one, mean over seeds."""
    runs = [x["curve"] for x in POOL.of_seeds(cell).values()]
    is_matched = scoring == "matched"
    values = [[x["matched"] if is_matched else max(x["exponents"]) for x in run] for run in runs]
    return [x["step"] for x in runs[0]], np.mean(values, axis=0)


def styled() -> zip:
    return zip(SCORINGS, ("-", "--"), strict=True)


def paint_temperatures(axis: Any, study: Study) -> None:
    rows: dict[str, Sequence[Cell]] = {"Cosine": study.of_loss("cosine", 20.0, TAUS)}
    rows |= {name: study.of_loss(loss, "auto", TAUS) for loss, name in LOSSES.items()}
    for i, (name, cells) in enumerate(rows.items()):
        stored = {cell.temperature: x for cell in cells if (x := cell.load())}
        for scoring, style in styled():
            values = [100 * x["scorings"][scoring]["dev"] for x in stored.values()]
            label = name if style == "-" and stored else None
            axis.plot(list(stored), values, style, marker="o", ms=3, color=f"C{i}", label=label)
    axis.set(xscale="log", xlabel="temperature (solid: as trained, dashed: calibrated)")
    axis.set_ylabel("nDCG@10 on dev")
    axis.set_xticks(TAUS, [f"{tau:g}" for tau in TAUS], minor=False)
    axis.minorticks_off()


def paint_steps(axis: Any, study: Study) -> None:
    """The gain over Cosine at .05 at the same step, on dev."""
    for i, (loss, name) in enumerate(LOSSES.items()):
        cell = study.of_loss(loss, "auto")[0]
        for scoring, style in styled() if cell.is_stored else ():
            steps, values = curve_of(cell, scoring)
            _, plain = curve_of(study.cosine(cell.rate), scoring)
            label = name if style == "-" else None
            axis.plot(steps, 100 * (values - plain), style, color=f"C{i}", label=label)
    axis.axhline(0, lw=0.6, color="grey", label="Cosine")
    axis.set(xlabel="step (solid: as trained, dashed: calibrated)")
    axis.set_ylabel("points over Cosine at .05, dev")


PAINTERS = {"temperatures": paint_temperatures, "steps": paint_steps}


def picture(name: str, what: str) -> None:
    def paint(axis: Any) -> None:
        PAINTERS[what](axis, STUDIES[name])
        axis.legend(fontsize=8)
        axis.grid()

    path = PICTURES / f"{what}-{name.replace(', ', '-')}.png"
    path.write_bytes(draw(paint, (5.2, 3.6)))


def pictures() -> None:
    for name, study in STUDIES.items():
        for what in study.pictured if study.chosen else ():
            picture(name, what)


if __name__ == "__main__":
    arguments = asked(__doc__, STUDIES, curves="the steps at .05 only", low="a temperature of .02")
    for study in map(STUDIES.__getitem__, arguments.names):
        run(study.cosine(rate) for rate in study.rates)
        how = run_low if arguments.low else run_curves if arguments.curves else run_study
        how(study, arguments.seeds)

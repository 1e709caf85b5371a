"""Is a loss that keeps a norm ahead of Cosine at a fair temperature, and after more steps?

    python benchmarks/studies/temperature/temperature.py [STUDY ...] [--seeds 3]

Models learn WordNet, lemma -> definition, and are tested on held-out synsets and on FOLDOC. The
learning rate is chosen on dev under Cosine at .05 and is the same for all losses. In the studies
"static" and "L3, bf16" dev chooses the temperature of each loss, too; the others ask for more steps
and train at .05. The verdict is on the page, docs/research/temperature.md.

"literal" is the paper's scale, logits of 20 · s without a division by norms, on the static table
(docs/research/magnitude.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from benchmarks.studies.cells import (
    POOL,
    SCORINGS,
    Cell,
    asked,
    best_of,
    gain,
    per_query,
    run_missing,
    stored_seeds,
)
from benchmarks.studies.estimates import in_points, markdown, show
from benchmarks.studies.store import seed_by_seed, seeds_of

TAUS = (0.01, 0.02, 0.05, 0.1)
LOSSES = {"qnorm": "QNorm", "dnorm": "DNorm", "dot": "Dot", "learnable": "Learnable"}
PLACES = {"wordnet": "in domain", "foldoc": "FOLDOC"}
KEPT = ("dot", "qnorm", "dnorm")


@dataclass(frozen=True)
class Study:
    """One base at one horizon, with the rates and temperatures among which dev chooses."""

    base: str
    steps: int
    batch: int
    rates: tuple[float, ...]
    bf16: bool = False
    losses: tuple[str, ...] = tuple(LOSSES)
    taus: tuple[float | str, ...] = (0.05,)

    def cosine(self, rate: float) -> Cell:
        return Cell(self.base, "wordnet", "cosine", 0, self.steps, self.batch, rate, bf16=self.bf16)

    @property
    def chosen(self) -> Cell | None:
        """Cosine at .05 and the rate that is best on dev; None before one was tried."""
        return best_of([self.cosine(rate) for rate in self.rates], "matched")

    @property
    def cosines(self) -> list[Cell]:
        return self.of_loss("cosine", 20.0, self.taus)

    def of_loss(
        self, loss: str, scale: float | str, taus: Iterable[float | str] = (0.05,)
    ) -> list[Cell]:
        if (base := self.chosen) is None:
            return []
        return [replace(base, loss=loss, scale=scale, temperature=tau) for tau in taus]

    def kept(self, loss: str) -> list[Cell]:
        """A loss that keeps a norm, at each temperature."""
        return self.of_loss(loss, "auto", [tau for tau in self.taus if tau != "learned"])


STUDIES = {
    "static": Study("static", 1000, 128, (0.003, 0.01, 0.03, 0.1), taus=(*TAUS, "learned")),
    "L3, bf16": Study(
        "L3frozen", 1500, 32, (1e-4, 3e-4), True, losses=("qnorm",), taus=(*TAUS, "learned")
    ),
    "static, long": Study("static", 10_000, 128, (0.001, 0.003, 0.01), losses=("qnorm", "dot")),
    "L3, long": Study("L3", 6000, 32, (1e-4, 3e-4), True, losses=("qnorm", "dot")),
    "MiniLM": Study("MiniLM", 3000, 32, (5e-5, 2e-4), True, losses=("qnorm",)),
}


def literal(loss: str) -> Cell:
    """A loss on the static table with logits of 20 · s, of raw products."""
    return STUDIES["static"].of_loss(loss, 20.0)[0]


def run_study(study: Study, seeds: int) -> None:
    """All settings with seed 0, then the other seeds of what the tables show."""
    run_missing(study.cosine(rate) for rate in study.rates)
    run_missing([*study.cosines, *(cell for loss in study.losses for cell in study.kept(loss))])
    best = [best_of(study.kept(loss), x) for loss in study.losses for x in SCORINGS]
    shown = [*study.cosines, *(cell for cell in best if cell)]
    run_missing(cell for one in shown for cell in seeds_of(one, seeds))


def cosine_table(names: Sequence[str] = ("static", "L3, bf16")) -> list[str]:
    """nDCG@10 of Cosine by temperature, mean over seeds, and the gain over .05."""
    rows = []
    for name in names:
        for cell in STUDIES[name].cosines:
            stored = stored_seeds(cell)
            plain = replace(cell, temperature=0.05)
            means = [in_points(per_query(stored, place, "matched")) for place in PLACES]
            gains = [show(gain(cell, plain, [place], "matched")) for place in PLACES]
            gains = gains if cell != plain else ["", ""]
            rows.append([name, cell.temperature, len(stored), *means, *gains])
    head = ["study", "τ of Cosine", "seeds", *PLACES.values()]
    head += [f"over .05, {place}" for place in PLACES.values()]
    return markdown(head, rows)


def gain_table() -> list[str]:
    """Gains over Cosine, each at the temperature that is best on dev."""
    rows = []
    for name, study in STUDIES.items():
        for loss in study.losses:
            for scoring in SCORINGS:
                cell = best_of(study.kept(loss), scoring)
                plain = best_of(study.cosines, scoring)
                if cell is None or plain is None:
                    continue
                found = [gain(cell, plain, [place], scoring) for place in PLACES]
                seeds = found[0][1] if found[0] else 0
                row = [name, LOSSES[loss], scoring, f"{cell.temperature:g}"]
                rows.append([*row, seeds, *map(show, found)])
    head = ["study", "loss", "scoring", "its τ", "seeds", *PLACES.values()]
    return markdown(head, rows, "lll")


def gain_of_scale(loss: str, scale: float | str) -> str:
    """Over Cosine at its best temperature, in domain, as trained; "auto" at its best, too."""
    study = STUDIES["static"]
    cell = literal(loss) if scale == 20 else best_of(study.kept(loss), "matched")
    plain = best_of(study.cosines, "matched")
    found = gain(cell, plain, ["wordnet"], "matched")
    return found[0].show(digits=2) if found else ""


def figure_5() -> list[str]:
    """The CV of query norms under DNorm over that under Dot, and the gain of DNorm over QNorm."""
    spread = {}
    for loss in ("dnorm", "dot"):
        found = [x["scorings"]["matched"] for x in POOL.of_seeds(literal(loss)).values()]
        spread[loss] = np.mean([x["shape"]["wordnet"]["CV of queries"] for x in found])
    gained = gain(literal("dnorm"), literal("qnorm"), ["wordnet"], "matched")
    shown = gained[0].show(digits=2) if gained else ""
    return [f"{spread['dnorm'] / spread['dot']:.2f}", shown]


TABLES = {"temperatures of Cosine": cosine_table, "gains over Cosine": gain_table}


if __name__ == "__main__":
    arguments = asked(__doc__, [*STUDIES, "literal"])
    for name in arguments.names:
        if name == "literal":
            run_missing(seed_by_seed([literal(loss) for loss in KEPT], arguments.seeds))
        else:
            run_study(STUDIES[name], arguments.seeds)

"""Systems: a model, BM25 and their weighted sums, and which of them to deploy."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude._checks import InputError
from st_magnitude.data.ranking import Ranking
from st_magnitude.judge import Difference
from st_magnitude.result import to_plain
from st_magnitude.workbench.judging.costs import Cost
from st_magnitude.workbench.judging.options import Options

__all__ = ["DEPLOY", "HERE", "Decision", "Fusion", "System", "Way", "decide", "fusions"]
__all__ += ["short_names", "systems_of"]

DEPLOY = "deploy.json"  # in the folder of a model
HERE = "."  # the model of that folder
WITH_BM25 = " with BM25"
WORTH = 0.5  # points of nDCG@10 that a less simple system has to gain
POWER = 1.43  # (1.96 + .84) / 1.96: times half of an interval, the gain found in four of five draws
WEIGHTS = tuple(round(0.1 * step, 1) for step in range(11))


@dataclass(frozen=True)
class Fusion:
    """The weighted sum of the scores of a model and of BM25, on fixed scales.

        score(q, d) = weight * s(q, d) / unit + (1 - weight) * BM25(q, d) / scale

    A document that one of the two did not return has the score 0 there. At 1 and 0 it is the model
    alone and BM25 alone.

    Attributes:
        weight: The weight of the model.
        unit: 1 for cosine; else the mean over queries of the model's best score.
        scale: The mean over queries of BM25's best score.
        tokens: The tokens of BM25, a name in `lexical.TOKENS`.

    Example:
        >>> print(Fusion(weight=0.6, unit=1.0, scale=4.2, tokens="words"))
        0.6 model + 0.4 BM25 of words

    Source: Bruch, Gai and Ingber, An Analysis of Fusion Functions for Hybrid Retrieval, 2023, arXiv
    2210.11934.
    """

    weight: float
    unit: float
    scale: float
    tokens: str

    def __str__(self) -> str:
        if self.weight in (0.0, 1.0):
            return "the model alone" if self.weight else f"BM25 of {self.tokens} alone"
        return f"{self.weight:g} model + {1 - self.weight:g} BM25 of {self.tokens}"

    def __call__(self, dense: Ranking, lexical: Ranking) -> Ranking:
        """The ranking of the sum. At the weights 1 and 0 it is that of the model or of BM25."""
        if self.weight in (0.0, 1.0):
            return dense if self.weight else lexical
        return self._sum(dense, *_union(dense, lexical))

    def _sum(
        self, dense: Ranking, columns: NDArray[np.int64], scores: NDArray[np.float64]
    ) -> Ranking:
        """The ranking of positions in rising order, (n, 2k), by their scores in both."""
        of_model, of_bm25 = scores
        total = self.weight * of_model / self.unit + (1 - self.weight) * of_bm25 / self.scale
        total[columns < 0] = -np.inf
        order = np.argsort(-total, axis=1, kind="stable")
        columns, total = (np.take_along_axis(x, order, axis=1) for x in (columns, total))
        return Ranking.of_rows(dense.data, dense.query_ids, columns, total, dense.columns.shape[1])


def fusions(
    dense: Ranking, lexical: Mapping[str, Ranking], is_cosine: bool
) -> dict[Fusion, Ranking]:
    """The rankings of all fusions of a model and BM25, by tokens and weights."""
    unit = 1.0 if is_cosine else _mean_best(dense)
    found: dict[Fusion, Ranking] = {}
    for tokens, ranking in lexical.items():
        scale = _mean_best(ranking)
        both = _union(dense, ranking)
        for weight in WEIGHTS:
            fusion = Fusion(weight, unit, scale, tokens)
            is_alone = weight in (0.0, 1.0)
            found[fusion] = fusion(dense, ranking) if is_alone else fusion._sum(dense, *both)
    return found


def _mean_best(ranking: Ranking) -> float:
    """The mean over queries of the best score; 1 if it is not above 0."""
    best = ranking.scores[ranking.columns[:, 0] >= 0, 0]
    mean = float(best.mean()) if len(best) else 0.0
    return mean if mean > 0 else 1.0


def _union(first: Ranking, second: Ranking) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The documents of both by position, -1 where there are fewer, (n, 2k), and their scores in
    each, 0 where it has no score, (2, n, 2k)."""
    width = first.columns.shape[1] + second.columns.shape[1]
    columns = np.full((len(first), width), -1)
    scores = np.zeros((2, len(first), width))
    for row in range(len(first)):
        parts = [ranking.columns[row] for ranking in (first, second)]
        joined = np.unique(np.concatenate(parts))
        joined = joined[joined >= 0]
        columns[row, : len(joined)] = joined
        for i, (part, ranking) in enumerate(zip(parts, (first, second), strict=True)):
            is_found = part >= 0
            places = np.searchsorted(joined, part[is_found])
            scores[i, row, places] = ranking.scores[row, is_found]
    return columns, scores


@dataclass(frozen=True)
class System:
    """A way to search that could be deployed."""

    name: str
    ranking: Ranking
    exponent: float = 0.0  # of the documents of a model; 1 is cosine
    how: Fusion | str = ""  # with BM25: the fusion, or the tokens of BM25 alone
    confirm: Ranking | None = None  # of a model, for the queries that confirm
    base: str = ""  # name of the model that was trained; empty for one as it comes
    cost: Cost | None = None
    folds: int = 0  # in which the model was trained

    @property
    def tokens(self) -> str:
        """The tokens of BM25; empty without BM25."""
        return self.how.tokens if isinstance(self.how, Fusion) else self.how

    @property
    def model(self) -> str:
        """The name of the model; empty for BM25 alone."""
        if isinstance(self.how, Fusion):
            return self.name.removesuffix(WITH_BM25)
        return "" if self.how else self.name

    @property
    def way(self) -> tuple[str, Fusion | str]:
        """The model and its fusion, in which other queries are searched. A fusion with the weight 1
        or 0 is the model or BM25 alone."""
        if not isinstance(self.how, Fusion) or 0 < self.how.weight < 1:
            return self.model, self.how
        return (self.model, "") if self.how.weight else ("", self.how.tokens)

    def again(self, dense: Ranking | None, lexical: Ranking | None) -> Ranking:
        """The ranking of other queries from those of `model` and of BM25 by `tokens`."""
        if isinstance(self.how, Fusion):
            return self.how(cast(Ranking, dense), cast(Ranking, lexical))
        return cast(Ranking, lexical if self.how else dense)


def systems_of(
    models: Sequence[System], lexical: Mapping[str, Ranking], seed: int = 0
) -> list[System]:
    """BM25, and each model alone and with BM25, in this order. Tokens and weights are chosen
    outside of the fold that judges them."""
    if not lexical:
        return list(models)
    bm25 = Options.choose(lexical, seed=seed)
    found = [System("BM25", bm25.held_out, how=bm25.value)]
    for model in models:
        sums = fusions(model.ranking, lexical, model.exponent == 1.0)
        fused = Options.choose(sums, seed=seed)
        name = f"{model.name}{WITH_BM25}"
        found += [model, System(name, fused.held_out, how=fused.value, cost=model.cost)]
    return found


@dataclass(frozen=True)
class Way:
    """How a system searches, for the file of a decision."""

    model: str  # `HERE`, or the folder or hub id of one elsewhere; empty for BM25 alone
    how: Fusion | str  # with BM25: the fusion, or the tokens of BM25 alone
    revision: str = ""  # of a model of the hub, if it is known

    @classmethod
    def of(cls, model: SentenceTransformer, source: str) -> Way:
        """A model alone, by the folder or hub id from which it was loaded."""
        revision = model.model_card_data.base_model_revision
        return cls(source, "", "" if os.path.isdir(source) else revision or "")


@dataclass(frozen=True)
class Decision:
    """The system to deploy, by `decide`.

    Attributes:
        name: Name of the system.
        ndcg: Its mean nDCG@10.
        how: Its fusion with BM25, or the tokens of BM25 alone, or "".
        over: Name of the best simpler system, or "".
        lead: The difference to that one.
        model: Its model: that of the folder, or the name of one elsewhere. Empty for BM25.
        rival: Name of the best other system, which searches otherwise, or "".
        over_rival: The difference to that one.
        over_bm25: The difference to BM25 alone, if that is another system.
        systems: By name, all ways to search whose model is known.
    """

    name: str
    ndcg: float
    how: Fusion | str
    over: str
    lead: Difference | None
    model: str = HERE
    rival: str = ""
    over_rival: Difference | None = None
    over_bm25: Difference | None = None
    systems: Mapping[str, Way] = field(default_factory=dict)

    def __str__(self) -> str:
        how = f" ({self.how})" if self.how else ""
        said = [f"Deploy {self.name}{how}: nDCG@10 {self.ndcg:.4f}."]
        if self.over_bm25 is not None:
            said.append(self._gain(self.over_bm25, "BM25 alone", "it is better than BM25 alone"))
        if self.lead is not None and self.over != "BM25":
            open_question = f"it is better than {self.over}"
            if self.name == f"{self.over}{WITH_BM25}":
                open_question = f"BM25 adds anything to {self.over} alone"
            said.append(self._gain(self.lead, self.over, open_question))
        if self.over_rival is not None and self.over_rival.mean < 0:
            said.append(f"It is simpler than {self.rival}, the best: {self.over_rival}.")
        elif self.lead is None:
            said.append("Nothing else is better.")
        return " ".join(said)

    def _gain(self, gain: Difference, other: str, open_question: str) -> str:
        """A sentence on the gain over another system, which has a lower mean."""
        if gain.is_better:
            return f"It gains {str(gain).removeprefix('+')} over {other}."
        share = POWER * (gain.mean - gain.low) / gain.mean
        needed = float(f"{gain.queries * share**2:.2g}")
        return f"Whether {open_question} is open: {gain}. About {needed:,.0f} queries would tell."

    def placed(self, systems: Iterable[System], places: Mapping[str, Way]) -> Decision:
        """The decision with the ways to search that need BM25 alone, or a model with a place."""
        found = {
            system.name: replace(places.get(system.model, Way("", "")), how=system.how)
            for system in systems
            if not system.model or system.model in places
        }
        model = found[self.name].model if self.name in found else self.name
        return replace(self, model=model, systems=found)

    def way(self, name: str | None = None) -> tuple[str, Way]:
        """A system by its name, in small or capital letters, and by default the one to deploy."""
        if name is None:
            return self.name, Way(self.model, self.how)
        for known, way in self.systems.items():
            if known.casefold() == name.casefold():
                return known, way
        names = ", ".join(map(repr, self.systems)) or "none"
        raise InputError(f"There is no system {name!r}; the folder knows {names}.")

    def save(self, folder: Path) -> None:
        """Writes the decision into the folder of a model."""
        text = json.dumps(to_plain(self), indent=2) + "\n"
        (folder / DEPLOY).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Decision | None:
        """The decision in the folder of a model; None if there is none."""
        path = Path(folder, DEPLOY)
        if not path.is_file():
            return None
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            known["how"] = _how(known["how"])
            for name in ("lead", "over_rival", "over_bm25"):
                known[name] = _read(Difference, known[name]) if known.get(name) else None
            for name, way in known["systems"].items():
                known["systems"][name] = _read(Way, way | {"how": _how(way["how"])})
            return _read(cls, known)
        except (AttributeError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is damaged: remove it, or train again.") from error


def _read(kind: type[Any], known: Mapping[str, Any]) -> Any:
    """A dataclass of a file, without what newer versions have written there."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in known.items() if name in names})


def _how(known: str | Mapping[str, Any]) -> Fusion | str:
    return known if isinstance(known, str) else cast(Fusion, _read(Fusion, known))


def short_names(models: Collection[str]) -> dict[str, str]:
    """The models by the last two parts of their paths, if these differ."""
    found = {"/".join(Path(model).parts[-2:]): model for model in models}
    return found if len(found) == len({*models}) else dict(zip(models, models, strict=True))


def decide(systems: Sequence[System], seed: int = 0, worth: float = WORTH) -> Decision:
    """The simplest system, of those in order, that is at most ``worth`` points below the best."""
    falling = sorted(systems, key=lambda system: -system.ranking.mean)
    least = falling[0].ranking.mean - worth / 100 - 1e-12
    pairs = enumerate(systems)
    place, system = next(pair for pair in pairs if pair[1].ranking.mean >= least)
    simpler = max(systems[:place], key=lambda one: one.ranking.mean, default=None)
    rival = next((other for other in falling if other.way != system.way), None)
    bm25 = next((other for other in systems[:place] if other.name == "BM25"), None)

    def over(other: System | None) -> Difference | None:
        return None if other is None else system.ranking.minus(other.ranking, seed=seed)

    return Decision(
        system.name,
        system.ranking.mean,
        system.how,
        over="" if simpler is None else simpler.name,
        lead=over(simpler),
        rival="" if rival is None else rival.name,
        over_rival=over(rival),
        over_bm25=over(bm25),
    )

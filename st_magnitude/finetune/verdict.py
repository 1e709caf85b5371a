"""The trained model next to the pretrained one and to BM25 on the same queries."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.judge import Gain
from st_magnitude.evaluation.scoring import scoring_of
from st_magnitude.finetune.measure import Found
from st_magnitude.result import Result, Table, points

__all__ = ["Change", "Control", "Scored", "Verdict", "changes_of", "model_ndcg"]

_shortened = partial(textwrap.shorten, width=60, placeholder=" ...")

FEW_CHANGES = 30  # queries whose nDCG@10 changes, below which no small gain can be seen
POWER = 1.43  # (1.96 + .84) / 1.96: times half of an interval, the gain found in four of five draws
LOW = 0.1  # nDCG@10 below which a file probably names one of many equally good answers


@dataclass(frozen=True)
class Scored:
    """The trained model under one similarity."""

    exponent: float  # of documents
    ndcg: float  # mean nDCG@10
    gain: Gain  # over the pretrained model
    changed: int  # number of queries whose nDCG@10 differs from that of the pretrained model

    @property
    def name(self) -> str:
        return {0.0: "dot", 1.0: "cosine"}.get(self.exponent, f"exponent {self.exponent:.2f}")


@dataclass(frozen=True)
class Control:
    """Another search of the same queries."""

    name: str
    ndcg: float
    gain: Gain  # of the trained model over this search


@dataclass(frozen=True)
class Change:
    """A query whose nDCG@10 changed, with its first document before and after the training."""

    query: str
    ndcg: tuple[float, float]
    before: str
    after: str

    def __str__(self) -> str:
        before = _shortened(self.before)
        after = _shortened(self.after)
        lines = [f"  {_shortened(self.query)}  ({self.ndcg[0]:.2f} -> {self.ndcg[1]:.2f})"]
        if before != after:
            lines.append(f"      before: {before}")
        lines.append(f"      now:    {after}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Verdict(Result):
    """The trained model next to the pretrained one on the same queries."""

    queries: int
    pretrained: float  # nDCG@10 under the similarity of the pretrained model
    as_trained: Scored  # under the similarity of the loss
    # at `ExponentCurve.best`: as trained, unless these queries have chosen another exponent, which
    # is clearly better; None for a model that normalises
    best: Scored | None
    saved: Scored  # the one of the two that the saved model is scored with
    curve: dict[str, float] | None  # nDCG@10 by document exponent
    controls: tuple[Control, ...] = ()  # BM25, and the saved model fused with it
    gained: int = 0  # number of queries with a higher nDCG@10 than before
    lost: int = 0
    changes: tuple[Change, ...] = ()  # the largest gain, the median change and the largest loss
    folds: int = 0  # in which the queries were held out; 0 for one split

    @property
    def is_better(self) -> bool:
        """Whether the interval of the saved model's gain lies above 0."""
        return self.saved.gain[1] > 0.0

    @property
    def is_worse(self) -> bool:
        """Whether the interval lies below 0, at the best exponent too."""
        return max(self.saved.gain[2], (self.best or self.saved).gain[2]) < 0.0

    @property
    def caveat(self) -> str:
        """A sentence if these queries have chosen the exponent, else ""."""
        if self.saved == self.as_trained:
            return ""
        return "These queries have chosen the exponent, so the difference is optimistic."

    def headline(self, split: str) -> str:
        """Better, worse or no clear difference, by how much and on how many queries."""
        where = f"{self.queries:,} {split} queries"
        if self.folds:
            where = f"{self.queries:,} queries, held out in {self.folds} folds"
        if self.is_better:
            name = "Better"
        elif self.saved.gain[2] < 0.0:
            name = "Worse"
        else:
            name = "No clear difference"
        said = f"{name}: {points(self.saved.gain)} of nDCG@10 against the pretrained model"
        bm25 = " ".join(self._about(control) for control in self.controls[:1])
        return f"{said}, on {where}. {bm25}".strip()

    def advice(self) -> str:
        """Recommended next steps."""
        found: list[str] = []
        if self.saved.gain[2] < 0.0 and not self.is_worse:
            found.append("Another exponent is better: run calibrate, or omit --keep-scoring.")
        elif not self.is_better:
            remedy = "Train on more pairs or with another learning rate, or keep the old model."
            found += [remedy, self._power()]
        found += map(self._about, self.controls[1:])
        if max(self.pretrained, self.saved.ndcg) < LOW:
            found.append(
                "nDCG@10 is low for every model. If several documents answer a query and the data"
                " name one of them, no model can score high: judge the others, too."
            )
        return " ".join(filter(None, found))

    def _power(self) -> str:
        gain, low, _ = self.saved.gain
        if self.saved.changed < FEW_CHANGES:
            return f"nDCG@10 changed for {self.saved.changed:,} queries only: add queries."
        smallest = 100 * POWER * (gain - low)
        return f"So many queries show a gain of about {smallest:.1f} points in four of five draws."

    def _about(self, control: Control) -> str:
        _, low, high = control.gain
        if control != self.controls[0]:
            said = f"Fused with BM25 by rank it has {control.ndcg:.4f}, clearly more than alone."
            return said if high < 0.0 else ""
        if high < 0.0:
            return f"{control.name}, which needs no training, is better: {control.ndcg:.4f}."
        if low > 0.0:
            return ""
        return f"It is not clearly better than {control.name}, which needs no training."

    def tables(self) -> Iterable[Table | str]:
        rows: list[list[object]] = [["pretrained", self.pretrained, points(self.saved.gain)]]
        for scored in dict.fromkeys((self.as_trained, self.best or self.as_trained)):
            notes = ["as trained"] if scored == self.as_trained else []
            notes += ["saved"] if scored == self.saved else []
            name = f"trained, {scored.name}" + (f" ({', '.join(notes)})" if notes else "")
            rows.append([name, scored.ndcg, ""])
        rows += [[other.name, other.ndcg, points(other.gain)] for other in self.controls]
        columns = ["search", "nDCG@10", "the saved model over it"]
        yield Table(columns, rows, "", self.caveat)
        if self.changes:
            yield f"{self.gained:,} queries gained and {self.lost:,} lost. For example:"
            yield "\n".join(map(str, self.changes))


def model_ndcg(model: SentenceTransformer, data: RetrievalData) -> NDArray[np.float64]:
    """nDCG@10 of every query under the similarity of the model."""
    encoded = data.encode(model)
    return encoded.ndcg(encoded.top(scoring_of(model)))


def changes_of(before: Found, after: Found, data: RetrievalData) -> tuple[Change, ...]:
    """The largest gain, the median change and the largest loss; ties by a hash of the query."""

    def place(query: str) -> tuple[float, str]:
        digest = hashlib.sha256(data.queries[query].encode()).hexdigest()
        return before.ndcg[query] - after.ndcg[query], digest

    changed = sorted((q for q in after.ndcg if after.ndcg[q] != before.ndcg[q]), key=place)
    if not changed:
        return ()
    chosen = dict.fromkeys([changed[0], changed[len(changed) // 2], changed[-1]])
    return tuple(
        Change(
            data.queries[query],
            (before.ndcg[query], after.ndcg[query]),
            *(data.corpus.get(found.first[query], "nothing") for found in (before, after)),
        )
        for query in chosen
    )

"""A report to share: one page of HTML with the decision, all systems, the queries and the settings.

`report.html` is the page, which draws itself in the browser from the data that are put into it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from st_magnitude._files import OUR_PAGE, written
from st_magnitude.data.ranking import Ranking
from st_magnitude.result import cell, to_plain
from st_magnitude.workbench.judging.choice import System

__all__ = ["write_report"]

MOST_QUERIES = 2_000  # in the table
MOST_CHARACTERS = 300  # of a text
FIRST = 3  # documents of each query


def write_report(
    path: str | Path,
    title: str,
    headline: str,
    systems: Sequence[System],
    before: Ranking,
    after: Ranking,
    settings: Mapping[str, object],
    seed: int = 0,
) -> None:
    """Writes one HTML file, which loads nothing.

    Args:
        path: The file; an earlier report is replaced.
        title: Its title, such as the name of the data.
        headline: The decision, and in further lines what else has to be read first.
        systems: The rows of the interval plot, each compared with ``before``.
        before: The ranking without the change, such as the pretrained model's.
        after: The ranking with the change, of the same queries.
        settings: Names and values. Everybody who gets the page can read them.
        seed: Seed of the intervals (`judge`).

    Raises:
        ValueError: If the rankings are of different queries.
        OSError: If the file cannot be written, or is no report.
    """
    names = {id(after): "after", id(before): "before"}
    names |= {id(system.ranking): system.name for system in reversed(systems)}
    page: dict[str, Any] = {"title": title, "headline": headline}
    page["systems"] = [_row(system, before, seed) for system in systems]
    page["settings"] = [[_text(name), _text(value)] for name, value in settings.items()]
    page["sides"] = [{"name": names[id(one)], "ndcg": one.mean} for one in (before, after)]
    page |= _queries(before, after)
    data = json.dumps(to_plain(page), allow_nan=False)  # ASCII: it escapes U+2028
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    with written(path, OUR_PAGE) as file:
        file.write(template.replace("{{ data }}", data))


def _row(system: System, before: Ranking, seed: int) -> dict[str, Any]:
    row = {"name": system.name, "how": str(system.how), "ndcg": system.ranking.mean}
    if system.ranking is before:
        return row | {"gain": None}
    gain = system.ranking.minus(before, seed=seed)
    return row | {"gain": gain, "said": str(gain), "verdict": gain.verdict}


def _text(value: object) -> str:
    """A text or another value, cut."""
    text = f"{value:g}" if isinstance(value, float) else cell(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"


def _queries(before: Ranking, after: Ranking) -> dict[str, Any]:
    """nDCG@10 of all queries, and the texts of those that changed most."""
    data = after.data
    ndcg = np.stack([before.ndcg, after.ndcg], axis=1)  # (n, 2)
    pairs, counts = np.unique(ndcg[after.has_answer], axis=0, return_counts=True)
    first = np.argsort(-abs(np.diff(ndcg)[:, 0]), kind="stable")
    documents: dict[str, str] = {}
    rows = []
    for row in first[:MOST_QUERIES]:
        query = after.query_ids[row]
        relevant = data.relevant.get(query, {})
        found = [list(side[query])[:FIRST] for side in (before, after)]
        best = sorted(relevant, key=lambda document: -relevant[document])[:1]
        for document in (*found[0], *found[1], *best):
            documents[document] = _text(data.corpus[document])
        shown = {"id": query, "text": _text(data.queries[query]), "ndcg": ndcg[row], "found": found}
        shown["right"] = [[document in relevant for document in one] for one in found]
        rows.append(shown | {"answer": best, "relevant": len(relevant)})
    left_out = len(after) - len(rows)
    changes = [[*pair, count] for pair, count in zip(pairs, counts, strict=True)]
    return {"changes": changes, "queries": rows, "documents": documents, "left_out": left_out}

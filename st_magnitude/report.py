"""A report to share: one page of HTML with the decision, all systems, the queries and the settings.

`report.html` is the page, which draws itself in the browser from the data that are put into it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from st_magnitude._files import written
from st_magnitude.data.ranking import Ranking
from st_magnitude.evaluation.choice import System
from st_magnitude.result import cell, to_plain

__all__ = ["write_report"]

MOST_QUERIES = 2_000  # in the table
MOST_CHARACTERS = 300  # of a text
FIRST = 3  # documents of each query


def write_report(
    path: str | Path,
    title: str,
    headline: str,
    systems: Sequence[System],
    before: Ranking | None,
    after: Ranking | None,
    settings: Mapping[str, object],
    seed: int = 0,
) -> None:
    """Writes one HTML file, which loads nothing.

    Args:
        path: The file; one that exists is replaced.
        title: Its title, such as the name of the data.
        headline: The decision, and in further lines what else has to be read first.
        systems: The rows of the interval plot. Each is compared with ``before``, without it with
            ``after``, and without both with the first of them.
        before: The ranking without the change, such as the pretrained model's.
        after: The ranking with the change, of the same queries; None leaves out the queries.
        settings: Names and values. Everybody who gets the page can read them.
        seed: Seed of the intervals (`judge`).

    Raises:
        ValueError: If the rankings are of different queries.
        OSError: If the file cannot be written.
    """
    rankings = [before, after, *(system.ranking for system in systems)]
    reference = next((one for one in rankings if one is not None), None)
    names = {id(after): "after", id(before): "before"}
    names |= {id(system.ranking): system.name for system in reversed(systems)}
    page: dict[str, Any] = {"title": title, "headline": headline, "sides": []}
    page["systems"] = [_row(system, reference, seed) for system in systems]
    page["reference"] = names[id(reference)]
    page["settings"] = [[_text(name), _text(value)] for name, value in settings.items()]
    if after is not None:
        sides = [one for one in (before, after) if one is not None]
        page["sides"] = [{"name": names[id(one)], "ndcg": one.mean} for one in sides]
        page |= _queries(sides)
    data = json.dumps(to_plain(page), allow_nan=False)  # ASCII: it escapes U+2028
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    with written(path) as file:
        file.write(template.replace("{{ data }}", data))


def _row(system: System, reference: Ranking | None, seed: int) -> dict[str, Any]:
    row = {"name": system.name, "how": str(system.how), "ndcg": system.ranking.mean}
    if reference is None or system.ranking is reference:
        return row | {"gain": None}
    gain = system.ranking.minus(reference, seed=seed)
    return row | {"gain": gain, "said": str(gain), "verdict": gain.verdict}


def _text(value: object) -> str:
    """A text or another value, cut."""
    text = f"{value:g}" if isinstance(value, float) else cell(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"


def _queries(sides: Sequence[Ranking]) -> dict[str, Any]:
    """nDCG@10 of all queries, and the texts of those that changed most, or without a change of
    those that are answered worst."""
    asked = sides[-1]
    data = asked.data
    ndcg = np.stack([side.ndcg for side in sides], axis=1)  # (n, 1 or 2)
    pairs, counts = np.unique(ndcg[asked.has_answer], axis=0, return_counts=True)
    first = np.argsort(-abs(np.diff(ndcg)[:, 0]) if len(sides) == 2 else ndcg[:, 0], kind="stable")
    documents: dict[str, str] = {}
    rows = []
    for row in first[:MOST_QUERIES]:
        query = asked.query_ids[row]
        relevant = data.relevant.get(query, {})
        found = [list(side[query])[:FIRST] for side in sides]
        best = sorted(relevant, key=lambda document: -relevant[document])[:1]
        for document in (*found[0], *found[-1], *best):
            documents[document] = _text(data.corpus[document])
        shown = {"id": query, "text": _text(data.queries[query]), "ndcg": ndcg[row], "found": found}
        shown["right"] = [[document in relevant for document in one] for one in found]
        rows.append(shown | {"answer": best, "relevant": len(relevant)})
    left_out = len(asked) - len(rows)
    changes = [[*pair, count] for pair, count in zip(pairs, counts, strict=True)]
    return {"changes": changes, "queries": rows, "documents": documents, "left_out": left_out}

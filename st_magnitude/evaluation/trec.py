"""Run files in TREC's format, ``query Q0 document rank score tag``, which trec_eval, ir-measures and pytrec_eval read.

The reader of ir-measures accepts duplicates and NaN and does not name the line of a mistake, and it has no writer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from st_magnitude.data.beir import DataError

__all__ = ["read_run", "write_run"]


def write_run(run: Mapping[str, Mapping[str, float]], path: str | Path, tag: str = "st_magnitude") -> None:
    """Writes a run, {query id: {document id: score}}, to a file in TREC's format, best documents first.

    Equal scores rank by document id, the lower first. trec_eval ignores the rank and reverses that order.

    Args:
        run: The run.
        path: The file to write.
        tag: Name of the run in the last column, one word.

    Raises:
        DataError: If an id is empty or has whitespace, which the format cannot hold, or a score is not a number.

    Example:
        ::

            write_run(evaluator.runs["hybrid"], "hybrid.trec")
            # ir_measures qrels.trec hybrid.trec nDCG@10 R@100
    """
    if len(tag.split()) != 1:
        raise DataError(f"The tag of a run must be one word, got {tag!r}.")
    lines = []
    for query, documents in run.items():
        for rank, (document, score) in enumerate(sorted(documents.items(), key=lambda x: (-x[1], x[0])), start=1):
            for kind, name in (("query", query), ("document", document)):
                if not isinstance(name, str) or len(name.split()) != 1 or name.split()[0] != name:
                    raise DataError(f"The {kind} id {name!r} cannot be written to a TREC file: it must be one word.")
            if math.isnan(score):
                raise DataError(f"The score of document {document!r} for query {query!r} is not a number.")
            lines.append(f"{query} Q0 {document} {rank} {float(score)!r} {tag}\n")
    Path(path).write_text("".join(lines), encoding="utf-8")


def read_run(path: str | Path) -> dict[str, dict[str, float]]:
    """Reads a run of any search engine from a file in TREC's format.

    The result has the queries in the order of the file, and the best documents of each first.

    Raises:
        DataError: If a line is not ``query Q0 document rank score tag``, or a document occurs twice for a query. The
            message names the file and the line.
        OSError: If the file cannot be read.
    """
    run: dict[str, dict[str, float]] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}): save it in that encoding.") from None
    for number, line in enumerate(lines, start=1):
        if not (fields := line.split()):
            continue
        try:
            query, _, document, _, written, _ = fields
            score = float(written)
        except ValueError:
            raise DataError(f"{path}:{number}: expected 'query Q0 document rank score tag', got {line!r}.") from None
        if math.isnan(score):
            raise DataError(f"{path}:{number}: the score is not a number.")
        if document in run.setdefault(query, {}):
            raise DataError(f"{path}:{number}: document {document!r} occurs twice for query {query!r}.")
        run[query][document] = score
    return {query: dict(sorted(found.items(), key=lambda x: (-x[1], x[0]))) for query, found in run.items()}

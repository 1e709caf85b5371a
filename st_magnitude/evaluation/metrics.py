"""What the evaluators and `calibrate_exponent` share: judgments, rankings, nDCG per query, CSV rows."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator
from torch import Tensor

from st_magnitude.corpus.beir import is_file_name

__all__ = [
    "TILE",
    "CsvEvaluator",
    "append_csv",
    "are_unit",
    "check_judgments",
    "check_texts",
    "csv_name",
    "ndcg",
    "rank",
    "whole_number",
]

TILE = 2**24  # scores held at a time


def check_judgments(
    queries: Mapping[str, str], corpus: Mapping[str, str], relevant_docs: Mapping[str, Collection[str]]
) -> dict[str, set[str]]:
    """The judgments as query id -> set of document ids, checked before anything is encoded.

    A query without relevant documents is left out by the evaluators, as sentence-transformers does.

    Raises:
        ValueError: If queries or corpus are empty, no query has a relevant document, a relevant document is not in
            the corpus, or the relevant documents of a query are not a collection of ids.

    Example:
        >>> check_judgments({"q": "a question"}, {"d": "an answer"}, {"q": ["d"]})
        {'q': {'d'}}
    """
    check_texts(queries, corpus)
    for query, documents in relevant_docs.items():
        if isinstance(documents, (str, Mapping)):
            raise ValueError(
                f"relevant_docs[{query!r}] is {documents!r}: pass a set of document ids "
                "(of graded judgments, those that count as relevant)."
            )
    judgments = {query: set(documents) for query, documents in relevant_docs.items()}
    if unknown := sorted({str(d) for documents in judgments.values() for d in documents - corpus.keys()}):
        raise ValueError(
            f"{len(unknown)} relevant document(s) are not in the corpus, such as {unknown[:3]}: "
            "add them to corpus or drop them from relevant_docs."
        )
    if not any(judgments.get(query) for query in queries):
        raise ValueError(
            f"None of the {len(queries)} queries has a relevant document: relevant_docs maps query ids to sets of "
            f"document ids. Its keys start with {list(judgments)[:3]}, those of queries with {list(queries)[:3]}."
        )
    return judgments


def check_texts(queries: Mapping[str, str], corpus: Mapping[str, str]) -> None:
    """Refuses a side without texts.

    Raises:
        ValueError: If queries or corpus are empty.
    """
    for name, texts in {"queries": queries, "corpus": corpus}.items():
        if not texts:
            raise ValueError(f"{name} is empty: pass a dict of id -> text.")


def are_unit(norms: NDArray[np.float64]) -> bool:
    """Whether a model normalises, told by what it produces: all norms are 1, to the precision of half floats.

    Example:
        >>> are_unit(np.array([1.0, 1.0001])), are_unit(np.array([1.0, 1.01]))
        (True, False)
    """
    return bool(np.abs(norms - 1).max() < 1e-3)


def rank(scores: Tensor, k: int) -> Tensor:
    """Column indices of the k best scores of each row, best first, ties to the lower index: (n, m) -> (n, min(k, m)).

    Example:
        >>> import torch
        >>> rank(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), k=3)
        tensor([[1, 3, 2]])
    """
    k = min(k, scores.shape[1])
    values, indices = scores.topk(k, dim=1)
    # topk leaves open which of several equal scores it takes, and in which order.
    last = values[:, -1:]
    tied = ((scores >= last).sum(dim=1) > k).nonzero()[:, 0]
    if len(tied):  # rows with a document outside that equals the k-th best: keep the lowest columns of those
        rows, last = scores[tied], last[tied]
        above, equal = rows > last, rows == last
        equal &= equal.cumsum(dim=1) <= k - above.sum(dim=1, keepdim=True)
        indices[tied] = (above | equal).nonzero()[:, 1].view(-1, k)
    indices = indices.sort(dim=1).values
    order = scores.gather(1, indices).sort(dim=1, descending=True, stable=True).indices
    return indices.gather(1, order)


def ndcg(hits: Any, num_relevant: Any, k: int = 10) -> NDArray[np.float64]:
    """nDCG@k of every query with binary relevance: (n, >= k or the whole corpus), (n,) -> (n,) in [0, 1].

        sum_{i <= k} hit_i / log2(i + 1)  over the same sum with all relevant documents first

    Args:
        hits: Whether the document at each rank is relevant, best rank first.
        num_relevant: Number of relevant documents of each query, at least 1.
        k: Ranks that count.

    Example:
        >>> ndcg([[True, False], [False, True]], num_relevant=[1, 1]).round(3)
        array([1.   , 0.631])

    Source: Järvelin and Kekäläinen, Cumulated Gain-Based Evaluation of IR Techniques, 2002; the same as
    sentence-transformers' InformationRetrievalEvaluator.
    """
    discounts = 1 / np.log2(np.arange(2, k + 2))
    ranked = np.asarray(hits, dtype=np.float64)[:, :k]
    ideal = np.cumsum(discounts)[np.minimum(num_relevant, k) - 1]
    return ranked @ discounts[: ranked.shape[1]] / ideal


def append_csv(path: Path, row: Mapping[str, Any]) -> None:
    """One more row of a CSV file, which is begun with the row's keys as its header where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.is_file()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def csv_name(kind: str, name: str, is_written: bool) -> str:
    """The file that an evaluator of this name adds to.

    Raises:
        ValueError: If it would lie in another folder.
    """
    if is_written and name and not is_file_name(name):
        raise ValueError(f"The name {name!r} goes into that of a CSV file: leave out slashes, or pass write_csv=False.")
    return f"{kind}_evaluation_{name}_results.csv" if name else f"{kind}_evaluation_results.csv"


class CsvEvaluator(SentenceEvaluator):
    """An evaluator with a name, whose calls may add rows to a CSV file.

    Args:
        kind: The file is ``{kind}_evaluation_{name}_results.csv``.
        primary: The metric that chooses checkpoints, without the name.
        name: Goes in front of the keys and into the name of the CSV file.
        batch_size: Texts encoded at a time.
        write_csv: Whether a call with an ``output_path`` writes.
        show_progress_bar: Whether to show one.

    Raises:
        ValueError: See `csv_name`.
    """

    def __init__(
        self, kind: str, primary: str, name: str, batch_size: int, write_csv: bool, show_progress_bar: bool = False
    ) -> None:
        super().__init__()
        self.name = name
        self.batch_size = batch_size
        self.write_csv = write_csv
        self.show_progress_bar = show_progress_bar
        self.primary_metric = f"{name}_{primary}" if name else primary
        self.csv_file = csv_name(kind, name, write_csv)

    def finish(
        self,
        model: SentenceTransformer,
        metrics: dict[str, float],
        rows: Iterable[Mapping[str, Any]],
        output_path: str | None,
        epoch: int,
        steps: int,
    ) -> dict[str, float]:
        """Writes the rows, and gives the metrics under their full keys to the model card and to the caller."""
        if output_path is not None and self.write_csv:
            for row in rows:
                append_csv(Path(output_path) / self.csv_file, {"epoch": epoch, "steps": steps, **row})
        metrics = self.prefix_name_to_metrics(metrics, self.name)
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics


def whole_number(name: str, value: Any) -> int:
    """The value as an int.

    Raises:
        ValueError: If it is none, or below 1.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} is a whole number of at least 1, got {value!r}.")
    return int(value)

"""What the evaluators have in common: a name, a CSV file, metrics in the model card, and an encoded search task."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from st_magnitude.data.beir import is_file_name
from st_magnitude.data.retrieval import Judgments, RetrievalData
from st_magnitude.data.task import EncodedTask, check_texts
from st_magnitude.similarity import Similarity

__all__ = ["CsvEvaluator", "SearchEvaluator", "append_csv", "as_lines", "csv_name", "judged"]


def append_csv(path: Path, row: Mapping[str, Any]) -> None:
    """Appends a row to a CSV file. A new file gets the keys of the row as its header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.is_file()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def csv_name(kind: str, name: str, is_written: bool) -> str:
    """The name of the CSV file of an evaluator, which must not lie in another folder."""
    if is_written and name and not is_file_name(name):
        raise ValueError(
            f"The name {name!r} becomes part of the name of a CSV file: leave out slashes, or pass write_csv=False."
        )
    return f"{kind}_evaluation_{name}_results.csv" if name else f"{kind}_evaluation_results.csv"


def as_lines(metrics: Mapping[str, float]) -> str:
    """Metrics as text, one in each line, for logs."""
    return "\n".join(f"{key}: {value:.4f}" for key, value in metrics.items())


class CsvEvaluator(SentenceEvaluator):
    """An evaluator with a name whose calls may append rows to a CSV file.

    Args:
        kind: Beginning of the name of the CSV file, ``{kind}_evaluation_{name}_results.csv``.
        primary: The metric that chooses checkpoints, without the name.
        name: Prefix of the metrics and part of the name of the CSV file, so without slashes if that is written.
        batch_size: Number of texts that are encoded at a time.
        write_csv: Whether a call with an ``output_path`` appends its rows to the CSV file.
        show_progress_bar: Whether to show a progress bar.
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
        log: tuple[logging.Logger, str] | None = None,
    ) -> dict[str, float]:
        """Logs the metrics, appends the rows, and gives the metrics by their full keys to the card and the caller."""
        if log is not None:
            log[0].info(f"{log[1]}:\n{as_lines(metrics)}")
        if output_path is not None and self.write_csv:
            for row in rows:
                append_csv(Path(output_path) / self.csv_file, {"epoch": epoch, "steps": steps, **row})
        metrics = self.prefix_name_to_metrics(metrics, self.name)
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics


def judged(queries: Mapping[str, str], corpus: Mapping[str, str], relevant_docs: Judgments) -> RetrievalData:
    """The data of an evaluator. Judgments of other queries do not count, as in sentence-transformers."""
    check_texts(queries, corpus)
    if isinstance(relevant_docs, Mapping):
        relevant_docs = {query: ids for query, ids in relevant_docs.items() if query in queries}
    return RetrievalData(queries, corpus, relevant_docs)


class SearchEvaluator(CsvEvaluator):
    """What the evaluators of a judged search task have in common, above all their arguments.

    Args:
        queries: Query id -> text. Queries without a relevant document do not count.
        corpus: Document id -> text.
        relevant_docs: Query id -> ids of its relevant documents, or document id -> grade.
        similarity: A Similarity or its name. By default the model's own at each call: that of a closing ExponentNorm,
            else its ``similarity_fn_name``.
        query_prompt: Prompt of every query, in place of the model's own.
        query_prompt_name: Name of that prompt in ``model.prompts``.
        corpus_prompt: Prompt of every document, in place of the model's own.
        corpus_prompt_name: Name of that prompt in ``model.prompts``.
        **options: ``name``: prefix of the metrics and part of the name of the CSV file; ``batch_size``: number of texts
            that are encoded at a time; ``show_progress_bar``; ``write_csv``: whether a call with an ``output_path``
            appends rows to the CSV file.

    Raises:
        ValueError: Before anything is encoded, if the data are empty or inconsistent (see `RetrievalData`), or an
            argument is out of its range; at the call, if the model's similarity is a distance or an embedding is not
            finite.
    """

    def __init__(
        self,
        queries: Mapping[str, str],
        corpus: Mapping[str, str],
        relevant_docs: Judgments,
        similarity: Similarity | str | None = None,
        query_prompt: str | None = None,
        query_prompt_name: str | None = None,
        corpus_prompt: str | None = None,
        corpus_prompt_name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.task = judged(queries, corpus, relevant_docs)
        self.queries_ids = self.task.query_ids
        self.similarity = None if similarity is None else Similarity.named(similarity)
        prompts = {"query_prompt": query_prompt, "query_prompt_name": query_prompt_name}
        prompts |= {"corpus_prompt": corpus_prompt, "corpus_prompt_name": corpus_prompt_name}
        self.prompts = {name: prompt for name, prompt in prompts.items() if prompt is not None}

    def encode(self, model: SentenceTransformer) -> EncodedTask:
        """The embeddings of the task. A model that ends in Normalize keeps it, because it serves unit embeddings."""
        options = {"batch_size": self.batch_size, "show_progress_bar": self.show_progress_bar}
        return self.task.encode(model, **options, **self.prompts)

    def get_config_dict(self) -> dict[str, Any]:
        """The settings that the model card shows."""
        return self.prompts | ({"similarity": repr(self.similarity)} if self.similarity else {})

"""SearchEvaluator, the base class of evaluators."""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from st_magnitude.data.retrieval import Judgments, RetrievalData
from st_magnitude.data.task import EncodedTask, encode
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.raw import unwrapped, warn_of_unused_prompt

logger = logging.getLogger(__name__)


class SearchOptions(TypedDict, total=False):
    """The keyword arguments of every `SearchEvaluator`, which documents them."""

    similarity: Similarity | str | None
    name: str
    batch_size: int
    show_progress_bar: bool
    write_csv: bool
    query_prompt: str | None
    query_prompt_name: str | None
    corpus_prompt: str | None
    corpus_prompt_name: str | None


class SearchEvaluator(SentenceEvaluator):
    """Base class of the retrieval evaluators, with the arguments that they share.

    A document with the id and the text of a query is the query itself and does not count for it.
    The keys of the metrics have the prefix ``"{name}_"`` if there is a name, so in the Trainer
    ``metric_for_best_model="eval_{name}_{metric}"``. The CSV file is
    ``{Kind}_evaluation_{name}_results.csv``.

    A subclass sets ``kind`` and ``primary``, the metric that chooses checkpoints, and implements
    `measure`.

    Args:
        queries: Query id -> text. Queries without a relevant document do not count.
        corpus: Document id -> text.
        relevant_docs: Query id -> ids of its relevant documents, or document id -> grade.
        similarity: A Similarity or its name. By default the model's at each call: the
            similarity of a closing ExponentNorm, else ``similarity_fn_name``.
        name: Prefix of the metrics and part of the name of the CSV file.
        batch_size: Number of texts that are encoded at a time.
        write_csv: Whether a call with an ``output_path`` appends a row to the CSV file.
        query_prompt: Prompt of every query, in place of the model's, or ``query_prompt_name``
            in ``model.prompts``.
        corpus_prompt: Prompt of every document, or ``corpus_prompt_name``.

    Attributes:
        queries_ids: Ids of the queries that count.
        per_query: After a call, nDCG@10 of each of them by kind of search.

    Raises:
        ValueError: If the data are empty or inconsistent (see `RetrievalData`), or an argument is
            out of its range; at the call, if the model's similarity is a distance, or an embedding
            is not finite.
    """

    kind: ClassVar[str]
    primary: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = ()  # attributes for the model card

    def __init__(
        self,
        queries: Mapping[str, str],
        corpus: Mapping[str, str],
        relevant_docs: Judgments,
        *,
        similarity: Similarity | str | None = None,
        name: str = "",
        batch_size: int = 32,
        show_progress_bar: bool = False,
        write_csv: bool = True,
        query_prompt: str | None = None,
        query_prompt_name: str | None = None,
        corpus_prompt: str | None = None,
        corpus_prompt_name: str | None = None,
    ) -> None:
        super().__init__()
        # judgments of other queries do not count, as in sentence-transformers
        if isinstance(relevant_docs, Mapping):
            relevant_docs = {query: ids for query, ids in relevant_docs.items() if query in queries}
        self.data = RetrievalData(queries, corpus, relevant_docs)
        if self.data.own:
            logger.info(
                f"{len(self.data.own):,} queries are documents: left out of their own results."
            )
        self.queries_ids = self.data.query_ids
        self.per_query: dict[Any, NDArray[np.float64]] = {}
        self.similarity = None if similarity is None else Similarity.named(similarity)
        self.name = name
        self.write_csv = write_csv
        self.primary_metric = f"{name}_{self.primary}" if name else self.primary
        self.csv_file = "_".join(filter(None, (self.kind, "evaluation", name, "results.csv")))
        self.encoding: dict[str, Any] = {
            "batch_size": batch_size,
            "show_progress_bar": show_progress_bar,
        }
        prompts = {"query_prompt": query_prompt, "query_prompt_name": query_prompt_name}
        prompts |= {"corpus_prompt": corpus_prompt, "corpus_prompt_name": corpus_prompt_name}
        self.prompts: dict[str, Any] = {key: x for key, x in prompts.items() if x is not None}
        self._has_encoded = False

    def encode(self, model: SentenceTransformer) -> EncodedTask:
        """The embeddings of the task, as the model serves them: a closing Normalize is kept."""
        if not self._has_encoded and not any(name.startswith("corpus_") for name in self.prompts):
            warn_of_unused_prompt(model)
        self._has_encoded = True
        return encode(model, self.data, self.similarity, **self.encoding, **self.prompts)

    def measure(self, model: SentenceTransformer) -> dict[str, float]:
        """The metrics of a model, without the name of the evaluator."""
        raise NotImplementedError

    def report(self, metrics: dict[str, float]) -> str:
        return "\n".join(f"{key}: {value:.4f}" for key, value in metrics.items())

    def __call__(  # type: ignore[override]
        self,
        model: SentenceTransformer,
        output_path: str | None = None,
        epoch: int = -1,
        steps: int = -1,
    ) -> dict[str, float]:
        """Measures, logs, writes the row of the CSV file, and returns all metrics by key."""
        model = unwrapped(model)
        metrics = self.measure(model)
        of = f"{self.kind} evaluation of the model on the {self.name or 'given'} data"
        logger.info(f"{of}:\n{self.report(metrics)}")
        if output_path is not None and self.write_csv:
            place = {"epoch": epoch, "steps": steps}
            _append(Path(output_path) / self.csv_file, place | metrics)
        metrics = self.prefix_name_to_metrics(metrics, self.name)
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics

    def get_config_dict(self) -> dict[str, Any]:
        """The settings that the model card shows, with the prompts and a given similarity."""
        shown = {name: getattr(self, name) for name in self.settings} | self.prompts
        shown["similarity"] = repr(self.similarity) if self.similarity else None
        return {name: value for name, value in shown.items() if value is not None}


def _append(path: Path, row: Mapping[str, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(row), lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerow(row)

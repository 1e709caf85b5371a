"""Local retrieval data as an MTEB task: ``python -m st_magnitude.mteb MODEL DATA`` scores a saved model with it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from sentence_transformers import SentenceTransformer

from st_magnitude.data import RetrievalData, load_beir
from st_magnitude.surgery import load

if TYPE_CHECKING:
    from mteb.abstasks import AbsTaskRetrieval

__all__ = ["evaluate_retrieval", "retrieval_task"]


def retrieval_task(data: RetrievalData, name: str) -> AbsTaskRetrieval:
    """An MTEB retrieval task of local data, for ``mteb.evaluate(model, task)``.

    Args:
        data: Queries, corpus and judgements. All queries form the split ``test``.
        name: What MTEB's results call the task.

    Raises:
        ImportError: If mteb is not installed: ``pip install "st-magnitude[eval]"``.
    """
    try:
        from mteb.abstasks import AbsTaskRetrieval
        from mteb.abstasks.task_metadata import TaskMetadata
    except ImportError as error:
        raise ImportError('mteb is not installed: pip install "st-magnitude[eval]"') from error

    class LocalRetrieval(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name=name,
            description="Retrieval on local data.",
            reference=None,
            dataset={"path": "local", "revision": "local"},
            type="Retrieval",
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
            date=None,
            domains=None,
            task_subtypes=None,
            license=None,
            annotations_creators=None,
            dialect=None,
            sample_creation=None,
            bibtex_citation=None,
        )

        def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
            if self.data_loaded:
                return
            judged = {q: dict.fromkeys(sorted(docs), 1) for q, docs in data.relevant_docs.items() if docs}
            self.queries = {"test": {q: data.queries[q] for q in judged}}
            self.corpus = {"test": {d: {"title": "", "text": text} for d, text in data.corpus.items()}}
            self.relevant_docs = {"test": judged}
            self.convert_v1_dataset_format_to_v2(num_proc=num_proc)
            self.data_loaded = True

    return LocalRetrieval()


def evaluate_retrieval(
    model: SentenceTransformer, data: RetrievalData, name: str = "LocalRetrieval", batch_size: int = 32
) -> dict[str, float]:
    """MTEB's scores (``ndcg_at_10``, ``recall_at_100``, ...) of a model on local data.

    MTEB's result cache is not used: it would mix up models without a hub name.
    """
    import mteb

    options: Any = {"batch_size": batch_size}
    result = mteb.evaluate(
        model, retrieval_task(data, name), cache=None, encode_kwargs=options, show_progress_bar=False
    )
    return dict(result.task_results[0].scores["test"][0])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m st_magnitude.mteb", description=__doc__)
    parser.add_argument("model", help="folder of a saved model")
    parser.add_argument("data", help="folder in BEIR's layout")
    parser.add_argument("--split", help="of the qrels; default: all queries")
    arguments = parser.parse_args()
    model = load(arguments.model, device="cpu")
    scores = evaluate_retrieval(model, load_beir(arguments.data, arguments.split))
    print(json.dumps({k: v for k, v in scores.items() if isinstance(v, (int, float))}))


if __name__ == "__main__":
    main()

"""MTEB for what lies on this machine: saved models by their folder, and your own data as tasks.

``st-magnitude mteb run -m FOLDER -t DATA`` is mteb's own command line with local models and local data.
``python -m st_magnitude.mteb MODEL DATA`` prints the scores of one model on one retrieval task as JSON.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sentence_transformers import SentenceTransformer

from st_magnitude._json import parse
from st_magnitude._upstream import register_mteb_model, register_mteb_task
from st_magnitude.corpus.beir import DataError, RetrievalData, available_splits, load_beir
from st_magnitude.surgery.export import load

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask, AbsTaskRetrieval
    from mteb.models import ModelMeta

__all__ = [
    "clustering_task",
    "evaluate_retrieval",
    "local_model",
    "local_task",
    "register_model",
    "register_task",
    "retrieval_task",
    "run",
    "sts_task",
]


def retrieval_task(data: RetrievalData, name: str) -> AbsTaskRetrieval:
    """An MTEB retrieval task of local data, for ``mteb.evaluate(model, task)``.

    Args:
        data: Queries, corpus and judgements. All queries form the split ``test``.
        name: What MTEB's results call the task.

    Raises:
        ImportError: If mteb is not installed: ``pip install "st-magnitude[eval]"``.
    """
    abstasks = _abstasks()

    class LocalRetrieval(abstasks.AbsTaskRetrieval):  # type: ignore[name-defined]
        metadata = _metadata(name, "Retrieval", "ndcg_at_10")

        def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
            if getattr(self, "data_loaded", False):
                return
            judged = {q: dict.fromkeys(sorted(docs), 1) for q, docs in data.relevant_docs.items() if docs}
            self.queries = {"test": {q: data.queries[q] for q in judged}}
            self.corpus = {"test": {d: {"title": "", "text": text} for d, text in data.corpus.items()}}
            self.relevant_docs = {"test": judged}
            self.convert_v1_dataset_format_to_v2(num_proc=num_proc)
            self.data_loaded = True

    return LocalRetrieval()


def sts_task(pairs: Iterable[tuple[str, str, float]], name: str) -> AbsTask:
    """An MTEB task of scored pairs of texts: rank correlation of the model's similarity with the scores.

    Args:
        pairs: Two texts and their score, on any scale.
        name: What MTEB's results call the task.
    """
    abstasks = _abstasks()
    first, second, scores = (list(column) for column in zip(*pairs, strict=True))

    class LocalSTS(abstasks.AbsTaskSTS):  # type: ignore[name-defined]
        metadata = _metadata(name, "STS", "cosine_spearman")
        min_score, max_score = min(scores), max(scores)

        def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
            self.dataset = _dataset(sentence1=first, sentence2=second, score=scores)
            self.data_loaded = True

    return LocalSTS()


def clustering_task(texts: Sequence[str], labels: Sequence[Any], name: str) -> AbsTask:
    """An MTEB clustering task: v-measure of k-means over all texts.

    Args:
        texts: What is clustered.
        labels: The class of each, as many.
        name: What MTEB's results call the task.
    """
    abstasks = _abstasks()
    if len(texts) != len(labels):
        raise DataError(f"There are {len(texts)} texts and {len(labels)} labels: give one label a text.")

    class LocalClustering(abstasks.AbsTaskClustering):  # type: ignore[name-defined]
        metadata = _metadata(name, "Clustering", "v_measure")
        max_fraction_of_documents_to_embed = None

        def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
            self.dataset = _dataset(sentences=list(texts), labels=list(labels))
            self.data_loaded = True

    return LocalClustering()


def local_task(path: str | Path, name: str | None = None) -> AbsTask:
    """A task from what lies at a path.

    - A folder in BEIR's layout: retrieval, the split ``test`` where there is one, else all queries.
    - A ``.csv``, ``.tsv`` or ``.jsonl`` file with ``sentence1``, ``sentence2`` and ``score``: STS.
    - One with ``text`` and ``label``: clustering.

    Args:
        path: The folder or file.
        name: By default the name of the folder or file and a hash of the contents, so that mteb's cache never gives a
            changed task an old score.

    Raises:
        DataError: If it is none of these; the message names file, line and remedy.
    """
    path = Path(path)
    if name is None:
        name = f"{path.stem}-{_hash_of(path)[:8]}"
    if path.is_dir():
        return retrieval_task(load_beir(path, "test" if "test" in available_splits(path) else None), name)
    rows = list(_rows(path))
    columns = set(rows[0][1]) if rows else set()
    if {"sentence1", "sentence2", "score"} <= columns:
        return sts_task([_pair(path, number, row) for number, row in rows], name)
    if {"text", "label"} <= columns:
        if lacking := [number for number, row in rows if not {"text", "label"} <= row.keys()]:
            raise DataError(f"{path}:{lacking[0]}: has not both 'text' and 'label'.")
        return clustering_task([str(row["text"]) for _, row in rows], [str(row["label"]) for _, row in rows], name)
    raise DataError(
        f"{path} has {f'the columns {sorted(columns)}' if rows else 'no rows'}: sentence1, sentence2 and score make an "
        "STS task, text and label a clustering task, a folder in BEIR's layout a retrieval task."
    )


def local_model(path: str | Path) -> ModelMeta:
    """What mteb has to know of a model in a folder: a name, a revision, its similarity, and how to load it.

    The name is ``local/FOLDER`` and the revision a hash of weights and configuration: mteb's cache keeps models apart
    by both, and gives models without them each other's scores. ``.load_model()`` gives what ``mteb.evaluate`` takes.

    Raises:
        DataError: If the folder holds no model.
        ImportError: If mteb is not installed.
    """
    _abstasks()
    from mteb.models import ModelMeta, SentenceTransformerEncoderWrapper
    from mteb.models.model_meta import ScoringFunction

    folder = Path(path).resolve()
    if not (folder / "modules.json").is_file():
        raise DataError(f"{path} holds no SentenceTransformer (no modules.json): give the folder of a saved model.")
    config = folder / "config_sentence_transformers.json"
    try:
        saved = parse(config.read_text(encoding="utf-8")) if config.is_file() else {}
        similarity = ScoringFunction(saved.get("similarity_fn_name") or "cosine")
    except (AttributeError, ValueError) as error:
        raise DataError(f"{config} is damaged ({error}): save the model again, or get another copy.") from None

    def loader(name: str, revision: str | None = None, device: str | None = None, **kwargs: Any) -> Any:
        dim = kwargs.pop("embed_dim", None)
        options = {"truncate_dim": dim} if dim is not None else {}
        return SentenceTransformerEncoderWrapper(load(folder, device=device, **options, **kwargs))

    return ModelMeta.create_empty(
        overwrites={
            "name": f"local/{folder.name}",
            "revision": _hash_of(folder),
            "loader": loader,
            "similarity_fn_name": similarity,
            "framework": ["Sentence Transformers"],
        }
    )


def register_model(path: str | Path) -> str:
    """Makes mteb know a model in a folder, as if it were one of its own, and returns its name there."""
    meta = local_model(path)
    register_mteb_model(meta)
    return str(meta.name)


def register_task(path: str | Path) -> str:
    """Makes mteb know a local task (see `local_task`) and returns its name there."""
    task = local_task(path)
    name = str(task.metadata.name)
    register_mteb_task(name, type(task))
    return name


def run(arguments: Sequence[str]) -> None:
    """mteb's command line, where the values of ``-m`` and ``-t`` may be paths.

    Args:
        arguments: As for mteb: ``["run", "-m", "my-model", "-t", "my-data", "--output-folder", "results"]``.

    Raises:
        DataError: If a path holds no model or no task.
        ImportError: If mteb is not installed.
        SystemExit: From mteb, for arguments that it does not know.
    """
    _abstasks()
    from mteb.cli.build_cli import main as mteb_main

    replaced, option = [], ""
    for argument in arguments or ["--help"]:  # of none, mteb makes an AttributeError
        if argument.startswith("-"):
            option, _, value = argument.partition("=")
            if value:
                raise DataError(f"Write {option} {value} instead of {argument}.")
        elif option in ("-m", "--model") and Path(argument).is_dir():
            argument = register_model(argument)
        elif option in ("-t", "--tasks") and Path(argument).exists():
            argument = register_task(argument)
        replaced.append(argument)
    before, sys.argv = sys.argv, ["mteb", *replaced]
    try:
        mteb_main()
    finally:
        sys.argv = before


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


def _abstasks() -> Any:
    try:
        from mteb import abstasks
    except ImportError as error:
        raise ImportError('mteb is not installed: pip install "st-magnitude[eval]"') from error
    return abstasks


def _metadata(name: str, kind: Any, main_score: str) -> Any:
    from mteb.abstasks.task_metadata import TaskMetadata

    return TaskMetadata(
        name=name,
        description=f"{kind} on local data.",
        reference=None,
        dataset={"path": "local", "revision": "local"},
        type=kind,
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score=main_score,
        date=None,
        domains=None,
        task_subtypes=None,
        license=None,
        annotations_creators=None,
        dialect=None,
        sample_creation=None,
        bibtex_citation=None,
    )


def _dataset(**columns: list[Any]) -> Any:
    from datasets import Dataset, DatasetDict

    return DatasetDict({"test": Dataset.from_dict(columns)})


def _hash_of(path: Path) -> str:
    """Of all that counts in a file or folder; a model card and a training record do not."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        inside = file.relative_to(path).as_posix()
        if file.suffix in (".md", ".log", ".png") or inside in ("training.json", "revela.json"):
            continue
        if inside.startswith(("checkpoints/", ".")):
            continue
        digest.update(f"{inside}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while block := stream.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and rows of a table."""
    readers: dict[str, Callable[[Any], Any]] = {
        ".csv": csv.DictReader,
        ".tsv": lambda file: csv.DictReader(file, delimiter="\t"),
    }
    if path.suffix not in (*readers, ".jsonl"):
        raise DataError(f"{path} is no table: name a .csv, .tsv or .jsonl file, or a folder in BEIR's layout.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}): save it in that encoding.") from None
    with io.StringIO(text, newline="") as file:
        if path.suffix in readers:
            reader = readers[path.suffix](file)
            try:
                for row in reader:
                    if None in row or None in row.values():
                        raise DataError(f"{path}:{reader.line_num}: this line has not as many fields as the first.")
                    yield reader.line_num, row
            except csv.Error as error:
                raise DataError(f"{path}:{reader.line_num}: not a line of a table: {error}.") from None
            return
        for number, line in enumerate(file, start=1):
            try:
                row = parse(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: not valid JSON ({error}): {line[:60]!r}.") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: expected an object with named fields, got {type(row).__name__}.")
            yield number, row


def _pair(path: Path, number: int, row: dict[str, Any]) -> tuple[str, str, float]:
    try:
        first, second, score = str(row["sentence1"]), str(row["sentence2"]), float(row["score"])
    except KeyError as error:
        raise DataError(f"{path}:{number}: {error} is missing.") from None
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"{path}:{number}: the score {row['score']!r} is not a number.")
    return first, second, score


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

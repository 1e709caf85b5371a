"""MTEB for local files: models in folders, and your own data as tasks. Needs the extra ``eval``.

``st-magnitude mteb run -m FOLDER -t DATA`` runs mteb's command line with local models and local data.
``python -m st_magnitude.mteb MODEL DATA`` prints the scores of one model on one retrieval task as JSON.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sentence_transformers import SentenceTransformer

from st_magnitude._checks import needs
from st_magnitude._json import parse
from st_magnitude._upstream import register_mteb_model, register_mteb_task
from st_magnitude.data.beir import DataError, json_rows, splits_of
from st_magnitude.data.retrieval import RetrievalData
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
    """Makes an MTEB retrieval task of local data, for ``mteb.evaluate(model, task)``.

    Args:
        data: Queries, corpus and judgments. All queries form the split ``test``.
        name: Name of the task in MTEB's results.
    """
    abstasks = _abstasks()

    class LocalRetrieval(abstasks.AbsTaskRetrieval):  # type: ignore[name-defined]
        metadata = _metadata(name, "Retrieval", "ndcg_at_10")

        def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
            if getattr(self, "data_loaded", False):
                return
            judged = {q: dict(sorted(grades.items())) for q, grades in data.relevant.items() if grades}
            self.queries = {"test": {q: data.queries[q] for q in judged}}
            self.corpus = {"test": {d: {"title": "", "text": text} for d, text in data.corpus.items()}}
            self.relevant_docs = {"test": judged}
            self.convert_v1_dataset_format_to_v2(num_proc=num_proc)
            self.data_loaded = True

    return LocalRetrieval()


def sts_task(pairs: Iterable[tuple[str, str, float]], name: str) -> AbsTask:
    """Makes an MTEB task of scored pairs of texts: the rank correlation of the model's similarity with the scores.

    Args:
        pairs: Pairs of texts with a score, on any scale.
        name: Name of the task in MTEB's results.
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
    """Makes an MTEB clustering task: the v-measure of k-means over all texts.

    Args:
        texts: Texts to cluster.
        labels: Class of each text.
        name: Name of the task in MTEB's results.

    Raises:
        DataError: If the numbers of texts and labels differ.
    """
    abstasks = _abstasks()
    if len(texts) != len(labels):
        raise DataError(f"There are {len(texts)} texts and {len(labels)} labels: give every text one label.")

    class LocalClustering(abstasks.AbsTaskClustering):  # type: ignore[name-defined]
        metadata = _metadata(name, "Clustering", "v_measure")
        max_fraction_of_documents_to_embed = None

        def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
            self.dataset = _dataset(sentences=list(texts), labels=list(labels))
            self.data_loaded = True

    return LocalClustering()


def local_task(path: str | Path, name: str | None = None) -> AbsTask:
    """Makes an MTEB task of a folder or a table.

    - A folder in BEIR's layout becomes a retrieval task, of the split ``test`` if it exists, else of all queries.
    - A ``.csv``, ``.tsv`` or ``.jsonl`` file with ``sentence1``, ``sentence2`` and ``score`` becomes an STS task.
    - Such a file with ``text`` and ``label`` becomes a clustering task.

    Args:
        path: The folder or file.
        name: Name of the task. By default, the name of the folder or file and a hash of the contents, so that mteb's
            cache never gives the old score to a changed task.

    Raises:
        DataError: If the path holds no such data; the message names file and line.
    """
    path = Path(path)
    if name is None:
        name = f"{path.stem}-{_hash_of(path)[:8]}"
    if path.is_dir():
        return retrieval_task(RetrievalData.from_beir(path, "test" if "test" in splits_of(path) else None), name)
    rows = list(_rows(path))
    columns = set(rows[0][1]) if rows else set()
    if {"sentence1", "sentence2", "score"} <= columns:
        return sts_task([_pair(path, number, row) for number, row in rows], name)
    if {"text", "label"} <= columns:
        if lacking := [number for number, row in rows if not {"text", "label"} <= row.keys()]:
            raise DataError(f"{path}:{lacking[0]}: the row does not have both 'text' and 'label'.")
        return clustering_task([str(row["text"]) for _, row in rows], [str(row["label"]) for _, row in rows], name)
    raise DataError(
        f"{path} has {f'the columns {sorted(columns)}' if rows else 'no rows'}: sentence1, sentence2 and score make an "
        "STS task, text and label a clustering task, a folder in BEIR's layout a retrieval task."
    )


def local_model(path: str | Path) -> ModelMeta:
    """Describes a model in a folder to mteb: its name, revision and similarity, and how to load it.

    The name is ``local/FOLDER`` and the revision is a hash of weights and configuration. mteb's cache tells models
    apart by both, and would mix up the scores of models without them. ``.load_model()`` returns a model for
    ``mteb.evaluate``.

    Args:
        path: Folder of a saved model.

    Raises:
        DataError: If the folder does not hold a model.
    """
    _abstasks()
    from mteb.models import ModelMeta, SentenceTransformerEncoderWrapper
    from mteb.models.model_meta import ScoringFunction

    folder = Path(path).resolve()
    if not (folder / "modules.json").is_file():
        raise DataError(
            f"{path} does not hold a SentenceTransformer (no modules.json): give the folder of a saved model."
        )
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
    """Registers a model in a folder with mteb, and returns its name there."""
    meta = local_model(path)
    register_mteb_model(meta)
    return str(meta.name)


def register_task(path: str | Path) -> str:
    """Registers a local task (see `local_task`) with mteb, and returns its name there."""
    task = local_task(path)
    name = str(task.metadata.name)
    register_mteb_task(name, type(task))
    return name


def run(arguments: Sequence[str]) -> dict[str, tuple[str, float]]:
    """Runs mteb's command line, where the values of ``-m`` and ``-t`` may be paths.

    Args:
        arguments: Arguments of mteb: ``["run", "-m", "my-model", "-t", "my-data", "--output-folder", "results"]``.

    Returns:
        Name and value of the main score of every task, by the name of the task; empty for other commands than ``run``.

    Raises:
        DataError: If a path does not hold a model or a task, or a name is neither a path nor known to mteb.
        FileExistsError: If the output folder is a file.
        SystemExit: If mteb does not know an argument.
    """
    _abstasks()
    from mteb.cli.build_cli import build_cli
    from mteb.cli.build_cli import main as mteb_main

    replaced, option = [], ""
    for argument in arguments or ["--help"]:  # without arguments, mteb raises AttributeError
        if argument.startswith("-"):
            option, _, value = argument.partition("=")
            if value:
                raise DataError(f"Write {option} {value} instead of {argument}.")
        elif option in ("-m", "--model"):
            argument = _model_name(argument)
        elif option in ("-t", "--tasks"):
            argument = _task_name(argument)
        elif option == "--output-folder" and Path(argument).is_file():
            raise FileExistsError(f"{argument} is a file; --output-folder takes a folder.")
        replaced.append(argument)
    before, sys.argv = sys.argv, ["mteb", *replaced]
    try:
        mteb_main()
        return _main_scores(build_cli().parse_args(replaced)) if replaced[0] == "run" else {}
    finally:
        sys.argv = before


def _model_name(argument: str) -> str:
    """The name by which mteb knows a model: that of a folder, or one of the hub."""
    if Path(argument).is_dir():
        return register_model(argument)
    if "/" not in argument or argument.startswith((".", "/", "~")):
        raise DataError(f"{argument} is neither a folder nor the id of a model on the hub, such as organisation/name.")
    return argument


def _task_name(argument: str) -> str:
    """The name by which mteb knows a task: that of a folder or table, or one of its own."""
    from mteb import get_task

    if Path(argument).exists():
        return register_task(argument)
    try:
        get_task(argument)
    except KeyError:
        raise DataError(f"{argument} is neither a folder nor one of mteb's tasks.") from None
    return argument


def _main_scores(options: argparse.Namespace) -> dict[str, tuple[str, float]]:
    """The main scores that ``mteb run`` has written for a model, read from its results folder."""
    import mteb

    found = mteb.ResultCache(options.output_folder).load_results(
        models=[mteb.get_model_meta(options.model, options.model_revision)], tasks=options.tasks, include_remote=False
    )
    return {
        result.task_name: (mteb.get_task(result.task_name).metadata.main_score, result.get_score())
        for model in found
        for result in model.task_results
    }


def evaluate_retrieval(
    model: SentenceTransformer, data: RetrievalData, name: str = "LocalRetrieval", batch_size: int = 32
) -> dict[str, float]:
    """Returns MTEB's scores (``ndcg_at_10``, ``recall_at_100``, ...) of a model on local data.

    MTEB's result cache is not used, because it would mix up models without a hub name.

    Args:
        model: Any SentenceTransformer.
        data: Queries, corpus and judgments.
        name: Name of the task in MTEB's messages.
        batch_size: Number of texts encoded at a time.
    """
    import mteb

    options: Any = {"batch_size": batch_size}
    result = mteb.evaluate(
        model, retrieval_task(data, name), cache=None, encode_kwargs=options, show_progress_bar=False
    )
    return dict(result.task_results[0].scores["test"][0])


def _abstasks() -> Any:
    with needs("st_magnitude.mteb", "eval"):
        from mteb import abstasks
    return abstasks


def _metadata(name: str, kind: Any, main_score: str) -> Any:
    from mteb.abstasks.task_metadata import TaskMetadata

    return TaskMetadata(
        name=name,
        description=f"{kind} on local data.",
        dataset={"path": "local", "revision": "local"},
        type=kind,
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score=main_score,
    )


def _dataset(**columns: list[Any]) -> Any:
    from datasets import Dataset, DatasetDict

    return DatasetDict({"test": Dataset.from_dict(columns)})


def _hash_of(path: Path) -> str:
    """A hash of a file, or of all files in a folder except model cards, pictures and records of training."""
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
    if path.suffix not in (".csv", ".tsv", ".jsonl"):
        raise DataError(f"{path} is not a table: name a .csv, .tsv or .jsonl file, or a folder in BEIR's layout.")
    if path.suffix == ".jsonl":
        with path.open("rb") as lines:
            yield from json_rows(lines, path)
        return
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(f"{path}:{reader.line_num}: this line has another number of fields than the first.")
                yield reader.line_num, row
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}): save it in that encoding.") from None
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not a line of a table: {error}.") from None


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
    parser.add_argument("--split", help="split of the qrels; default: all queries")
    arguments = parser.parse_args()
    model = load(arguments.model, device="cpu")
    scores = evaluate_retrieval(model, RetrievalData.from_beir(arguments.data, arguments.split))
    print(json.dumps({k: v for k, v in scores.items() if isinstance(v, (int, float))}))


if __name__ == "__main__":
    main()

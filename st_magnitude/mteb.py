"""MTEB for a model in a folder and for your own retrieval data. Needs the extra ``eval``."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer

from st_magnitude._checks import InputError, foreign, needs
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.saving.export import load
from st_magnitude.surgery.raw import unwrapped

with needs("st_magnitude.mteb", "eval"):
    import mteb
    from mteb.abstasks import AbsTaskRetrieval
    from mteb.abstasks.retrieval_dataset_loaders import RetrievalSplitData
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.models import EncoderProtocol, ModelMeta, SentenceTransformerEncoderWrapper
    from mteb.results import ModelResult

__all__ = ["evaluate", "local_model", "retrieval_task"]


def retrieval_task(data: RetrievalData) -> AbsTaskRetrieval:
    """Makes an MTEB retrieval task of local data, with its grades. All queries form the split
    ``test``.

    The document that is the query itself is left out of the results: mteb does so by id, so a query
    that shares its id with another text is renamed. Its name in MTEB's results is that of the data
    and a hash of the contents. docs/evaluation.md has more.
    """
    contents = data.digest
    others = data.queries.keys() & data.corpus.keys() - data.own
    names = {query: f"{query}, the query" if query in others else query for query in data.query_ids}

    class LocalRetrieval(AbsTaskRetrieval):
        ignore_identical_ids = True
        metadata = TaskMetadata(
            name=f"{_file_name(data.name)}-{contents[:8]}",
            description="Retrieval on local data.",
            dataset={"path": "local", "revision": contents},
            type="Retrieval",
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
        )

        def load_data(self, num_proc: int | None = None, **kwargs: object) -> None:
            queries = [{"id": name, "text": data.queries[query]} for query, name in names.items()]
            corpus = [{"id": key, "title": "", "text": text} for key, text in data.corpus.items()]
            split: RetrievalSplitData = {
                "queries": Dataset.from_list(queries),
                "corpus": Dataset.from_list(corpus),
                "relevant_docs": {name: dict(data.relevant[q]) for q, name in names.items()},
                "top_ranked": None,
            }
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    return LocalRetrieval()


def local_model(path: str | Path) -> EncoderProtocol:
    """A model in a folder, as ``mteb.evaluate`` takes it: its name is ``local/FOLDER``, and its
    revision a hash of weights and configuration."""
    folder = Path(path).resolve()
    model = SentenceTransformerEncoderWrapper(load(folder))
    known = {"name": f"local/{_file_name(folder.name)}", "revision": _revision(folder)}
    model.mteb_model_meta = model.mteb_model_meta.model_copy(update=known)
    return model


def evaluate(
    model: SentenceTransformer | str | Path,
    tasks: Iterable[RetrievalData | str],
    output: str | Path | None = None,
    **encode: Any,
) -> ModelResult:
    """Runs mteb on local data and on mteb's own tasks, and returns its results.

    Args:
        model: A model, its folder, or any name that mteb knows.
        tasks: Retrieval data, and names of mteb's tasks.
        output: Folder of mteb's results, whose scores are not computed again. By default nothing is
            written.
        **encode: Options of ``encode``, which mteb passes on, such as ``batch_size=128``.

    Raises:
        ValueError: If mteb does not know a name, a model without a name is to be kept in
            ``output``, or a file of its results is torn.
    """
    if not isinstance(model, (str, Path)):
        model = unwrapped(model)
        if output is not None:
            raise InputError(
                "mteb keeps results by the name of a model: save this one, and pass its folder."
            )
    runs: SentenceTransformer | EncoderProtocol | ModelMeta
    try:
        chosen = [mteb.get_task(x) if isinstance(x, str) else retrieval_task(x) for x in tasks]
        if isinstance(model, SentenceTransformer):
            runs = model
        elif Path(model).is_dir():
            runs = local_model(model)
        else:
            runs = mteb.get_model_meta(str(model))
    except KeyError as error:  # of a name that mteb does not know
        said = str(error.args[0]).removeprefix("KeyError: ")
        raise InputError(f"{said} Check the path, or give a name that mteb knows.") from None
    cache = None
    if output is not None:
        _refuse_torn(Path(output))
        cache = mteb.ResultCache(output)
    bars = encode.setdefault("show_progress_bar", False)
    options: Any = {"encode_kwargs": encode, "show_progress_bar": bars}
    with foreign():
        return mteb.evaluate(runs, chosen, cache=cache, **options)


def _file_name(name: str) -> str:
    """A name that mteb can give to a file or a folder: at most 50 letters, digits and hyphens."""
    return re.sub(r"[^\w.-]+", "-", name)[:50].strip("-.") or "local"


def _refuse_torn(output: Path) -> None:
    """Names a file of mteb's results that is not JSON, as a killed process leaves it."""
    for file in output.rglob("*.json"):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(
                f"{file} is torn ({error}). Remove it, and mteb computes it again."
            ) from error


def _revision(folder: Path) -> str:
    """A hash of the files of a model, without cards, pictures, hidden files and records."""
    sha = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        inside = file.relative_to(folder).as_posix()
        is_record = file.suffix in (".md", ".log", ".png") or inside == "training.json"
        if not is_record and not inside.startswith("."):
            sha.update(f"{inside}\0{file.stat().st_size}\0".encode())
            sha.update(file.read_bytes())
    return sha.hexdigest()

"""Embeddings of a large corpus in shards, on one device or several; a job that was stopped continues where it ended.

A folder of embeddings contains::

    encoding.json          what was encoded and how, written before all else
    shard-00000.parquet    columns _id (string) and embedding (fixed-size list), in the order of the corpus
    shard-00001.parquet    ...

Every file is either complete or absent. pandas, polars, DuckDB and ``datasets`` read the shards; see `load_embeddings`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Dataset, Features, Value
from datasets import Sequence as ListOf
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from st_magnitude._config import list_differences
from st_magnitude._files import whole_file
from st_magnitude._json import parse
from st_magnitude.corpus.beir import DataError
from st_magnitude.corpus.texts import documents_of, read_through, shards_of
from st_magnitude.corpus.workers import checked_devices, encode_shards
from st_magnitude.training.trainer import Stopped

__all__ = ["encode_corpus", "load_embeddings"]

logger = logging.getLogger(__name__)

_RECORD = "encoding.json"
_METRICS = {"cosine": "cosine", "dot": "inner product", "euclidean": "L2", "manhattan": "L1"}


def encode_corpus(
    model: SentenceTransformer,
    corpus: Mapping[str, str] | Dataset | str | Path,
    output: str | Path,
    *,
    role: str = "document",
    prompt: str | None = None,
    dtype: str = "float32",
    shard_size: int = 20_000,
    batch_size: int = 32,
    devices: str | Sequence[str] | None = None,
    show_progress_bar: bool | None = None,
) -> dict[str, Any]:
    """Encodes a corpus into a folder of shards, or only the shards that the folder lacks.

    Embeddings are those of ``model.encode_document``, with their norms. Whether to divide them by a power of the norm
    is a choice of the index (`Similarity.document`). For every device, one shard of texts and embeddings
    is in memory, and about 10 bytes for every document.

    A job that is stopped or killed leaves complete shards only. The same call then checks that the corpus is the
    same, and encodes the shards that are missing or damaged. Batch size and devices may differ between the calls.

    Args:
        model: The model. Its state counts, including ``max_seq_length``, ``truncate_dim`` and the precision.
        corpus: Mapping of ids to texts; a ``datasets.Dataset`` with the columns ``_id`` (or ``id``), ``text`` and, as
            in BEIR, ``title``, which is put before the text; or a path to a .jsonl or .parquet file of such rows, to a
            folder of either, or to a folder in BEIR's layout (its corpus.jsonl). Files are read as they are needed.
        output: A new or empty folder, or one that this function has begun.
        role: ``"document"`` or ``"query"``, for ``encode_document`` or ``encode_query``.
        prompt: Text to put before every text; by default the model's own prompt for the role.
        dtype: Type of the stored numbers, ``"float32"`` or ``"float16"``.
        shard_size: Number of documents in a shard. A job that is killed loses at most one shard per device.
        batch_size: Number of texts encoded at a time on each device.
        devices: None for the device of the model, one device, or several, as in ``["cuda:0", "cuda:1"]`` or
            ``["cpu", "cpu"]``, for one process each. With several, the calling script needs the usual
            ``if __name__ == "__main__":``.
        show_progress_bar: Whether to show a progress bar; None follows the log level.

    Returns:
        The content of encoding.json, and as ``encoded`` the number of documents that this call has encoded.

    Raises:
        DataError: If an id repeats, a text is empty or not a string, there is no document, the corpus changes while it
            is read, or an embedding is not finite in the dtype.
        FileExistsError: If the output holds something else, or another model, corpus or setting, which the message
            names.
        KeyboardInterrupt: At Ctrl-C, and in the main thread at SIGTERM; the message says what has been encoded.
        OSError: If the output cannot be written, another process is writing to it, or a device fails.
        TypeError, ValueError: If another argument cannot be used.

    Example:
        >>> import tempfile
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bee", "wax"])], device="cpu")
        >>> corpus = {"a": "bee", "b": "wax wax", "c": "bee wax"}
        >>> output = tempfile.mkdtemp()
        >>> encode_corpus(model, corpus, output, shard_size=2)["encoded"]
        3
        >>> (Path(output) / "shard-00001.parquet").unlink()
        >>> encode_corpus(model, corpus, output, shard_size=2)["encoded"]
        1
    """
    if role not in ("document", "query"):
        raise ValueError(f"role must be 'document' or 'query', got {role!r}.")
    if dtype not in ("float32", "float16"):
        raise ValueError(
            f"dtype must be 'float32' or 'float16', got {dtype!r}; docs/compression.md shows how to store fewer bits."
        )
    for name, number in (("shard_size", shard_size), ("batch_size", batch_size)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}.")
    output, devices = Path(output), checked_devices(devices)
    documents = documents_of(corpus)
    if show_progress_bar is None:
        show_progress_bar = logger.getEffectiveLevel() <= logging.INFO

    options: dict[str, Any] = {"prompt": prompt, "batch_size": batch_size, "show_progress_bar": False}
    encode_one = model.encode_query if role == "query" else model.encode_document
    record: dict[str, Any] = {
        "model": _fingerprint(model),
        "similarity_fn_name": model.similarity_fn_name,
        "index_metric": _METRICS[model.similarity_fn_name],
        "role": role,
        "prompt": prompt,
        "dimension": len(encode_one(["dimension"], **options)[0]),
        "dtype": dtype,
        "shard_size": shard_size,
    }
    _refuse_another(output, record)  # before the corpus is read
    bar = partial(tqdm, unit=" documents", disable=not show_progress_bar)
    with bar(desc="Reading") as progress:
        digests, record["documents"] = read_through(documents, shard_size, progress.update)
    record["corpus"] = digests[-1]
    output.mkdir(parents=True, exist_ok=True)
    with _locked(output):
        if not _refuse_another(output, record):
            with whole_file(output / _RECORD) as file:
                file.write(json.dumps(record, indent=1).encode())
        for leftover in (*output.glob(".shard-*.parquet.tmp"), *output.glob(f".{_RECORD}.tmp")):
            leftover.unlink()
        whole = {shard for shard in range(len(digests)) if _is_whole(output, shard, record)}
        done = sum(_rows(shard, record) for shard in whole)
        if len(whole) < len(digests):
            missing = (shard for shard in shards_of(documents, shard_size, digests) if shard[0] not in whole)
            with (
                _said_how_far(output, whole, len(digests)),
                _sigterm_as_interrupt(),
                bar(desc="Encoding", total=record["documents"], initial=done) as progress,
                closing(encode_shards(model, role, options, missing, devices)) as encoded,
            ):
                for number, ids, embeddings in encoded:
                    _write_shard(output, number, record, ids, embeddings)
                    whole.add(number)
                    progress.update(len(ids))
    return record | {"encoded": record["documents"] - done}


@contextmanager
def _said_how_far(output: Path, whole: set[int], total: int) -> Iterator[None]:
    """Adds to an interruption, and to the error of a disk, a device or a worker, how many shards are in the folder."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        number = getattr(interrupt, "signal", signal.SIGINT)
        there = f"{len(whole)} of {total} shards in {output}"
        raise Stopped(number, f"with {there}: run the same again to go on.") from None
    except (OSError, RuntimeError) as error:
        there = f"{len(whole)} of {total} shards are in {output}"
        raise OSError(f"{error}. {there}: run the same again to go on.") from error


def load_embeddings(output: str | Path) -> Dataset:
    """Opens the embeddings of a folder that `encode_corpus` has finished: columns ``_id`` and ``embedding``.

    They are memory-mapped from the copy in Arrow's format that ``datasets`` makes of Parquet files in its cache
    (``HF_DATASETS_CACHE``) at the first call. Rows come as NumPy arrays: ``load_embeddings(output)[:10]["embedding"]``
    has the shape (10, D). ``.with_format("torch")`` gives tensors, and ``.iter(batch_size)`` walks through all rows.

    Args:
        output: The folder.

    Raises:
        FileNotFoundError: If the folder has no embeddings.
        ValueError: If shards are missing or damaged; the message counts them.
    """
    output = Path(output)
    record = _read_record(output)
    if record is None:
        raise FileNotFoundError(f"{output} holds no embeddings (no {_RECORD}): make them with encode_corpus.")
    number = -(-record["documents"] // record["shard_size"])
    named = (path.stem.removeprefix("shard-") for path in output.glob("shard-*.parquet"))
    shards = sorted(int(name) for name in named if name.isdecimal() and int(name) < number)
    if (whole := sum(_is_whole(output, shard, record) for shard in shards)) < number:
        raise ValueError(f"{output} has {whole} of {number} shards: run encode_corpus again to go on.")
    dataset = Dataset.from_parquet([str(_path(output, shard)) for shard in shards])
    return dataset.with_format("numpy")


def _fingerprint(model: SentenceTransformer) -> str:
    """SHA-256 of the weights and the configuration in memory, which may differ from those of the model's folder.

    Versions of libraries, and what a tokenizer remembers of its last call, are left out.
    """
    if (backend := model.get_backend()) != "torch":
        raise ValueError(
            f"The weights of a model with the backend {backend!r} cannot be compared: load it with backend='torch'."
        )
    tokenizer: Any = getattr(model, "tokenizer", None)
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    words: dict[str, Any] = {}
    if hasattr(tokenizer, "to_str"):
        words = json.loads(tokenizer.to_str())
        words = {key: value for key, value in words.items() if key not in ("padding", "truncation")}
    elif hasattr(tokenizer, "get_vocab"):
        words = tokenizer.get_vocab()
    config = model.config.to_dict() if model.config is not None else {}
    config = {key: value for key, value in config.items() if key not in ("transformers_version", "_name_or_path")}
    settings: list[Any] = [str(model), words, config, model.prompts, model.default_prompt_name]
    settings += [str(model.max_seq_length), model.truncate_dim, model.similarity_fn_name]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Raises KeyboardInterrupt at SIGTERM too. It does nothing outside the main thread, which alone handles signals."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        error = KeyboardInterrupt()
        error.signal = signal.Signals(number)  # type: ignore[attr-defined]
        raise error

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _read_record(output: Path) -> dict[str, Any] | None:
    file = output / _RECORD
    if not file.is_file():
        return None
    try:
        record = parse(file.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError(f"it holds {type(record).__name__}")
        for key in ("documents", "shard_size", "dimension"):
            if not isinstance(record.get(key), int) or record[key] < 1:
                raise ValueError(f"{key} is {record.get(key)!r}")
    except ValueError as error:
        raise ValueError(f"{file} cannot be read ({error}): choose another output, or remove this folder.") from None
    return record


def _refuse_another(output: Path, record: dict[str, Any]) -> bool:
    """Whether the folder was begun with these settings. Raises if it holds anything else or cannot be written."""
    there = next(path for path in (output, *output.resolve().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{output} cannot be written: {there} is not a folder, or you may not write to it. Choose another output."
        )
    found = _read_record(output)
    if found is None:
        if output.is_dir() and any(not path.name.startswith(".") for path in output.iterdir()):
            raise FileExistsError(f"{output} holds files, but no {_RECORD}: choose another output.")
        return False
    if differences := list_differences(found, record):
        raise FileExistsError(
            f"The embeddings in {output} were made with other settings: {differences}. Choose another output, or "
            "use the same settings."
        )
    return True


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Locks the folder. The system frees the lock when the process ends, even if it is killed."""
    try:
        with FileLock(output / ".lock", timeout=0):
            yield
    except Timeout:
        raise OSError(f"Another process is writing to {output}: wait for it, or choose another output.") from None


def _path(output: Path, shard: int) -> Path:
    return output / f"shard-{shard:05d}.parquet"


def _rows(shard: int, record: dict[str, Any]) -> int:
    return min(record["shard_size"], record["documents"] - shard * record["shard_size"])


def _schema(record: dict[str, Any]) -> pa.Schema:
    embedding = ListOf(Value(record["dtype"]), length=record["dimension"])
    columns: Any = {"_id": Value("string"), "embedding": embedding}
    return Features(columns).arrow_schema  # with what datasets reads


def _is_whole(output: Path, shard: int, record: dict[str, Any]) -> bool:
    """Whether a shard is complete, judged by its footer, which is written last."""
    path = _path(output, shard)
    if not path.exists():
        return False
    try:
        with pq.ParquetFile(path) as table:
            whole = table.metadata.num_rows == _rows(shard, record) and table.schema_arrow.equals(_schema(record))
    except (pa.ArrowException, OSError):
        whole = False
    if not whole:
        logger.warning("%s is damaged: its %s documents count as missing.", path, _rows(shard, record))
    return whole


def _write_shard(
    output: Path, shard: int, record: dict[str, Any], ids: list[str], embeddings: NDArray[np.floating]
) -> None:
    with np.errstate(over="ignore"):
        rows = np.ascontiguousarray(embeddings, dtype=record["dtype"])  # (n, D)
    if not (finite := np.isfinite(rows).all(axis=1)).all():
        raise DataError(
            f"The embedding of {ids[int(finite.argmin())]!r} is not finite in {record['dtype']}: fix the model, "
            "store another dtype, or leave the document out."
        )
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), record["dimension"])
    with whole_file(_path(output, shard)) as file:
        # Ids are unique and floats are noise, so that neither a dictionary nor compression makes the file smaller.
        pq.write_table(
            pa.table([pa.array(ids, pa.string()), vectors], schema=_schema(record)),
            file,
            compression="none",
            use_dictionary=False,
        )

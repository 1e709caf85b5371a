"""Embeddings of a large corpus in shards, on one device or several; a job that was stopped continues where it ended.

A folder of embeddings contains::

    encoding.json          what was encoded and how, written before all else
    shard-00000.parquet    columns _id (string) and embedding (fixed-size list), in the order of the corpus
    shard-00001.parquet    ...

Every file is either complete or absent. pandas, polars, DuckDB and ``datasets`` read the shards; see `load_embeddings`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from st_magnitude._checks import at_least
from st_magnitude._config import list_differences
from st_magnitude._files import whole_file
from st_magnitude._json import parse
from st_magnitude.corpus.cluster import encode_on_ray
from st_magnitude.corpus.encoder import Encoder, schema_of, table_of
from st_magnitude.corpus.texts import documents_of, read_through, shards_of
from st_magnitude.corpus.workers import checked_devices, encode_shards
from st_magnitude.training.trainer import Stopped

__all__ = ["embedding_batches", "encode_corpus", "load_embeddings"]

logger = logging.getLogger(__name__)

_RECORD = "encoding.json"
_PATIENCE = 10.0  # seconds in which other jobs begin the folder, for which they lock all of it


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
    ray: str | None = None,
    part: tuple[int, int] = (1, 1),
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
        ray: Address of a Ray cluster whose workers encode, ``"auto"`` for the one that the environment names, or
            ``"local"`` for one on this machine. There is a worker for each GPU of the cluster, or for each CPU if it
            has no GPUs. This process alone writes to the folder.
        part: Number of this job and the number of all jobs that share the work, such as (2, 8). The second of eight
            jobs encodes every eighth shard, from the second one on. All jobs may write to the same folder, at the same
            time or one after another.
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
    encoder = Encoder(model, role=role, prompt=prompt, dtype=dtype, batch_size=batch_size)
    at_least("shard_size", shard_size, 1)
    job, num_jobs = part
    if not 1 <= job <= num_jobs:
        raise ValueError(f"part (--shard) is {job} of {num_jobs}; parts are counted from 1, such as 1 of 4.")
    if ray is not None and devices is not None:
        raise ValueError("devices are those of this machine, and those of a Ray cluster are Ray's; leave out one.")
    output, devices = Path(output), checked_devices(devices)
    documents = documents_of(corpus)
    if show_progress_bar is None:
        show_progress_bar = logger.getEffectiveLevel() <= logging.INFO

    record = encoder.record | {"shard_size": shard_size}
    _refuse_another(output, record)  # before the corpus is read
    bar = partial(tqdm, unit=" documents", disable=not show_progress_bar)
    with bar(desc="Reading") as progress:
        digests, record["documents"] = read_through(documents, shard_size, progress.update)
    record["corpus"] = digests[-1]
    output.mkdir(parents=True, exist_ok=True)
    with _locked(output, part, partial(_begin, output, record)):
        own = range(job - 1, len(digests), num_jobs)
        if not own:
            logger.warning("Part %d of %d is empty: there are %d shards; lower shard_size.", *part, len(digests))
        for leftover in (output / f".{_path(output, shard).name}.tmp" for shard in own):
            leftover.unlink(missing_ok=True)
        whole = {shard for shard in own if _is_whole(output, shard, record)}
        done = sum(_rows(shard, record) for shard in whole)
        total = sum(_rows(shard, record) for shard in own)
        if len(whole) < len(own):
            missing = partial(shards_of, documents, shard_size, digests, frozenset(own) - whole)
            encoded = (
                encode_shards(encoder, missing(), devices) if ray is None else encode_on_ray(encoder, missing, ray)
            )
            with (
                _said_how_far(output, whole, len(own)),
                _sigterm_as_interrupt(),
                bar(desc="Encoding", total=total, initial=done) as progress,
                closing(encoded),
            ):
                for number, ids, embeddings in encoded:
                    _write_shard(output, number, record, ids, embeddings)
                    whole.add(number)
                    progress.update(len(ids))
    return record | {"encoded": total - done}


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
    dataset = Dataset.from_parquet([str(path) for path in _whole_shards(output)])
    return dataset.with_format("numpy")


def embedding_batches(output: str | Path) -> Iterator[NDArray[np.floating]]:
    """The embeddings of a folder in the order of the corpus, a shard at a time, without a copy on the disk.

    Raises:
        FileNotFoundError, ValueError: As `load_embeddings`.

    Yields:
        Embeddings of up to ``shard_size`` documents, (n, D), in the stored dtype.
    """
    for path in _whole_shards(output):
        vectors = pq.read_table(path, columns=["embedding"])["embedding"].combine_chunks()
        yield vectors.flatten().to_numpy().reshape(len(vectors), -1)


def _whole_shards(output: str | Path) -> list[Path]:
    """The files of a finished folder."""
    output = Path(output)
    record = read_record(output)
    if record is None:
        raise FileNotFoundError(f"{output} holds no embeddings (no {_RECORD}): make them with encode_corpus.")
    number = -(-record["documents"] // record["shard_size"])
    named = (path.stem.removeprefix("shard-") for path in output.glob("shard-*.parquet"))
    shards = sorted(int(name) for name in named if name.isdecimal() and int(name) < number)
    if (whole := sum(_is_whole(output, shard, record) for shard in shards)) < number:
        raise ValueError(f"{output} has {whole} of {number} shards: run encode_corpus again to go on.")
    return [_path(output, shard) for shard in shards]


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


def read_record(output: Path) -> dict[str, Any] | None:
    """The content of encoding.json; None if the folder has none."""
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
    found = read_record(output)
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
def _locked(output: Path, part: tuple[int, int], begin: Callable[[], Any]) -> Iterator[None]:
    """Locks a part of the folder, and begins the folder. The system frees the lock when the process ends or is killed.

    Jobs that divide the shards in another way would write to the same files: each of them refuses to begin.
    """
    job, num_jobs = part
    siblings = f"-of-{num_jobs}"
    folder = FileLock(output / ".lock", timeout=0 if num_jobs == 1 else _PATIENCE)
    own = folder if num_jobs == 1 else FileLock(output / f".lock-{job}{siblings}", timeout=0)
    try:
        with own:
            with folder:
                for other in output.glob(".lock-*"):
                    if not other.name.endswith(siblings):
                        FileLock(other).acquire(timeout=0).lock.release()
                begin()
            yield
    except Timeout:
        raise OSError(f"Another process is writing to {output}: wait for it, or choose another output.") from None


def _begin(output: Path, record: dict[str, Any]) -> None:
    (output / f".{_RECORD}.tmp").unlink(missing_ok=True)
    if not _refuse_another(output, record):
        with whole_file(output / _RECORD) as file:
            file.write(json.dumps(record, indent=1).encode())


def _path(output: Path, shard: int) -> Path:
    return output / f"shard-{shard:05d}.parquet"


def _rows(shard: int, record: dict[str, Any]) -> int:
    return min(record["shard_size"], record["documents"] - shard * record["shard_size"])


def _is_whole(output: Path, shard: int, record: dict[str, Any]) -> bool:
    """Whether a shard is complete, judged by its footer, which is written last."""
    path = _path(output, shard)
    if not path.exists():
        return False
    try:
        with pq.ParquetFile(path) as table:
            whole = table.metadata.num_rows == _rows(shard, record) and table.schema_arrow.equals(schema_of(record))
    except (pa.ArrowException, OSError):
        whole = False
    if not whole:
        logger.warning("%s is damaged: its %s documents count as missing.", path, _rows(shard, record))
    return whole


def _write_shard(
    output: Path, shard: int, record: dict[str, Any], ids: list[str], embeddings: NDArray[np.floating]
) -> None:
    table = table_of(ids, embeddings, record)
    with whole_file(_path(output, shard)) as file:
        # Ids are unique and floats are noise, so that neither a dictionary nor compression makes the file smaller.
        pq.write_table(table, file, compression="none", use_dictionary=False)

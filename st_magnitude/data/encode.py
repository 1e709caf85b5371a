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
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from filelock import FileLock, Timeout
from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from st_magnitude._checks import at_least
from st_magnitude._config import list_differences
from st_magnitude._files import whole_file
from st_magnitude.data.encoder import Encoder, schema_of, table_of
from st_magnitude.data.texts import documents_of, read_through, shards_of
from st_magnitude.training.trainer import Stopped

__all__ = ["encode_corpus", "load_embeddings"]

logger = logging.getLogger(__name__)

_RECORD = "encoding.json"
_PATIENCE = 10.0  # seconds in which another job begins the folder


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

    Embeddings are the result of ``model.encode_document``, with their norms. Whether to divide them by a power of the
    norm is a choice of the index (`Similarity.document`). One shard of texts and embeddings is in memory, and about 10
    bytes for every document.

    A job that is stopped or killed leaves complete shards only. The same call then checks that the corpus is the
    same, and encodes the shards that are missing or damaged. Several jobs may make the same call at the same time, on
    one machine or on many with a common disk: each encodes shards that no other one has taken.

    Args:
        model: The model. Its state counts, including ``max_seq_length``, ``truncate_dim`` and the precision.
        corpus: Mapping of ids to texts; a ``datasets.Dataset`` with the columns ``_id`` (or ``id``), ``text`` and, as
            in BEIR, ``title``, which is put before the text; or a path to a .jsonl or .parquet file of such rows, to a
            folder of either, or to a folder in BEIR's layout (its corpus.jsonl). Files are read as they are needed.
        output: A new or empty folder, or one that this function has begun.
        role: ``"document"`` or ``"query"``, for ``encode_document`` or ``encode_query``.
        prompt: Text to put before every text; by default the model's own prompt for the role.
        dtype: Type of the stored numbers, ``"float32"`` or ``"float16"``.
        shard_size: Number of documents in a shard. A job that is killed loses at most one shard.
        batch_size: Number of texts encoded at a time on each device. It may differ between calls.
        devices: None for the device of the model, one device, or several, as in ``["cuda:0", "cuda:1"]`` or
            ``["cpu", "cpu"]``, for one process each in the pool of sentence-transformers. With several, the calling
            script needs the usual ``if __name__ == "__main__":``.
        show_progress_bar: Whether to show a progress bar; None follows the log level.

    Returns:
        The content of encoding.json, and as ``encoded`` the number of documents that this call has encoded.

    Raises:
        DataError: If an id repeats, a text is empty or not a string, there is no document, the corpus changes while it
            is read, or an embedding is not finite in the dtype.
        FileExistsError: If the output holds something else, or another model, corpus or setting, which the message
            names.
        KeyboardInterrupt: At Ctrl-C and, in the main thread, at SIGTERM; the message says what has been encoded.
        OSError: If the output cannot be written, or a device fails.

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
    at_least("shard_size", shard_size, 1)
    output, devices = Path(output), [devices] if isinstance(devices, str) else devices
    encoder = Encoder(model, role=role, prompt=prompt, dtype=dtype, batch_size=batch_size)
    documents = documents_of(corpus)
    if show_progress_bar is None:
        show_progress_bar = logger.getEffectiveLevel() <= logging.INFO

    record = encoder.record | {"shard_size": shard_size}
    _is_begun(output, record)  # it refuses another folder before the corpus is read
    bar = partial(tqdm, unit=" documents", disable=not show_progress_bar)
    with bar(desc="Reading") as progress:
        digests, record["documents"] = read_through(documents, shard_size, progress.update)
    record["corpus"] = digests[-1]
    output.mkdir(parents=True, exist_ok=True)
    with FileLock(output / ".lock", timeout=_PATIENCE):
        if not _is_begun(output, record):
            with whole_file(output / _RECORD) as file:
                file.write(json.dumps(record, indent=1).encode())

    missing = [shard for shard in range(len(digests)) if not _is_whole(output, shard, record)]
    done = record["documents"] - sum(_rows(shard, record) for shard in missing)
    encoded = 0
    if missing:
        with (
            _reporting_progress(output, record),
            encoder.on(devices) as ready,
            bar(desc="Encoding", total=record["documents"], initial=done) as progress,
        ):
            for shard, ids, texts in shards_of(documents, shard_size, digests, missing):
                if _encode_shard(ready, output, shard, record, ids, texts):
                    encoded += len(ids)
                progress.update(len(ids))
    return record | {"encoded": encoded}


def _encode_shard(
    encoder: Encoder, output: Path, shard: int, record: dict[str, Any], ids: list[str], texts: list[str]
) -> bool:
    """Writes a shard unless another job does or did; the system frees the lock when a process ends or is killed."""
    path = _path(output, shard)
    lock = path.with_name(f".{path.stem}.lock")
    try:
        with FileLock(lock, timeout=0):
            if is_missing := not _is_whole(output, shard, record):
                table = table_of(ids, encoder.encode(texts), record)
                with whole_file(path) as file:
                    # Ids are unique and floats are noise: neither a dictionary nor compression makes the file smaller.
                    pq.write_table(table, file, compression="none", use_dictionary=False)
    except Timeout:
        return False
    with suppress(OSError):  # the shard is there, so whoever locks it again leaves it alone
        lock.unlink()
    return is_missing


@contextmanager
def _reporting_progress(output: Path, record: dict[str, Any]) -> Iterator[None]:
    """Adds the number of finished shards to Ctrl-C, to SIGTERM, and to the error of a disk or a device."""

    def there() -> str:
        total = -(-record["documents"] // record["shard_size"])
        whole = sum(_is_whole(output, shard, record) for shard in range(total))
        return f"{whole} of {total} shards in {output}: run the same again to go on."

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Stopped(number, f"with {there()}")

    in_main_thread = threading.current_thread() is threading.main_thread()  # it alone may handle signals
    numbers = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    except (OSError, RuntimeError, EOFError) as error:  # EOFError: a process died while it handed over its result
        raise OSError(f"{str(error).rstrip('.') or 'A process ended'}. There are {there()}") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    shards = range(-(-record["documents"] // record["shard_size"]))
    if (whole := sum(_is_whole(output, shard, record) for shard in shards)) < len(shards):
        raise ValueError(f"{output} has {whole} of {len(shards)} shards: run encode_corpus again to go on.")
    dataset = Dataset.from_parquet([str(_path(output, shard)) for shard in shards])
    return dataset.with_format("numpy")


def _read_record(output: Path) -> dict[str, Any] | None:
    """The content of encoding.json; None if the folder has none."""
    file = output / _RECORD
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _is_begun(output: Path, record: dict[str, Any]) -> bool:
    """Whether the folder was begun with these settings; a folder with anything else is refused."""
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

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
import signal
import threading
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Dataset
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from st_magnitude._checks import at_least, one_of
from st_magnitude._config import list_differences
from st_magnitude._files import whole_file
from st_magnitude.data.beir import DataError, id_and_text, json_lines
from st_magnitude.training.trainer import Stopped

__all__ = ["encode_corpus", "load_embeddings"]

logger = logging.getLogger(__name__)

Documents = Callable[[], Iterator[tuple[str, str]]]  # every call yields ids and texts from the first one on
Encode = Callable[[list[str]], NDArray[Any]]  # n texts -> (n, D)

_RECORD = "encoding.json"
_METRICS = {"cosine": "cosine", "dot": "inner product", "euclidean": "L2", "manhattan": "L1"}
_IDS = ("_id", "id")
_CORPORA = (
    "A corpus is a mapping of ids to texts, a datasets.Dataset with the columns _id (or id), text and perhaps title, a "
    ".jsonl or .parquet file of such rows, a folder of either, or a folder in BEIR's layout."
)


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
    norm is a choice of the index (`Similarity.document`). Memory holds one shard and about 10 bytes per document.

    The same call after a stop or a kill encodes what is missing or damaged. Several jobs may make it at the same time,
    on one machine or on many with a common disk: each encodes shards that no other one has taken.

    Args:
        model: The model. Its state counts, including ``max_seq_length``, ``truncate_dim`` and the precision.
        corpus: Mapping of ids to texts; a ``datasets.Dataset`` with the columns ``_id`` (or ``id``), ``text`` and
            optionally ``title``, which is put before the text; or a path to a .jsonl or .parquet file of such rows, to
            a folder of either, or to a folder in BEIR's layout. Files are read as they are needed.
        output: A new or empty folder, or one that this function has begun.
        role: ``"document"`` or ``"query"``, for ``encode_document`` or ``encode_query``.
        prompt: Text to put before every text; by default the model's own prompt for the role.
        dtype: Type of the stored numbers, ``"float32"`` or ``"float16"``.
        shard_size: Number of documents in a shard. A job that is killed loses at most one shard.
        batch_size: Number of texts encoded at a time on each device. It may differ between calls.
        devices: None for the device of the model, one device, or several, as in ``["cuda:0", "cuda:1"]``, for one
            process each. With several, the calling script needs the usual ``if __name__ == "__main__":``.
        show_progress_bar: Whether to show a progress bar; None follows the log level.

    Returns:
        The content of encoding.json, and as ``encoded`` the number of documents that this call has encoded.

    Raises:
        DataError: If an id repeats, a text is empty or not a string, there is no document, the corpus changes while it
            is read, or an embedding is not finite in the dtype.
        FileExistsError: If the output holds something else, or another model, corpus or setting.
        KeyboardInterrupt: At Ctrl-C and SIGTERM; the message says what has been encoded.
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
    one_of("role", role, ("document", "query"))
    one_of("dtype", dtype, ("float32", "float16"))
    at_least("shard_size", shard_size, 1)
    output, devices = Path(output), [devices] if isinstance(devices, str) else devices
    documents = _documents_of(corpus)
    if show_progress_bar is None:
        show_progress_bar = logger.getEffectiveLevel() <= logging.INFO

    encode_role = model.encode_query if role == "query" else model.encode_document
    encode = partial(encode_role, prompt=prompt, batch_size=batch_size, show_progress_bar=False)
    record: dict[str, Any] = {
        "model": _fingerprint(model),
        "similarity_fn_name": model.similarity_fn_name,
        "index_metric": _METRICS[model.similarity_fn_name],
        "role": role,
        "prompt": prompt,
        "dimension": len(encode(["dimension"])[0]),
        "dtype": dtype,
        "shard_size": shard_size,
    }
    _is_begun(output, record)  # it refuses another folder before the corpus is read
    bar = partial(tqdm, unit=" documents", disable=not show_progress_bar)
    with bar(desc="Reading") as progress:
        digests, record["documents"] = _read_through(documents, shard_size, progress.update)
    record["corpus"] = digests[-1]
    output.mkdir(parents=True, exist_ok=True)
    with FileLock(output / ".lock"):
        if not _is_begun(output, record):
            with whole_file(output / _RECORD) as file:
                file.write(json.dumps(record, indent=1).encode())

    missing = {shard for shard, is_whole in enumerate(_are_whole(output, record)) if not is_whole}
    done = record["documents"] - sum(_rows(shard, record) for shard in missing)
    encoded = 0
    if missing:
        with (
            _reporting_progress(output, record),
            _on_devices(encode, model, devices) as ready,
            bar(desc="Encoding", total=record["documents"], initial=done) as progress,
        ):
            for shard, ids, texts in _shards_of(documents, shard_size, digests, missing):
                if _encode_shard(ready, output, shard, record, ids, texts):
                    encoded += len(ids)
                progress.update(len(ids))
    return record | {"encoded": encoded}


@contextmanager
def _on_devices(
    encode: Callable[..., Any], model: SentenceTransformer, devices: Sequence[str] | None
) -> Iterator[Encode]:
    """``encode`` on the devices, with a process for each if there are several."""
    before, options = model.device, dict[str, Any](device=devices[0] if devices else None)
    if devices and len(devices) > 1:
        options = {"pool": model.start_multi_process_pool(list(devices))}
    try:
        yield partial(encode, **options)
    finally:
        if "pool" in options:
            model.stop_multi_process_pool(options["pool"])
        model.to(before)


def _encode_shard(
    encode: Encode, output: Path, shard: int, record: dict[str, Any], ids: list[str], texts: list[str]
) -> bool:
    """Writes a shard unless another job does or did; the system frees the lock when a process ends or is killed."""
    path = _path(output, shard)
    lock = path.with_name(f".{path.stem}.lock")
    try:
        with FileLock(lock, timeout=0):
            if is_missing := not _is_whole(output, shard, record):
                table = _table_of(ids, encode(texts), record)
                with whole_file(path) as file:
                    # Ids are unique and floats are noise: neither a dictionary nor compression makes the file smaller.
                    pq.write_table(table, file, compression="none", use_dictionary=False)
    except Timeout:
        return False
    with suppress(OSError):  # the shard is there, so whoever locks it again leaves it alone
        lock.unlink()
    return is_missing


def _table_of(ids: list[str], embeddings: NDArray[Any], record: dict[str, Any]) -> pa.Table:
    """Ids and embeddings (n, D) as they are written, after a check that every embedding is finite in the dtype."""
    with np.errstate(over="ignore"):
        rows = np.ascontiguousarray(embeddings, dtype=record["dtype"])
    if not (finite := np.isfinite(rows).all(axis=1)).all():
        raise DataError(
            f"The embedding of {ids[int(finite.argmin())]!r} is not finite in {record['dtype']}: fix the model, "
            "store another dtype, or leave the document out."
        )
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), record["dimension"])
    return pa.table([pa.array(ids, pa.string()), vectors], schema=_schema_of(record))


def _schema_of(record: dict[str, Any]) -> pa.Schema:
    number = pa.float16() if record["dtype"] == "float16" else pa.float32()
    return pa.schema([("_id", pa.string()), ("embedding", pa.list_(number, record["dimension"]))])


@contextmanager
def _reporting_progress(output: Path, record: dict[str, Any]) -> Iterator[None]:
    """Adds the number of finished shards to Ctrl-C, to SIGTERM, and to the error of a disk or a device."""

    def there() -> str:
        whole = _are_whole(output, record)
        return f"{sum(whole)} of {len(whole)} shards in {output}: run the same again to go on."

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

    They are memory-mapped from the copy that ``datasets`` makes in its cache (``HF_DATASETS_CACHE``) at the first call.
    Rows come as NumPy arrays: ``load_embeddings(output)[:10]["embedding"]`` has the shape (10, D).
    ``.with_format("torch")`` gives tensors, and ``.iter(batch_size)`` walks through all rows.

    Raises:
        FileNotFoundError: If the folder has no embeddings.
        ValueError: If shards are missing or damaged; the message counts them.
    """
    output = Path(output)
    record = _read_record(output)
    if record is None:
        raise FileNotFoundError(f"{output} holds no embeddings (no {_RECORD}): make them with encode_corpus.")
    whole = _are_whole(output, record)
    if not all(whole):
        raise ValueError(f"{output} has {sum(whole)} of {len(whole)} shards: run encode_corpus again to go on.")
    dataset = Dataset.from_parquet([str(_path(output, shard)) for shard in range(len(whole))])
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
        message = f"{output} was made with other settings: {differences}. Choose another output, or use the same."
        raise FileExistsError(message)
    return True


def _path(output: Path, shard: int) -> Path:
    return output / f"shard-{shard:05d}.parquet"


def _rows(shard: int, record: dict[str, Any]) -> int:
    return min(record["shard_size"], record["documents"] - shard * record["shard_size"])


def _are_whole(output: Path, record: dict[str, Any]) -> list[bool]:
    return [_is_whole(output, shard, record) for shard in range(-(-record["documents"] // record["shard_size"]))]


def _is_whole(output: Path, shard: int, record: dict[str, Any]) -> bool:
    """Whether a shard is complete, judged by its footer, which is written last."""
    path = _path(output, shard)
    if not path.exists():
        return False
    try:
        with pq.ParquetFile(path) as table:
            whole = table.metadata.num_rows == _rows(shard, record) and table.schema_arrow.equals(_schema_of(record))
    except (pa.ArrowException, OSError):
        whole = False
    if not whole:
        logger.warning("%s is damaged: its %s documents count as missing.", path, _rows(shard, record))
    return whole


def _fingerprint(model: SentenceTransformer) -> str:
    """SHA-256 of weights and configuration in memory, without versions and what a tokenizer keeps of its last call."""
    if (backend := model.get_backend()) != "torch":
        raise ValueError(f"The weights of a model with the backend {backend!r} cannot be compared: use 'torch'.")
    tokenizer: Any = getattr(model, "tokenizer", None)
    tokenizer, words = getattr(tokenizer, "backend_tokenizer", tokenizer), {}
    if hasattr(tokenizer, "to_str"):
        words = json.loads(tokenizer.to_str()) | {"padding": None, "truncation": None}
    elif hasattr(tokenizer, "get_vocab"):
        words = tokenizer.get_vocab()
    config = {} if model.config is None else model.config.to_dict() | {"transformers_version": "", "_name_or_path": ""}
    settings: list[Any] = [str(model), words, config, model.prompts, model.default_prompt_name]
    settings += [str(model.max_seq_length), model.truncate_dim, model.similarity_fn_name]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _documents_of(corpus: Mapping[str, str] | Dataset | str | Path) -> Documents:
    """Checks the kind of a corpus without reading it, and returns a function that reads it."""
    if isinstance(corpus, Mapping):
        return lambda: _texts("corpus", ({"_id": key, "text": text} for key, text in corpus.items()))
    if isinstance(corpus, Dataset):
        plain = corpus.with_format(None).select_columns(_needed(corpus.column_names))
        return lambda: _texts("Dataset", plain)
    if not isinstance(corpus, (str, Path)):
        raise TypeError(f"{_CORPORA} Got {type(corpus).__name__}.")
    path = Path(corpus)
    files = [path] if path.is_file() else sorted(path.glob("corpus.jsonl*")) or sorted(path.glob("*"))
    files = [file for file in files if file.name.endswith((".jsonl", ".jsonl.gz", ".parquet"))]
    if not files:
        raise DataError(f"{path} has neither a .jsonl nor a .parquet file. {_CORPORA}")
    return lambda: (text for file in files for text in _texts_in(file))


def _texts_in(file: Path) -> Iterator[tuple[str, str]]:
    if file.suffix == ".parquet":
        with pq.ParquetFile(file) as table:
            batches = table.iter_batches(1000, columns=_needed(table.schema_arrow.names))
            yield from _texts(file.name, (row for batch in batches for row in batch.to_pylist()))
    else:
        yield from (id_and_text(row, where, _IDS) for where, row in json_lines(file))


def _texts(where: str, rows: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for number, row in enumerate(rows):
        yield id_and_text(row, f"{where}, row {number} (the first is 0)", _IDS)


def _needed(names: Iterable[str]) -> list[str]:
    return [name for name in names if name in (*_IDS, "text", "title")]


def _read_through(documents: Documents, shard_size: int, update: Callable[[int], Any]) -> tuple[list[str], int]:
    """Reads a corpus once: the digest of all texts up to the end of every shard, and the number of documents."""
    digests: list[str] = []
    hashes = array("q")  # of the ids, 8 bytes each
    for ids, _, digest in _batches(documents, shard_size):
        digests.append(digest)
        hashes.extend(map(hash, ids))
        update(len(ids))
    if not digests:
        raise DataError(f"The corpus has no documents. {_CORPORA}")
    in_order = np.sort(np.frombuffer(hashes, dtype=np.int64))
    suspects = set(in_order[1:][in_order[1:] == in_order[:-1]].tolist())
    seen: dict[str, int] = {}
    for number, (key, _) in enumerate(documents() if suspects else ()):
        if hash(key) in suspects and seen.setdefault(key, number) != number:
            raise DataError(f"Documents {seen[key]} and {number} (from 0) have the same id, {key!r}: make ids unique.")
    return digests, len(hashes)


def _batches(documents: Documents, size: int) -> Iterator[tuple[list[str], list[str], str]]:
    """Ids and texts of every shard, and the digest of all ids and texts up to its end."""
    digest = hashlib.sha256()
    remaining = documents()
    while batch := list(islice(remaining, size)):
        for key, text in batch:
            digest.update(f"{len(key)}:{key}{len(text)}:{text}".encode(errors="surrogatepass"))
        yield [key for key, _ in batch], [text for _, text in batch], digest.hexdigest()


def _shards_of(
    documents: Documents, size: int, digests: list[str], wanted: Container[int]
) -> Iterator[tuple[int, list[str], list[str]]]:
    """Reads a corpus again: number, ids and texts of the wanted shards, after a check that no text has changed."""
    for shard, (batch, digest) in enumerate(zip_longest(_batches(documents, size), digests)):
        if batch is None or batch[2] != digest:
            raise DataError(f"The corpus has changed in shard {shard} while it was encoded: restore it, and run again.")
        if shard in wanted:
            yield shard, batch[0], batch[1]

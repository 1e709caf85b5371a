"""Embeddings of a large corpus, in shards: several devices, and a job that goes on where it was stopped.

A folder of embeddings holds::

    encoding.json          what was encoded and how, written before all else
    shard-00000.parquet    columns _id (string) and embedding (fixed-size list), in the order of the corpus
    shard-00001.parquet    ...

Every file is whole or not there at all. pandas, polars, DuckDB and ``datasets`` read them; see `load_embeddings`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

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

from st_magnitude._json import parse
from st_magnitude.corpus.beir import DataError, Problems, id_and_text, numbered_texts
from st_magnitude.training.trainer import Stopped

__all__ = ["encode_corpus", "load_embeddings"]

logger = logging.getLogger(__name__)

Documents = Callable[[], Iterator[tuple[str, str]]]  # ids and texts, from the first one at every call

_RECORD = "encoding.json"
_IDS = ("_id", "id")
_CORPORA = (
    "a mapping of ids to texts, a datasets.Dataset with the columns _id (or id), text and perhaps title, a .jsonl or "
    ".parquet file of such rows, a folder of either, or a folder in BEIR's layout"
)
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
    """Encodes a corpus into a folder of shards, or what is missing of it.

    Embeddings are as ``model.encode_document`` gives them, with their lengths; to divide by a power of the length is a
    choice of the index (`st_magnitude.serving.index_vectors`). Only one shard of texts and embeddings is in memory, and
    about 10 bytes for each document.

    Stopped or killed, the folder has whole shards only. The same call goes on: it reads the corpus once, to see that it
    is the same, and encodes the shards that are missing or damaged. Batch size and devices may change in between, and
    change embeddings by rounding alone.

    Args:
        model: In the state in which it shall encode: its ``max_seq_length``, ``truncate_dim`` and precision count.
        corpus: Id -> text; a ``datasets.Dataset`` with the columns ``_id`` (or ``id``), ``text`` and, as BEIR has it,
            ``title``, which goes before the text; or a path: a .jsonl or .parquet file of such rows, a folder of
            either, or a folder in BEIR's layout (its corpus.jsonl). Files are read as they are needed.
        output: A new or empty folder, or one that this function has begun.
        role: ``"document"`` or ``"query"``: which of ``encode_document`` and ``encode_query`` encodes.
        prompt: Goes before every text; by default the model's own for the role.
        dtype: ``"float32"`` or ``"float16"`` of what is stored.
        shard_size: Documents of a shard: what a killed job loses at most.
        batch_size: Texts encoded at a time, on each device.
        devices: None for where the model is, one device, or several, as in ``["cuda:0", "cuda:1"]`` or
            ``["cpu", "cpu"]``, for a process each. With several, the calling script needs the usual
            ``if __name__ == "__main__":``.
        show_progress_bar: Whether to show one; None follows the log level.

    Returns:
        What encoding.json says, and as ``encoded`` the number of documents that were encoded now.

    Raises:
        DataError: If an id repeats, a text is empty or not a string, or there is none; the message names the first.
            If the corpus changes while it is read, or an embedding is not finite in the dtype.
        FileExistsError: If the output holds something else: another model, corpus or setting, which the message names.
        KeyboardInterrupt: At Ctrl-C, and in the main thread at SIGTERM, with what is done as the message.
        OSError: If the output cannot be written, another process is writing to it, or a device fails.
        TypeError, ValueError: For other arguments that cannot be used.

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
        raise ValueError(f"dtype must be 'float32' or 'float16', got {dtype!r}; of fewer bits: docs/compression.md.")
    for name, number in (("shard_size", shard_size), ("batch_size", batch_size)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}.")
    output, places = Path(output), _checked_devices(devices)
    documents = _documents(corpus)
    if show_progress_bar is None:
        show_progress_bar = logger.getEffectiveLevel() <= logging.INFO

    encode = partial(
        model.encode_query if role == "query" else model.encode_document,
        prompt=prompt,
        batch_size=batch_size,
        show_progress_bar=False,
    )
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
    _refuse_another(output, record)  # before the corpus is read
    bar = partial(tqdm, unit=" documents", disable=not show_progress_bar)
    with bar(desc="Reading") as progress:
        digests, record["documents"] = _read_through(documents, shard_size, progress.update)
    record["corpus"] = digests[-1]
    output.mkdir(parents=True, exist_ok=True)
    with _locked(output):
        if not _refuse_another(output, record):
            with _whole_file(output / _RECORD) as file:
                file.write(json.dumps(record, indent=1).encode())
        for leftover in (*output.glob(".shard-*.parquet.tmp"), *output.glob(f".{_RECORD}.tmp")):
            leftover.unlink()
        whole = {shard for shard in range(len(digests)) if _is_whole(output, shard, record)}
        if len(whole) == len(digests):
            return record | {"encoded": 0}
        total, done = record["documents"], sum(_rows(shard, record) for shard in whole)
        try:
            with (
                _sigterm_as_interrupt(),
                bar(desc="Encoding", total=total, initial=done) as progress,
                _placed(encode, model, places) as encode_there,
            ):
                for shard, ids, texts in _shards_of(documents, shard_size, digests):
                    if shard not in whole:
                        _write_shard(output, shard, record, ids, encode_there(texts))
                        whole.add(shard)
                        progress.update(len(ids))
        except KeyboardInterrupt as interrupt:
            number = getattr(interrupt, "signal", signal.SIGINT)
            there = f"{len(whole)} of {len(digests)} shards in {output}"
            raise Stopped(number, f"with {there}: run the same again to go on.") from None
        except (OSError, RuntimeError) as error:  # of a full disk, or of a full GPU and a worker that has ended
            raise OSError(
                f"{error}. {len(whole)} of {len(digests)} shards are in {output}: run the same again to go on."
            ) from error
    return record | {"encoded": total - done}


def load_embeddings(output: str | Path) -> Dataset:
    """The embeddings of a folder that `encode_corpus` has finished, with columns ``_id`` and ``embedding``.

    Memory-mapped, from the copy in Arrow's format that ``datasets`` makes of Parquet files in its cache
    (``HF_DATASETS_CACHE``) on the first call. In NumPy's format: ``load_embeddings(output)[:10]["embedding"]`` is an
    array (10, D); ``.with_format("torch")`` gives tensors. ``.iter(batch_size)`` walks through all of them.

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


# What is encoded


def _documents(corpus: Any) -> Documents:
    """Checks the kind of a corpus, and reads none of it."""
    if isinstance(corpus, (str, Path)):
        return _documents_in(Path(corpus))
    if isinstance(corpus, Mapping):
        return lambda: _texts("corpus", ({"_id": key, "text": text} for key, text in corpus.items()))
    if isinstance(corpus, Dataset):
        plain = corpus.with_format(None).select_columns(_columns(corpus.column_names, "the Dataset"))
        return lambda: _texts("Dataset", _rows_of(plain.iter(1000)))
    raise TypeError(f"A corpus is {_CORPORA}; got {type(corpus).__name__}.")


def _documents_in(path: Path) -> Documents:
    if not path.exists():
        raise DataError(f"There is no corpus at {path}: give {_CORPORA}.")
    if (path / "corpus.jsonl").is_file():
        files = [path / "corpus.jsonl"]
    else:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in files if file.suffix in (".jsonl", ".parquet") and file.is_file()]
    if len({file.suffix for file in files}) != 1:
        found = "both .jsonl and .parquet files" if files else "neither a .jsonl nor a .parquet file"
        raise DataError(f"{path} has {found}. A corpus is {_CORPORA}.")
    if files[0].suffix == ".parquet":
        columns = [_columns(pq.read_schema(file).names, str(file)) for file in files]
        tables = list(zip(files, columns, strict=True))
        return lambda: (text for file, names in tables for text in _texts(file.name, _parquet_rows(file, names)))
    return lambda: (text for file in files for text in _json_texts(file))


def _columns(names: Sequence[str], where: str) -> list[str]:
    key = next((name for name in _IDS if name in names), None)
    if key is None or "text" not in names:
        raise DataError(f"{where} has the columns {sorted(names)}: it needs _id (or id) and text; rename them.")
    return [key, "text", *({"title"} & set(names))]


def _rows_of(batches: Iterable[Mapping[str, list[Any]]]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def _parquet_rows(file: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(file) as table:
        for batch in table.iter_batches(1000, columns=columns):
            yield from batch.to_pylist()


def _texts(where: str, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for number, row in enumerate(rows):
        try:
            yield id_and_text(row, _IDS)
        except DataError as error:
            raise DataError(f"{where}, row {number} (the first is 0): {error}.") from None


class _FirstProblem(Problems):
    def add(self, name: str, line: int, what: str) -> None:
        super().add(name, line, what)
        self.raise_if_any()


def _json_texts(file: Path) -> Iterator[tuple[str, str]]:
    for _, key, text in numbered_texts(file.name, _FirstProblem(file.parent), _IDS):
        yield key, text


def _read_through(documents: Documents, shard_size: int, update: Callable[[int], Any]) -> tuple[list[str], int]:
    """The digest of all texts up to the end of every shard, and the number of documents.

    Raises:
        DataError: If there is none, or two have one id.
    """
    digests: list[str] = []
    hashes = array("q")
    for ids, _, digest in _batches(documents, shard_size):
        digests.append(digest)
        hashes.extend(map(hash, ids))
        update(len(ids))
    if not digests:
        raise DataError(f"The corpus has no documents. Give one: {_CORPORA}.")
    in_order = np.frombuffer(hashes, dtype=np.int64)
    in_order.sort()
    suspects = set(in_order[1:][in_order[1:] == in_order[:-1]].tolist())
    seen: dict[str, int] = {}
    if suspects:
        for number, (key, _) in enumerate(documents()):
            if hash(key) in suspects and seen.setdefault(key, number) != number:
                raise DataError(
                    f"Documents {seen[key]} and {number} (the first is 0) have one id, {key!r}: make ids unique."
                )
    return digests, len(hashes)


def _batches(documents: Documents, size: int) -> Iterator[tuple[list[str], list[str], str]]:
    """Ids and texts of every shard, and the digest of all ids and texts up to its end."""
    digest = hashlib.sha256()
    remaining = documents()
    while batch := list(islice(remaining, size)):
        for key, text in batch:
            try:
                digest.update(f"{len(key)}:{key}{len(text)}:{text}".encode())
            except UnicodeEncodeError as error:
                raise DataError(f"{key!r} holds half of a surrogate pair, which is no text: {error}.") from None
        yield [key for key, _ in batch], [text for _, text in batch], digest.hexdigest()


def _shards_of(documents: Documents, size: int, digests: list[str]) -> Iterator[tuple[int, list[str], list[str]]]:
    """Number, ids and texts of every shard, if the texts are still those that have these digests."""
    for shard, (batch, digest) in enumerate(zip_longest(_batches(documents, size), digests)):
        if batch is None or batch[2] != digest:
            raise DataError(f"The corpus has changed in shard {shard} while it was encoded: restore it, and run again.")
        yield shard, batch[0], batch[1]


# How it is encoded


def _fingerprint(model: SentenceTransformer) -> str:
    """SHA-256 of weights and configuration as they are in memory: a folder knows no prepare(), and may be far away.

    Not of versions and not of what a tokenizer remembers of its last call.
    """
    if (backend := model.get_backend()) != "torch":
        raise ValueError(f"The weights of a model with the backend {backend!r} cannot be compared: load it in torch.")
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


def _checked_devices(devices: str | Sequence[str] | None) -> list[str] | None:
    if devices is None:
        return None
    devices = [devices] if isinstance(devices, str) else list(devices)
    if not devices:
        raise ValueError("devices is empty: name some, as in ['cuda:0', 'cuda:1'], or pass None for the model's own.")
    for name in devices:
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError):
            raise ValueError(f"devices has {name!r}, which is none: 'cuda', 'cuda:1' and 'cpu' are.") from None
        if device.type == "cuda" and (device.index or 0) >= (there := torch.cuda.device_count()):
            raise ValueError(f"devices has {name!r}, but torch sees {there} GPUs here. Name others, or 'cpu'.")
    return devices


@contextmanager
def _placed(
    encode: Callable[..., NDArray[Any]], model: SentenceTransformer, devices: list[str] | None
) -> Iterator[Callable[[list[str]], NDArray[Any]]]:
    """Encoding on these devices, which are free again afterwards; the model goes back to where it was."""
    if devices is None:
        yield encode
        return
    before = model.device
    if len(devices) == 1:
        try:
            yield partial(encode, device=devices[0])
        finally:
            model.to(before)
        return
    model.__dict__["_in_worker"] = _InWorker()  # an attribute goes with the model to the processes
    try:
        pool = model.start_multi_process_pool(devices)
    finally:
        del model.__dict__["_in_worker"]
    try:
        yield partial(encode, pool=pool)
    finally:
        model.stop_multi_process_pool(pool)
        model.to(before)


class _InWorker:
    """Does `_mind_the_parent` where it arrives: workers of sentence-transformers have no place for it.

    It is in the model only while that is sent, for a copy of it in this process would do so here.
    """

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _mind_the_parent, ()


def _mind_the_parent() -> None:
    """A worker leaves Ctrl-C to its parent, and ends when the parent is killed instead of keeping its GPU for ever."""

    def follow() -> None:
        while (parent := multiprocessing.parent_process()) is None:  # not known yet while the model arrives
            time.sleep(0.1)
        parent.join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM is raised as SIGINT is, in the main thread, which alone may handle it."""

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


# What is written


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
    """Whether the folder was begun with these settings; raises if it holds anything else or cannot be written."""
    there = next(path for path in (output, *output.resolve().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{output} cannot be written: {there} is no folder, or not yours. Choose another output.")
    found = _read_record(output)
    if found is None:
        if output.is_dir() and any(not path.name.startswith(".") for path in output.iterdir()):
            raise FileExistsError(f"{output} holds files, but no {_RECORD}: choose another output.")
        return False
    if differences := [key for key, value in record.items() if found.get(key) != value]:
        listed = ", ".join(f"{key} ({found.get(key)!r} there, {record[key]!r} now)" for key in differences)
        raise FileExistsError(
            f"The embeddings in {output} were made otherwise: {listed}. Choose another output, or keep to these."
        )
    return True


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """The system frees the lock when its process ends, however it ends."""
    try:
        with FileLock(output / ".lock", timeout=0):
            yield
    except Timeout:
        raise OSError(f"Another process is writing to {output}: wait for it, or choose another output.") from None


@contextmanager
def _whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when all of it is on the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _path(output: Path, shard: int) -> Path:
    return output / f"shard-{shard:05d}.parquet"


def _rows(shard: int, record: dict[str, Any]) -> int:
    return min(record["shard_size"], record["documents"] - shard * record["shard_size"])


def _schema(record: dict[str, Any]) -> pa.Schema:
    embedding = ListOf(Value(record["dtype"]), length=record["dimension"])
    columns: Any = {"_id": Value("string"), "embedding": embedding}
    return Features(columns).arrow_schema  # with what datasets reads


def _is_whole(output: Path, shard: int, record: dict[str, Any]) -> bool:
    """By its footer, which is written last."""
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
            f"The embedding of {ids[int(finite.argmin())]!r} is not finite in {record['dtype']}: mend the model, "
            "store another dtype, or leave the document out."
        )
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), record["dimension"])
    with _whole_file(_path(output, shard)) as file:
        # neither ids, which are unique, nor floats gain anything by a dictionary or by compression
        pq.write_table(
            pa.table([pa.array(ids, pa.string()), vectors], schema=_schema(record)),
            file,
            compression="none",
            use_dictionary=False,
        )

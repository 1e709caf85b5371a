"""Encoder: from a batch of documents to a table of embeddings, in this process or in a worker of Ray or Spark."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Features, Value
from datasets import Sequence as ListOf
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude._checks import at_least, one_of
from st_magnitude.data.beir import DataError
from st_magnitude.data.texts import columns_of, texts_of
from st_magnitude.surgery.export import load

__all__ = ["Encoder", "schema_of", "table_of"]

_METRICS = {"cosine": "cosine", "dot": "inner product", "euclidean": "L2", "manhattan": "L1"}


class Encoder:
    """A function of an Arrow batch of documents that returns their ids and embeddings, for Ray Data and Spark.

    It keeps nothing of a batch: workers may call it in any order, repeat a batch or be replaced. Embeddings are the
    result of ``model.encode_document``, with their norms; one that is not finite is refused. A batch is a
    ``pyarrow.Table`` or ``RecordBatch``, and the result has the same type, with the Parquet schema of `encode_corpus`
    and its record in the metadata. An iterator of batches gives an iterator of results.

        ::

            documents = ray.data.read_parquet("corpus")  # with Ray
            documents.map_batches(
                Encoder, fn_constructor_args=("my-retriever",), batch_format="pyarrow", batch_size=1024,
                compute=ray.data.ActorPoolStrategy(size=4), num_gpus=1,
            ).write_parquet("embeddings")

            frame.mapInArrow(Encoder("my-retriever"), "_id string, embedding array<float>")  # with Spark

    `encode_corpus` does more: it refuses ids that repeat, continues after a stop and keeps the order of the corpus.

    Args:
        model: Folder or hub id of the model, which each process loads at its first batch; or a SentenceTransformer,
            which is sent to the processes.
        role: ``"document"`` or ``"query"``, for ``encode_document`` or ``encode_query``.
        prompt: Text to put before every text; by default the model's own prompt for the role.
        dtype: Type of the returned numbers, ``"float32"`` or ``"float16"``.
        batch_size: Number of texts encoded at a time, within a batch of documents.
        device: Device of the model; None: the device of a given SentenceTransformer, and otherwise the first GPU or
            the CPU.

    Raises:
        DataError: If a batch has no ids (``_id`` or ``id``) or texts (``text``, optionally ``title``), a text is empty
            or not a string, or an embedding is not finite in the dtype.
        ValueError: If an argument is out of range.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> encoder = Encoder(SentenceTransformer(modules=[BoW(["bee", "wax"])], device="cpu"))
        >>> encoder(pa.table({"_id": ["a", "b"], "text": ["bee", "wax wax"]}))["embedding"].to_pylist()
        [[1.0, 0.0], [0.0, 2.0]]
    """

    def __init__(
        self,
        model: SentenceTransformer | str | Path,
        *,
        role: str = "document",
        prompt: str | None = None,
        dtype: str = "float32",
        batch_size: int = 32,
        device: str | None = None,
    ) -> None:
        one_of("role", role, ("document", "query"))
        one_of("dtype", dtype, ("float32", "float16"))
        at_least("batch_size", batch_size, 1)
        self.source = None if isinstance(model, SentenceTransformer) else str(model)
        if isinstance(model, SentenceTransformer):
            self.model = model
        self.role, self.prompt, self.dtype, self.batch_size = role, prompt, dtype, batch_size
        self._where: dict[str, Any] = {} if device is None else {"device": device}

    @cached_property
    def model(self) -> SentenceTransformer:
        """The model, which is loaded when it is first needed."""
        return load(str(self.source), **self._where)

    @cached_property
    def record(self) -> dict[str, Any]:
        """The settings on which the embeddings depend, as in encoding.json."""
        name = self.model.similarity_fn_name
        return {
            "model": _fingerprint(self.model),
            "similarity_fn_name": name,
            "index_metric": _METRICS[name],
            "role": self.role,
            "prompt": self.prompt,
            "dimension": len(self.encode(["dimension"])[0]),
            "dtype": self.dtype,
        }

    @contextmanager
    def on(self, devices: Sequence[str] | None) -> Iterator[Encoder]:
        """The same encoder on other devices, with a process for each if there are several."""
        if devices is None:
            yield self
            return
        other, before = copy(self), self.model.device
        if len(devices) == 1:
            other._where = {"device": devices[0]}
        else:
            other._where = {"pool": self.model.start_multi_process_pool(list(devices))}
        try:
            yield other
        finally:
            if "pool" in other._where:
                self.model.stop_multi_process_pool(other._where["pool"])
            self.model.to(before)

    def encode(self, texts: Sequence[str]) -> NDArray[Any]:
        """The embeddings of texts as the model returns them, n texts -> (n, D)."""
        encode = self.model.encode_query if self.role == "query" else self.model.encode_document
        options: dict[str, Any] = {"prompt": self.prompt, "batch_size": self.batch_size, "show_progress_bar": False}
        return encode(list(texts), **options, **self._where)

    def __call__(self, batch: Any) -> Any:
        if isinstance(batch, Iterator):
            return map(self, batch)
        ids, texts = texts_of(batch.select(columns_of(batch.schema.names, "the batch")).to_pydict())
        rows = self.encode(texts) if texts else np.empty((0, self.record["dimension"]))
        table = table_of(ids, rows, self.record)
        return type(batch).from_arrays([column.combine_chunks() for column in table.columns], schema=table.schema)

    def __getstate__(self) -> dict[str, Any]:
        unsent = () if self.source is None else ("model", "record")  # of a path, every process loads its own
        return {name: value for name, value in vars(self).items() if name not in unsent}


def table_of(ids: Sequence[str], embeddings: NDArray[np.floating], record: Mapping[str, Any]) -> pa.Table:
    """Ids and embeddings (n, D) as they are written to Parquet.

    Raises:
        DataError: If an embedding is not finite in the dtype of the record.
    """
    with np.errstate(over="ignore"):
        rows = np.ascontiguousarray(embeddings, dtype=record["dtype"])  # (n, D)
    if not (finite := np.isfinite(rows).all(axis=1)).all():
        raise DataError(
            f"The embedding of {ids[int(finite.argmin())]!r} is not finite in {record['dtype']}: fix the model, "
            "store another dtype, or leave the document out."
        )
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), record["dimension"])
    return pa.table([pa.array(ids, pa.string()), vectors], schema=schema_of(record))


def schema_of(record: Mapping[str, Any]) -> pa.Schema:
    """The Parquet schema of embeddings, with what ``datasets`` reads and the record of the encoder in its metadata."""
    embedding = ListOf(Value(record["dtype"]), length=record["dimension"])
    columns: Any = {"_id": Value("string"), "embedding": embedding}
    schema = Features(columns).arrow_schema
    return schema.with_metadata({**(schema.metadata or {}), b"st_magnitude": json.dumps(dict(record)).encode()})


def _fingerprint(model: SentenceTransformer) -> str:
    """SHA-256 of the weights and the configuration in memory, which may differ from the model's folder.

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

"""Encoding of shards by the workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import pyarrow as pa
import torch

from st_magnitude._ray import cluster, first_line
from st_magnitude.corpus.encoder import Encoder
from st_magnitude.corpus.texts import Shard
from st_magnitude.corpus.workers import EncodedShard

__all__ = ["encode_on_ray"]


def encode_on_ray(
    encoder: Encoder, shards: Callable[[], Iterable[Shard]], address: str
) -> Generator[EncodedShard, None, None]:
    """Yields number, ids and embeddings of every shard, in the order in which they are ready.

    A task on the node of this process reads the shards, and a pool of actors encodes them. Ray gives the shard of a
    worker that dies to another one. Only a few shards are in memory at a time.

    Raises:
        RuntimeError: If a worker fails, with its message.
    """
    with cluster(address, "Encoding on a Ray cluster"):
        import ray
        import ray.data
        import ray.util.scheduling_strategies

        resources = ray.cluster_resources()
        gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        before = encoder.model.device
        encoder.model.to("cpu")
        sent = ray.put(encoder)
        encoder.model.to(before)
        dataset = ray.data.range(1, override_num_blocks=1).map_batches(
            _read,
            fn_kwargs={"shards": shards},
            batch_format="pyarrow",
            scheduling_strategy=here,
            num_cpus=0,  # it mostly waits, and Ray would run it inside a worker if both took the same resources
        )
        dataset = dataset.map_batches(
            _Worker,
            fn_constructor_args=(sent,),
            batch_size=1,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=gpus or cpus),
            num_gpus=1 if gpus else None,
            num_cpus=None if gpus else 1,
        )
        dataset.context.target_max_block_size = 1  # one shard, so that every worker gets one
        dataset.context.enable_progress_bars = False
        dataset.context.raise_original_map_exception = True  # the message below is then that of the encoder
        try:
            for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
                for number, ids, flat in zip(*(table[name] for name in _COLUMNS), strict=True):
                    yield number.as_py(), ids.as_py(), flat.values.to_numpy().reshape(len(ids), -1)
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"A worker of Ray failed: {first_line(error)}") from error


_COLUMNS = ("shard", "_id", "embedding")  # one row for a shard, with lists for its documents
_STRINGS = pa.large_list(pa.large_string())


def _read(_: pa.Table, shards: Callable[[], Iterable[Shard]]) -> Iterator[pa.Table]:
    """Yields one row for each shard."""
    for number, ids, texts in shards():
        yield pa.table({"shard": [number], "_id": pa.array([ids], _STRINGS), "text": pa.array([texts], _STRINGS)})


class _Worker:
    """Encodes one shard at a time."""

    def __init__(self, sent: Any) -> None:
        import ray

        encoder: Encoder = ray.get(sent)
        self.encoder = encoder.on("cuda" if torch.cuda.is_available() else "cpu")

    def __call__(self, shard: pa.Table) -> pa.Table:
        flat = pa.array(self.encoder.encode(shard["text"][0].as_py()).reshape(-1))
        embedding = pa.LargeListArray.from_arrays(pa.array([0, len(flat)], pa.int64()), flat)
        return pa.table([shard["shard"], shard["_id"], embedding], names=_COLUMNS)

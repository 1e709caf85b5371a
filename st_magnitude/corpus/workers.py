"""Encoding of shards on one device or on several, with one process per device."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
import torch.multiprocessing
from numpy.typing import NDArray

from st_magnitude.corpus.encoder import Encoder
from st_magnitude.corpus.texts import Shard

__all__ = ["checked_devices", "encode_shards"]

EncodedShard = tuple[int, list[str], NDArray[Any]]  # its number, ids and embeddings


def checked_devices(devices: str | Sequence[str] | None) -> list[str] | None:
    """The names of devices as a list; None stays None."""
    if devices is None:
        return None
    devices = [devices] if isinstance(devices, str) else list(devices)
    if not devices:
        raise ValueError("devices is empty: name some, as in ['cuda:0', 'cuda:1'], or pass None for the model's own.")
    for i, name in enumerate(devices):
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError):
            raise ValueError(
                f"devices[{i}] is {name!r}, which is not a torch device; use 'cpu', 'cuda' or 'cuda:1'."
            ) from None
        if device.type == "cuda" and (device.index or 0) >= (there := torch.cuda.device_count()):
            raise ValueError(f"devices[{i}] is {name!r}, but torch sees {there} GPUs here: name others, or 'cpu'.")
    return devices


def encode_shards(
    encoder: Encoder, shards: Iterable[Shard], devices: Sequence[str] | None = None
) -> Generator[EncodedShard, None, None]:
    """Yields number, ids and embeddings of every shard, in the order in which they are ready.

    With several devices, each has a process and holds one shard at a time. When the iterator ends or is closed, the
    processes end and the model goes back to its device. A process that ends raises OSError, a failure RuntimeError.
    """
    if devices is None:
        yield from ((number, ids, encoder.encode(texts)) for number, ids, texts in shards)
        return
    before = encoder.model.device
    try:
        if len(devices) == 1:
            yield from encode_shards(encoder.on(devices[0]), shards)
        else:
            yield from _encode_in_processes(encoder, shards, devices)
    finally:
        encoder.model.to(before)


def _encode_in_processes(encoder: Encoder, shards: Iterable[Shard], devices: Sequence[str]) -> Iterator[EncodedShard]:
    encoder.model.to("cpu").share_memory()  # one copy of the weights for all processes
    workers: list[_Worker] = []
    busy: dict[Connection, tuple[_Worker, Shard]] = {}
    remaining = iter(shards)
    try:
        workers.extend(_Worker(device) for device in devices)
        for worker in workers:
            worker.send(encoder.on(worker.device))
        for worker in workers:  # multiprocessing prints a traceback if one is stopped while it fetches the weights
            worker.receive()
        idle = list(workers)
        while True:
            while idle and (shard := next(remaining, None)) is not None:
                worker = idle.pop(0)
                worker.send(shard[2])
                busy[worker.pipe] = worker, shard
            if not busy:
                return
            for pipe in cast(list[Connection], wait(list(busy))):
                worker, (number, ids, _) = busy.pop(pipe)
                embeddings = worker.receive()
                idle.append(worker)
                yield number, ids, embeddings
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """A process that encodes on one device, and the parent's end of the pipe to it."""

    def __init__(self, device: str) -> None:
        context: Any = torch.multiprocessing.get_context("spawn")
        self.device = device
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        # A process inherits that SIGINT is ignored: at Ctrl-C, the parent alone decides what happens.
        in_main_thread = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
        try:
            self.process.start()
        finally:
            if in_main_thread:
                signal.signal(signal.SIGINT, before)
        theirs.close()

    def send(self, message: Any) -> None:
        try:
            self.pipe.send(message)
        except OSError:
            raise self._ended() from None

    def receive(self) -> NDArray[Any]:
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if isinstance(answer, str):
            raise RuntimeError(f"The process on {self.device} failed: {answer}")
        return answer

    def _ended(self) -> OSError:
        self.process.join()
        return OSError(f"The process on {self.device} ended with exit code {self.process.exitcode}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.join()
        self.pipe.close()


def _work(pipe: Connection) -> None:
    """Runs in the process of a device: receives the encoder, says that it is ready, and answers texts by embeddings."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        encoder = pipe.recv()
        encoder.model.to(encoder.device)
        pipe.send(None)  # ready
        while True:
            pipe.send(encoder.encode(pipe.recv()))
    except (EOFError, BrokenPipeError):
        return  # the parent has ended
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def _end_with_the_parent() -> None:
    """Without it, the process of a killed parent would encode its shard to the end and keep its GPU so long."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

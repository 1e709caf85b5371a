"""The connection to a Ray cluster."""

from __future__ import annotations

import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from st_magnitude._checks import needs

__all__ = ["cluster", "first_line"]

PATIENCE = 10.0  # seconds


@contextmanager
def cluster(address: str, what: str) -> Iterator[Any]:
    """The module ``ray``, connected to a cluster that this process may have been connected to before.

    Args:
        address: ``HOST:PORT``, ``"auto"``, or ``"local"`` for this machine.
        what: What needs Ray, for the message where it is not installed.

    Raises:
        ConnectionError: If there is no cluster at the address.
    """
    with needs(what, "ray"):
        import ray
    if ray.is_initialized():
        yield ray
        return
    if found := re.fullmatch(r"(.+):(\d+)", address):  # Ray itself tries for minutes, and then ends the process
        try:
            socket.create_connection((found[1], int(found[2])), timeout=PATIENCE).close()
        except (OSError, OverflowError) as error:
            raise ConnectionError(f"There is no Ray cluster at {address} ({error}); start one, or give auto.") from None
    in_main_thread = threading.current_thread() is threading.main_thread()
    at_sigterm = signal.getsignal(signal.SIGTERM)
    options = {"include_dashboard": False} if address == "local" else {}
    ray.init(address, logging_level="warning", log_to_driver=False, **options)
    if in_main_thread:
        signal.signal(signal.SIGTERM, at_sigterm)  # Ray has put its own handler in its place
    try:
        yield ray
    finally:
        ray.shutdown()


def first_line(error: BaseException) -> str:
    """The kind and the first line of an error of a worker, to which Ray adds lines on what it can be told to do."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: " + str(cause).partition("\n")[0]

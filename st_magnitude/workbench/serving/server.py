"""Embeddings of texts from an HTTP server or a callable, with errors that say what to do."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # Python 3.10 has two
from typing import Any

import httpx
import numpy as np
from numpy.typing import ArrayLike

from st_magnitude._checks import InputError, positive
from st_magnitude.geometry import Array

WAITS = (1, 2)  # seconds, of a request to a server that is busy
BATCH = 8  # texts in a request; all known servers take as many
_REMEDY = "Check the URL, the model there (name), the key (api_key) and its log"
Embed = Callable[[list[str], str], ArrayLike]  # n texts, role -> (n, D)

for _name in ("httpx", "httpcore.connection", "httpcore.http11", "httpcore.proxy"):
    # They log URLs with their keys, and what servers answer.
    logging.getLogger(_name).addFilter(lambda record: record.threadName != __name__)


class Refused(InputError):
    """A server does not embed these texts, and may embed others."""


class Server:
    """A URL that embeds texts, or the base of an OpenAI server; see `check_serving`."""

    def __init__(
        self,
        url: str,
        name: str | None,
        api_key: str | None,
        request: Mapping[str, object] | None,
        timeout: float,
    ) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = httpx.URL()
        is_clear = url.count("@") <= bool(parsed.userinfo)  # else the host can be part of a key
        if parsed.scheme not in ("http", "https") or not parsed.host or not is_clear:
            raise InputError(
                "The URL is not shown, since it can hold a key; begin it with http:// or https://, "
                "as http://localhost:8000/v1, and write %40 for an @ in a password."
            )
        path = parsed.path.rstrip("/")
        if not path.endswith(("/embed", "/embeddings")):
            path = (path or "/v1") + "/embeddings"
        self._is_openai = path.endswith("/embeddings")
        self._url = parsed.copy_with(path=path)
        self._more: dict[str, object] = {"model": name} if name else {}
        self._more |= request or {}
        positive("timeout", timeout)
        self._timeout = min(timeout, 1e6)  # sockets take no more
        key = (api_key or "").strip()
        # the client's own error shows the header
        if not (key.isascii() and key.isprintable()) or key.startswith(("'", '"')):
            raise InputError(
                "The key holds a line break, a quote or another character that no HTTP header may "
                "hold; export it again, without quotes and as one line."
            )
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        # a path or a query can hold a key
        self._name = f"{parsed.scheme}://{parsed.netloc.decode()}"

    def __str__(self) -> str:
        return self._name

    def embed(self, texts: list[str], role: str) -> ArrayLike:
        """The vectors of texts, whatever their role; raises `Refused` if these are not embedded."""
        body: dict[str, object] = {"inputs": texts}
        if self._is_openai:
            body = {"input": texts, "encoding_format": "float"}
        body = {key: value for key, value in (body | self._more).items() if value is not None}
        answer = self._post(body)
        for seconds in WAITS:
            if answer.status_code in (429, 503):
                time.sleep(seconds)
                answer = self._post(body)
        status = answer.status_code
        if status != 200:
            # Its own words are never shown: a server can repeat a key, in any escaping.
            said = f"HTTP {status} {httpx.codes.get_reason_phrase(status)}".strip()
            # llama.cpp answers a text that is too long with 500.
            if status in (400, 413, 422) or b"too large to process" in answer.content:
                raise Refused(said)
            raise OSError(f"{self} does not embed texts ({said}). {_REMEDY}, or try again later.")
        try:
            found = json.loads(answer.content)
            if isinstance(found, list):  # of /embed
                return found
            # stable: rows without a number are in the order of the texts
            rows = sorted(found["data"], key=lambda row: row.get("index") or 0)
            return [row["embedding"] for row in rows]
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            raise InputError(
                f"{self} does not answer with embeddings. Check the URL: it must be a route "
                "/v1/embeddings as OpenAI's, or /embed as text-embeddings-inference's."
            ) from None

    def _post(self, body: dict[str, object]) -> httpx.Response:
        """The answer. A thread waits for it, since a server that sends a byte now and then exceeds
        no timeout of a socket."""
        answer: Future[httpx.Response] = Future()
        options: dict[str, Any] = {"headers": self._headers, "timeout": self._timeout}

        def read() -> None:
            try:
                answer.set_result(httpx.post(self._url, json=body, **options))
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=read, name=__name__, daemon=True).start()
        try:
            return answer.result(self._timeout)
        except (FutureTimeout, httpx.TimeoutException):
            raise TimeoutError(
                f"{self} did not answer within {self._timeout:g} s; look at its log, or raise "
                "timeout=."
            ) from None
        except Exception as error:  # such as an ImportError, of a proxy that needs a package
            # Its message can quote a header. An OSError comes from the file of certificates.
            is_tls = "SSL" in str(error) or isinstance(error, OSError)
            raise OSError(
                f"{self} cannot be reached ({'TLS fails' if is_tls else type(error).__name__}); is "
                "it up, are scheme, host, port and proxy right, and is its certificate trusted "
                "(SSL_CERT_FILE)?"
            ) from None


def embed_all(
    embed: Embed, texts: Sequence[str], role: str, target: str
) -> tuple[list[Array | None], str]:
    """The vectors of n texts, None where one was refused, and the first refusal."""
    rows: list[Array | None] = []
    refusal = ""
    for start in range(0, len(texts), BATCH):
        batch = list(texts[start : start + BATCH])
        try:
            rows += _vectors(embed(batch, role), len(batch), target)
        except Refused:  # one of them is too long, or there are too many
            for text in batch:
                try:
                    rows += _vectors(embed([text], role), 1, target)
                except Refused as error:
                    refusal = refusal or str(error)
                    rows.append(None)
    if all(row is None for row in rows):
        raise InputError(f"{target} does not embed {texts[0]!r} ({refusal}). {_REMEDY}.")
    return rows, refusal


def _vectors(answer: ArrayLike, count: int, target: str) -> list[Array]:
    try:
        found = np.asarray(answer, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        found = np.empty(0)
    if found.ndim != 2 or len(found) != count or not found.size:
        shape = f"an array of shape {found.shape}" if found.size else "no such vectors"
        raise InputError(
            f"{target} must return one vector of equally many numbers for each of {count} texts, "
            f"in their order; it returned {shape}."
        )
    if not (np.abs(found) < 1e30).all():  # whose squares are finite
        raise InputError(
            f"{target} returned nan or infinity, or numbers over 1e30; look at its log."
        )
    return list(found)

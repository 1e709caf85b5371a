"""Embeddings of texts from an HTTP server or a callable, with errors that say what to do."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
from numpy.typing import NDArray

__all__ = ["Embed", "Refused", "Server", "embed_all"]

BATCH = 8  # every server that is known takes so many texts in a request
PAUSES = (1.0, 2.0, 4.0)  # seconds before a request is sent again to a server that is busy
KINDS = {"vllm": "vLLM", "infinity": "Infinity", "llamacpp": "llama.cpp", "library": "Ollama"}
ROUTES = {"/api/embed": "Ollama", "/embed": "TEI", "/embeddings": ""}
Array = NDArray[np.float64]
Embed = Callable[[list[str], str], Any]  # texts, role -> vectors


class Refused(ValueError):
    """A server does not embed these texts, and may embed others."""


class Server:
    """A URL that embeds texts; `check_serving` documents the arguments.

    The URL is OpenAI's ``/v1/embeddings``, the base of such a server, ``/embed`` of
    text-embeddings-inference, or Ollama's ``/api/embed``.
    """

    def __init__(
        self, url: str, name: str | None, api_key: str | None, request: Any, timeout: float
    ) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = httpx.URL()
        if parsed.scheme not in ("http", "https") or not parsed.host:
            shown = url.split("@")[-1].split("?")[0]  # without a password or a key
            raise ValueError(
                f"{shown!r} is not a URL of http; give one such as http://localhost:8000/v1."
            )
        path = parsed.path.rstrip("/")
        if not path.endswith(tuple(ROUTES)):
            path = (path or "/v1") + "/embeddings"
        self._route = next(route for route in ROUTES if path.endswith(route))
        self._url = parsed.copy_with(path=path)
        self._request = dict(request or {})
        self._timeout = timeout
        key = (api_key or "").strip()
        if not (key.isascii() and key.isprintable()):  # the client's own error shows the header
            raise ValueError(
                "The key holds a line break or another character that no HTTP header may hold; "
                "export it again, without quotes and as one line."
            )
        hidden = [key, parsed.password, *(v for v in parsed.params.values() if len(v) > 7)]
        self._secrets = {f(s) for s in hidden if s for f in (str, quote, _in_json)}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(timeout=timeout, headers=headers)
        self.kind, self._known = self._identify()
        self._name = name or (self._known[0] if len(self._known) == 1 else "")
        if not self._name and self._known:
            names = ", ".join(self._known)
            raise ValueError(f"{self} serves {names}: say which with name= (--name).")

    def __str__(self) -> str:
        return str(self._url.copy_with(userinfo=b"", query=None))

    def close(self) -> None:
        self._client.close()

    def embed(self, texts: Sequence[str], role: str) -> list[Any]:
        """The vectors of texts, whatever their role; raises `Refused` if these are not embedded."""
        body: dict[str, Any] = {"model": self._name, "input": list(texts)}
        if self._route == "/embed":
            body = {"inputs": list(texts)}
        elif self._route == "/embeddings":
            body["encoding_format"] = "float"
        response = self._send("POST", self._url, json=body | self._request)
        if response.status_code != 200:
            raise self._refusal(response)
        try:
            return _vectors_of(json.loads(response.text))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(
                f"{self} does not answer with embeddings, but with {self._plain(response.text)!r}. "
                "Check the URL: it must be a route /v1/embeddings as OpenAI's, /embed as "
                "text-embeddings-inference's, or /api/embed as Ollama's."
            ) from None

    def _refusal(self, response: httpx.Response) -> Exception:
        """The error for an answer that is not 200."""
        status = response.status_code
        said = f"HTTP {status}: {self._plain(response.text)}"
        if status in (401, 403):
            return ValueError(
                f"{self} refuses the key ({said}); pass it with api_key=, or name its environment "
                "variable with --api-key-env."
            )
        if status in (404, 405):
            return ValueError(
                f"{self} does not know this route or the model {self._name!r} ({said}). Check the "
                f"URL and name= (--name); it lists {', '.join(self._known) or 'no model'}."
            )
        if status == 429:
            return OSError(f"{self} gets too many requests ({said}); try again later.")
        return Refused(said)

    def _send(self, method: str, url: str | httpx.URL, **options: Any) -> httpx.Response:
        """The answer, asked for again after a pause while the server is busy (HTTP 429)."""
        try:
            for pause in (*PAUSES, 0.0):
                response = self._client.request(method, url, **options)
                if response.status_code != 429:
                    break
                asked = response.headers.get("Retry-After", "")
                time.sleep(min(float(asked) if asked.isdecimal() else pause, self._timeout))
        except httpx.TimeoutException:
            raise TimeoutError(
                f"{self} did not answer within {self._timeout:g} s; look at its log, or raise "
                "timeout= (--timeout)."
            ) from None
        except (httpx.HTTPError, UnicodeError) as error:
            # Its message can quote a header.
            raise OSError(
                f"{self} cannot be reached ({type(error).__name__}); is it up, and is this its "
                "host and port?"
            ) from None
        return response

    def _identify(self) -> tuple[str, list[str]]:
        """The kind of the server, and the names of its models, as far as it tells them."""
        base = str(self._url.copy_with(query=None)).removesuffix(self._route)
        root = base.removesuffix("/v1")
        if name := self._get(root + "/info").get("model_id"):  # TEI also has OpenAI's route
            return "TEI", [str(name)]
        kind = ROUTES[self._route]
        if self._route == "/embed":
            return kind, []
        rows = self._get((root + "/v1" if kind == "Ollama" else base) + "/models").get("data")
        rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        owner = str(rows[0].get("owned_by")) if rows else ""
        return kind or KINDS.get(owner, ""), [str(row["id"]) for row in rows if row.get("id")]

    def _get(self, url: str) -> dict[str, Any]:
        """The JSON object at a URL; empty if there is none."""
        response = self._send("GET", url)
        try:
            found = json.loads(response.text) if response.status_code == 200 else {}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _plain(self, text: str) -> str:
        """One printable line without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return text if len(text) <= 200 else text[:200] + "..."


def _in_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def _vectors_of(answer: Any) -> list[Any]:
    """The vectors of an answer as OpenAI's, text-embeddings-inference's or Ollama's."""
    if isinstance(answer, list):
        return answer
    if "embeddings" in answer:
        return list(answer["embeddings"])
    rows = list(answer["data"])
    if all(isinstance(row.get("index"), int) for row in rows):  # else they stand in order
        rows.sort(key=lambda row: row["index"])
    return [_decoded(row["embedding"]) for row in rows]


def _decoded(vector: Any) -> Any:
    """A vector, from base64 if it is a string."""
    if isinstance(vector, str):
        return np.frombuffer(base64.b64decode(vector, validate=True), "<f4")
    return vector


def embed_all(
    embed: Embed, texts: list[str], role: str, target: str, batch: int = BATCH
) -> tuple[Array, str]:
    """The vectors of n texts, nan where one was refused, (n, D), and the first refusal."""
    refusals: list[str] = []

    def vectors(some: list[str], dim: int | None) -> list[Array]:
        try:
            return list(_checked_vectors(embed(some, role), len(some), target, dim))
        except Refused as error:
            if dim is None:
                raise ValueError(
                    f"{target} does not embed {some[0]!r} ({error}); look at its log."
                ) from None
            if len(some) > 1:  # one of them is too long, or there are too many
                return [row for text in some for row in vectors([text], dim)]
            refusals.append(str(error))
            return [np.full(dim, np.nan)]

    rows = vectors(texts[:1], None)
    for start in range(1, len(texts), batch):
        rows += vectors(texts[start : start + batch], len(rows[0]))
    return np.stack(rows), refusals[0] if refusals else ""


def _checked_vectors(vectors: Any, count: int, target: str, dim: int | None) -> Array:
    """Vectors as an array: (count, D)."""
    try:
        found = np.asarray(vectors, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.empty(0)
    if found.ndim != 2 or len(found) != count or found.shape[1] != (dim or found.shape[1]):
        shape = f"an array of shape {found.shape}" if found.size else "no such vectors"
        raise ValueError(
            f"{target} must return one vector of {dim or 'equally many'} numbers for each of "
            f"{count} texts, in their order; it returned {shape}."
        )
    if not np.isfinite(found).all():
        raise ValueError(f"{target} returned nan or infinity; look at its log.")
    return found

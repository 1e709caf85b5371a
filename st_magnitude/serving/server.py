"""Embeddings of texts from an HTTP server or a callable, with errors that say what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

__all__ = ["Embed", "Refused", "Server", "embed_all"]

BATCH = 8  # every server that is known takes so many texts in a request
KINDS = {"vllm": "vLLM", "infinity": "Infinity", "llamacpp": "llama.cpp", "library": "Ollama"}  # by owned_by
VERSIONS = {"vLLM": "/version", "Ollama": "/api/version", "TEI": "/info"}
Array = NDArray[np.float64]
Embed = Callable[[list[str], str], Any]  # texts, role -> vectors


class Refused(ValueError):
    """A server does not embed these texts, and may embed others."""


class Server:
    """A URL that embeds texts: text-embeddings-inference's ``/embed``, or OpenAI's ``/v1/embeddings``.

    The URL is one of either route, or the base of an OpenAI-compatible server. `check_serving` documents the arguments.
    """

    def __init__(
        self, url: str, name: str | None, api_key: str | None, request: Mapping[str, Any] | None, timeout: float
    ) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = httpx.URL()
        if parsed.scheme not in ("http", "https") or not parsed.host:
            shown = url.split("@")[-1].split("?")[0]  # without a password or a key
            raise ValueError(f"{shown!r} is not a URL of http or https; give one such as http://localhost:8000/v1.")
        path = parsed.path.rstrip("/")
        self._is_tei = path.endswith("/embed")
        if not path.endswith(("/embed", "/embeddings")):
            path = (path or "/v1") + "/embeddings"
        self._url, self._request, self._timeout = parsed.copy_with(path=path), dict(request or {}), timeout
        self._secrets = [secret for secret in (api_key, parsed.password, parsed.params.get("api-key")) if secret]
        self._client = httpx.Client(timeout=timeout, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
        self.told, self._known = self._identify()
        self._name = name or (self._known[0] if len(self._known) == 1 else "")
        if not self._name and self._known:
            raise ValueError(f"{self} serves {', '.join(self._known)}: say which with name= (--name).")

    def __str__(self) -> str:
        return str(self._url.copy_with(userinfo=b"", query=None))

    def close(self) -> None:
        self._client.close()

    def embed(self, texts: Sequence[str], role: str) -> list[Any]:
        """The vectors of texts, whatever their role; raises `Refused` if the server does not embed these."""
        if self._is_tei:
            body: dict[str, Any] = {"inputs": list(texts)}
        else:
            body = {"model": self._name, "input": list(texts), "encoding_format": "float"}
        response = self._send("POST", self._url, json=body | self._request)
        if response.status_code != 200:
            raise self._refusal(response)
        try:
            answer = json.loads(response.text)
            if self._is_tei:
                return list(answer)
            return [row["embedding"] for row in sorted(answer["data"], key=lambda row: row["index"])]
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"{self} does not answer with embeddings, but with {self._plain(response.text)!r}. Check the URL: it "
                "must be a route /v1/embeddings as OpenAI's, or /embed as text-embeddings-inference's."
            ) from None

    def _refusal(self, response: httpx.Response) -> Exception:
        """The error for an answer that is not 200."""
        status, said = response.status_code, self._plain(response.text)
        if status in (401, 403):
            advice = "pass it with api_key=, or name an environment variable that holds it with --api-key-env"
            return ValueError(f"{self} refuses the key (HTTP {status}: {said}); {advice}.")
        if status in (404, 405):
            names = f"it serves {', '.join(self._known)}" if self._known else "check the path of the URL"
            asked = f"this route or the model {self._name!r} (HTTP {status}: {said})"
            return ValueError(f"{self} does not know {asked}; {names}. Name the model with name= (--name).")
        if status == 429:
            return OSError(f"{self} gets too many requests (HTTP 429: {said}); try again later.")
        return Refused(f"HTTP {status}: {said}")

    def _send(self, method: str, url: str | httpx.URL, **options: Any) -> httpx.Response:
        try:
            return self._client.request(method, url, **options)
        except httpx.TimeoutException:
            raise TimeoutError(
                f"{self} did not answer within {self._timeout:g} s; look at its log, or raise timeout= (--timeout)."
            ) from None
        except (httpx.HTTPError, UnicodeError) as error:
            raise OSError(
                f"{self} cannot be reached ({self._plain(str(error))}); is it up, and is this its host and port?"
            ) from None

    def _identify(self) -> tuple[str, list[str]]:
        """The kind of the server with its version, and the names of its models, as far as it tells them."""
        base = str(self._url.copy_with(query=None)).removesuffix("/embeddings").removesuffix("/embed")
        root = base.removesuffix("/v1")
        rows = [] if self._is_tei else self._get(base + "/models").get("data", [])
        kind = "TEI" if self._is_tei else KINDS.get(str(rows[0].get("owned_by")) if rows else "", "")
        told = self._get(root + VERSIONS[kind or "TEI"]) if kind != "Infinity" and kind != "llama.cpp" else {}
        if "model_id" in told:  # TEI also has OpenAI's route
            kind, rows = "TEI", [{"id": str(told["model_id"])}]
        return f"{kind} {told.get('version', '')}".strip(), [row["id"] for row in rows]

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


def embed_all(embed: Embed, texts: list[str], role: str, target: str) -> tuple[Array, str]:
    """The vectors of all texts of a role, nan where a text was refused, and the first refusal: n texts -> (n, D)."""
    refusals: list[str] = []

    def vectors(batch: list[str], dim: int | None) -> list[Array]:
        try:
            return list(_checked_vectors(embed(batch, role), len(batch), target, dim))
        except Refused as error:
            if dim is None:
                raise ValueError(f"{target} does not embed {batch[0]!r} ({error}); look at its log.") from None
            if len(batch) > 1:  # one of them is too long, or there are too many
                return [row for text in batch for row in vectors([text], dim)]
            refusals.append(str(error))
            return [np.full(dim, np.nan)]

    rows = vectors(texts[:1], None)
    for start in range(1, len(texts), BATCH):
        rows += vectors(texts[start : start + BATCH], len(rows[0]))
    return np.stack(rows), refusals[0] if refusals else ""


def _checked_vectors(vectors: Any, count: int, target: str, dim: int | None) -> Array:
    """Vectors as an array: (count, D)."""
    try:
        found = np.asarray(vectors, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.empty(0)
    if found.ndim != 2 or len(found) != count or found.shape[1] != (dim or found.shape[1]):
        raise ValueError(
            f"{target} must return one vector of {dim or 'equally many'} numbers for each of {count} texts, in their "
            f"order; it returned {f'an array of shape {found.shape}' if found.size else 'no such vectors'}."
        )
    if not (finite := np.isfinite(found).all(axis=1)).all():
        where = f"vector {int(finite.argmin())} of {count}"
        raise ValueError(f"{target} returned nan or infinity in {where}; look at its log and precision.")
    return found

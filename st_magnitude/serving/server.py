"""Embeddings of texts from an HTTP server or a callable, with errors that say what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

__all__ = ["Refused", "Server", "embed_all"]

BATCH = 8  # every server that is known takes so many texts in a request
KINDS = {"vllm": "vLLM", "infinity": "Infinity", "llamacpp": "llama.cpp", "library": "Ollama"}  # by owned_by
VERSIONS = {"vLLM": "/version", "Ollama": "/api/version", "TEI": "/info"}
Array = NDArray[np.float64]


class Refused(ValueError):
    """A server does not embed these texts, and may embed others."""


class Server:
    """A URL that embeds texts: text-embeddings-inference's ``/embed``, or OpenAI's ``/v1/embeddings``.

    Args:
        url: URL of either route, or the base URL of an OpenAI-compatible server.
        name: Name of the model on the server; None takes the only one that the server lists.
        api_key: Key that is sent as a bearer token, and appears in no message.
        request: Further entries of the body of each request.
        timeout: Seconds to wait for an answer.
    """

    def __init__(
        self, url: str, name: str | None, api_key: str | None, request: Mapping[str, Any] | None, timeout: float
    ) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"The URL is not valid ({error}); give one such as http://localhost:8000/v1.") from None
        shown = parsed.copy_with(userinfo=b"", query=None)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(
                f"{str(shown)!r} is not a URL of http or https; give one such as http://localhost:8000/v1."
            )
        path = shown.path.rstrip("/")
        self._is_tei = path.endswith("/embed")
        if not path.endswith(("/embed", "/embeddings")):
            path = (path or "/v1") + "/embeddings"
        self.url, self._shown = parsed.copy_with(path=path), str(shown.copy_with(path=path))
        self._request, self._timeout = dict(request or {}), timeout
        self._secrets = [secret for secret in (api_key, parsed.password, parsed.params.get("api-key")) if secret]
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(timeout=timeout, headers=headers)
        self.kind, self.version, self._known = self._identify()
        self._name = name or (self._known[0] if len(self._known) == 1 else "")
        if not self._name and self._known:
            raise ValueError(f"{self} serves {', '.join(self._known)}: say which with name= (--name).")

    def __str__(self) -> str:
        return self._shown

    def close(self) -> None:
        self._client.close()

    def embed(self, texts: Sequence[str]) -> list[Any]:
        """The vectors of texts.

        Raises:
            Refused: If the server does not embed these texts.
            ValueError: If it asks for another key, route or model, or its answer holds no embeddings.
            OSError: If it cannot be reached or does not answer in time.
        """
        if self._is_tei:
            body: dict[str, Any] = {"inputs": list(texts)}
        else:
            body = {"model": self._name, "input": list(texts), "encoding_format": "float"}
        response = self._send("POST", self.url, json=body | self._request)
        if response.status_code != 200:
            raise self._refusal(response)
        try:
            answer = json.loads(response.text)
            if self._is_tei:
                return list(answer)
            return [row["embedding"] for row in sorted(answer["data"], key=lambda row: row["index"])]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self} does not answer with embeddings ({type(error).__name__}: {error}): "
                f"{self._plain(response.text, 80)!r}. Check the URL: it must be a route /v1/embeddings as OpenAI's, or "
                "/embed as text-embeddings-inference's."
            ) from None

    def _refusal(self, response: httpx.Response) -> Exception:
        """The error for an answer that is not 200."""
        status, said = response.status_code, self._plain(response.text, 200)
        if status in (401, 403):
            return ValueError(
                f"{self} refuses the key (HTTP {status}: {said}); put the key into an environment variable and name "
                "it with --api-key-env, or pass api_key=."
            )
        if status in (404, 405):
            names = f"it serves {', '.join(self._known)}" if self._known else "check the path of the URL"
            return ValueError(
                f"{self} does not know this route or the model {self._name!r} (HTTP {status}: {said}); {names}. Name "
                "the model with name= (--name)."
            )
        if status == 429:
            return OSError(f"{self} gets too many requests (HTTP 429: {said}); try again later.")
        return Refused(f"HTTP {status}: {said}")

    def _send(self, method: str, url: str | httpx.URL, **options: Any) -> httpx.Response:
        try:
            return self._client.request(method, url, **options)
        except httpx.TimeoutException:
            raise TimeoutError(
                f"{self} did not answer within {self._timeout:g} s; look at its log, or wait longer with timeout= "
                "(--timeout)."
            ) from None
        except (httpx.HTTPError, UnicodeError) as error:
            raise OSError(
                f"{self} cannot be reached ({self._plain(str(error), 200)}); is the server up, and is this its host "
                "and port?"
            ) from None

    def _identify(self) -> tuple[str, str, list[str]]:
        """The kind of the server, its version, and the names of its models; what the server does not tell is empty."""
        base = str(self.url.copy_with(query=None)).removesuffix("/embeddings").removesuffix("/embed")
        root = base.removesuffix("/v1")
        rows = [] if self._is_tei else self._get(base + "/models").get("data", [])
        kind = "TEI" if self._is_tei else KINDS.get(str(rows[0].get("owned_by")) if rows else "", "")
        told = self._get(root + VERSIONS[kind or "TEI"]) if kind != "Infinity" and kind != "llama.cpp" else {}
        if "model_id" in told:  # TEI also has OpenAI's route
            return "TEI", str(told.get("version", "")), [str(told["model_id"])]
        return kind, str(told.get("version", "")), [row["id"] for row in rows]

    def _get(self, url: str) -> dict[str, Any]:
        """The JSON object at a URL; empty if there is none."""
        response = self._send("GET", url)
        try:
            found = json.loads(response.text) if response.status_code == 200 else {}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _plain(self, text: str, length: int) -> str:
        """One printable line without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return text if len(text) <= length else text[:length] + "..."


def embed_all(embed: Callable[[list[str], str], Any], texts: list[str], role: str, target: str) -> tuple[Array, str]:
    """The vectors of all texts of a role, nan where a text was refused, and the first refusal: n texts -> (n, D).

    Raises:
        ValueError: If the first text is refused, or an answer does not have one finite vector of one size for each.
    """
    try:
        rows = list(_checked_vectors(embed(texts[:1], role), 1, target))
    except Refused as error:
        raise ValueError(f"{target} does not embed {texts[0]!r} ({error}); look at its log.") from None
    refusal, dim = "", len(rows[0])
    for start in range(1, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        try:
            rows += list(_checked_vectors(embed(batch, role), len(batch), target, dim))
        except Refused:  # one of them is too long, or there are too many
            for text in batch:
                try:
                    rows += list(_checked_vectors(embed([text], role), 1, target, dim))
                except Refused as error:
                    rows.append(np.full(dim, np.nan))
                    refusal = refusal or str(error)
    return np.stack(rows), refusal


def _checked_vectors(vectors: Any, count: int, target: str, dim: int | None = None) -> Array:
    """Vectors as an array: (count, D)."""
    try:
        found = np.asarray(vectors, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{target} returned vectors that are not rows of numbers of one size ({error}).") from None
    if found.ndim != 2 or len(found) != count or found.shape[1] != (dim or found.shape[1]):
        raise ValueError(
            f"{target} returned an array of shape {found.shape} for {count} texts; it must return one vector of "
            f"{dim or 'equally many'} dimensions for each text, in their order."
        )
    if not (finite := np.isfinite(found).all(axis=1)).all():
        raise ValueError(
            f"{target} returned nan or infinity in vector {int(finite.argmin())} of {count}; look at its log and "
            "precision."
        )
    return found

"""Embeddings of texts from an HTTP server or a callable, with errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote

import httpx
import numpy as np
from numpy.typing import ArrayLike

from st_magnitude.geometry.arrays import Array

__all__ = ["Embed", "Server", "embed_all"]

BATCH = 8  # every server that is known takes so many texts in a request
Embed = Callable[[list[str], str], ArrayLike]  # n texts, role -> (n, D)


class Refused(ValueError):
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
        if parsed.scheme not in ("http", "https") or not parsed.host:
            shown = url.split("@")[-1].split("?")[0]  # without a password or a key
            raise ValueError(
                f"{shown!r} is not a URL of http; give one such as http://localhost:8000/v1."
            )
        path = parsed.path.rstrip("/")
        if not path.endswith(("/embed", "/embeddings")):
            path = (path or "/v1") + "/embeddings"
        self._is_openai = path.endswith("/embeddings")
        self._url = parsed.copy_with(path=path)
        self._more = ({"model": name} if name else {}) | dict(request or {})
        self._timeout = timeout
        key = (api_key or "").strip()
        if not (key.isascii() and key.isprintable()):  # the client's own error shows the header
            raise ValueError(
                "The key holds a line break or another character that no HTTP header may hold; "
                "export it again, without quotes and as one line."
            )
        hidden = [key, parsed.password, *(v for v in parsed.params.values() if len(v) > 7)]
        self._secrets = {f(s) for s in hidden if s for f in (str, quote)}
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def __str__(self) -> str:
        return str(self._url.copy_with(userinfo=b"", query=None))

    def embed(self, texts: list[str], role: str) -> ArrayLike:
        """The vectors of texts, whatever their role; raises `Refused` if these are not embedded."""
        body: dict[str, object] = {"inputs": texts}
        if self._is_openai:
            body = {"input": texts, "encoding_format": "float"}
        response = self._post(body | self._more)
        if response.status_code != 200:
            said = f"HTTP {response.status_code}: {self._plain(response.text)}"
            if response.status_code == 429:
                raise OSError(f"{self} gets too many requests ({said}); try again later.")
            raise Refused(said)
        try:
            answer = response.json()
            if isinstance(answer, list):  # of /embed
                return answer
            rows = sorted(answer["data"], key=lambda row: row["index"])
            return [row["embedding"] for row in rows]
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"{self} does not answer with embeddings, but with {self._plain(response.text)!r}. "
                "Check the URL: it must be a route /v1/embeddings as OpenAI's, or /embed as "
                "text-embeddings-inference's."
            ) from None

    def _post(self, body: dict[str, object]) -> httpx.Response:
        try:
            return httpx.post(self._url, json=body, headers=self._headers, timeout=self._timeout)
        except httpx.TimeoutException:
            raise TimeoutError(
                f"{self} did not answer within {self._timeout:g} s; look at its log, or raise "
                "timeout= (--timeout)."
            ) from None
        except httpx.HTTPError as error:  # its message can quote a header
            raise OSError(
                f"{self} cannot be reached ({type(error).__name__}); is it up, and is this its "
                "host and port?"
            ) from None

    def _plain(self, text: str) -> str:
        """One printable line without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return text if len(text) <= 200 else text[:200] + "..."


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
        raise ValueError(
            f"{target} does not embed {texts[0]!r} ({refusal}). Check the URL, the name of the "
            "model there (--name), the key (--api-key-env), and the log of the server."
        )
    return rows, refusal


def _vectors(answer: ArrayLike, count: int, target: str) -> list[Array]:
    try:
        found = np.asarray(answer, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.empty(0)
    if found.ndim != 2 or len(found) != count:
        shape = f"an array of shape {found.shape}" if found.size else "no such vectors"
        raise ValueError(
            f"{target} must return one vector of equally many numbers for each of {count} texts, "
            f"in their order; it returned {shape}."
        )
    if not np.isfinite(found).all():
        raise ValueError(f"{target} returned nan or infinity; look at its log.")
    return list(found)

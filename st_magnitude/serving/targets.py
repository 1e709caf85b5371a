"""Embeddings of texts from an HTTP server or a callable, with errors that say what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from st_magnitude._checks import one_of
from st_magnitude._json import parse

__all__ = ["APIS", "Refused", "Server", "checked_vectors", "embed_all"]

BATCH = 8  # every server that is known takes so many texts in a request
Array = NDArray[np.float64]


class Refused(ValueError):
    """A server does not embed these texts, and may embed others."""


@dataclass(frozen=True)
class Api:
    """How to ask for embeddings.

    Attributes:
        path: End of the URL.
        body: Body of the request for texts and the name of a model.
        vectors: Takes the vectors of the texts, or the vectors of their tokens, from the answer.
    """

    path: str
    body: Callable[[Sequence[str], str], dict[str, Any]]
    vectors: Callable[[Any], list[Any]]


def _openai_vectors(answer: Any) -> list[Any]:
    rows = sorted(answer["data"], key=lambda row: row["index"])
    return [row["embedding" if "embedding" in row else "data"] for row in rows]


def _openai_body(texts: Sequence[str], name: str) -> dict[str, Any]:
    return {"model": name, "input": list(texts), "encoding_format": "float"}


# In the order in which the end of a path is compared: TEI's /embed is also the end of Ollama's.
APIS = {
    "ollama": Api(
        "/api/embed", lambda texts, name: {"model": name, "input": list(texts)}, lambda answer: answer["embeddings"]
    ),
    "openai": Api("/v1/embeddings", _openai_body, _openai_vectors),
    "tei": Api("/embed", lambda texts, name: {"inputs": list(texts)}, list),
    "tei-all": Api("/embed_all", lambda texts, name: {"inputs": list(texts)}, list),
    "vllm": Api("/pooling", lambda texts, name: _openai_body(texts, name) | {"task": "embed"}, _openai_vectors),
}


def api_of(url: httpx.URL) -> tuple[str, httpx.URL]:
    """The API that the path of a URL names, and the whole URL: a base URL stands for OpenAI's API.

    Example:
        >>> api_of(httpx.URL("http://localhost:8080/embed"))
        ('tei', URL('http://localhost:8080/embed'))
        >>> api_of(httpx.URL("http://localhost:8000/v1"))
        ('openai', URL('http://localhost:8000/v1/embeddings'))

    Raises:
        ValueError: If the path is not one of an API that is known.
    """
    path = url.path.rstrip("/")
    for name, api in APIS.items():
        if path.endswith((api.path, api.path.removeprefix("/v1"))):
            return name, url
    if path in ("", "/v1"):
        return "openai", url.copy_with(path="/v1/embeddings")
    raise ValueError(
        f"The path of {url} is not one of {', '.join(api.path for api in APIS.values())}; give the whole URL, or say "
        f"what it speaks with api= (--api): {', '.join(APIS)}."
    )


class Server:
    """One URL that embeds texts.

    Args:
        url: URL of the route, or the base URL of an OpenAI-compatible server.
        api: A key of `APIS`; None takes it from the path.
        name: Name of the model on the server; None takes the only one that the server lists.
        api_key: Key that is sent as a bearer token, and appears in no message.
        request: Further entries of the body of each request.
        timeout: Seconds to wait for an answer.
        pool: Makes one vector of the vectors of the tokens, for routes that return these.
    """

    def __init__(
        self,
        url: str,
        api: str | None,
        name: str | None,
        api_key: str | None,
        request: Mapping[str, Any] | None,
        timeout: float,
        pool: Callable[[Array], Array],
    ) -> None:
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, UnicodeError) as error:
            raise ValueError(f"The URL is not valid ({error}); give one such as http://localhost:8000/v1.") from None
        shown = parsed.copy_with(userinfo=b"", query=None)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(
                f"{str(shown)!r} is not a URL of http or https; give one such as http://localhost:8000/v1."
            )
        if api is None:
            api, shown = api_of(shown)
        one_of("api", api, list(APIS))
        self.api, self.url = APIS[api], parsed.copy_with(path=shown.path)
        self._pool, self._request = pool, dict(request or {})
        self._shown = str(shown)
        self._secrets = [secret for secret in (api_key, parsed.password, parsed.params.get("api-key")) if secret]
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(timeout=timeout, headers=headers)
        self._timeout = timeout
        self.kind, self.version, known = self._identify(api)
        self._known = known
        self.name = name or (known[0] if len(known) == 1 else "")
        if not self.name and known:
            raise ValueError(f"{self} serves {', '.join(known)}: say which with name= (--name).")

    def __str__(self) -> str:
        return self._shown

    def close(self) -> None:
        self._client.close()

    def embed(self, texts: Sequence[str]) -> list[Any]:
        """The vectors of texts.

        Raises:
            Refused: If the server does not embed these texts.
            ValueError: If it asks for another key, route or model, or its answer is not one of this API.
            OSError: If it cannot be reached or does not answer in time.
        """
        response = self._send("POST", self.url, json=self.api.body(texts, self.name) | self._request)
        status, said = response.status_code, self._said(response)
        if status in (401, 403):
            raise ValueError(
                f"{self} refuses the key (HTTP {status}: {said}); put the key into an environment variable and name "
                "it with --api-key-env, or pass api_key=."
            )
        if status in (404, 405):
            names = f"it serves {', '.join(self._known)}" if self._known else "check the path of the URL"
            raise ValueError(
                f"{self} does not know this route or the model {self.name!r} (HTTP {status}: {said}); {names}. Name "
                "the model with name= (--name)."
            )
        if 300 <= status < 400:
            raise ValueError(f"{self} redirects to {response.headers.get('location')}; give that URL.")
        if status == 429:
            raise OSError(f"{self} gets too many requests (HTTP 429: {said}); try again later.")
        if status != 200:
            raise Refused(f"HTTP {status}: {said}")
        try:
            vectors = self.api.vectors(parse(response.text))
            # A route of tokens returns a matrix for each text.
            tokens = any(isinstance(row, list) and row and isinstance(row[0], list) for row in vectors)
            return [self._pool(np.asarray(rows, dtype=np.float64)) for rows in vectors] if tokens else vectors
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            reason = error if type(error) is ValueError else f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{self} answers with something else than embeddings of {self.api.path} ({reason}): "
                f"{self._plain(response.text, 80)!r}. Check the URL, or name another API with api= (--api)."
            ) from None

    def _send(self, method: str, url: str | httpx.URL, **options: Any) -> httpx.Response:
        try:
            return self._client.request(method, url, **options)
        except httpx.TimeoutException:
            raise TimeoutError(
                f"{self} did not answer within {self._timeout:g} s; look at its log, or wait longer with timeout= "
                "(--timeout)."
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise OSError(
                f"{self} cannot be reached ({self._plain(str(error), 200)}); is the server up, and is this its host "
                "and port?"
            ) from None

    def _identify(self, api: str) -> tuple[str, str, list[str]]:
        """The kind of the server, its version, and the names of its models; what is not told is empty."""
        base = str(self.url.copy_with(query=None)).rstrip("/")
        root = base.removesuffix(self.api.path).removesuffix("/embeddings")
        if api == "openai":
            listed = self._get(base.removesuffix("/embeddings") + "/models")
            rows = [row for row in listed.get("data") or [] if isinstance(row, dict) and isinstance(row.get("id"), str)]
            owner = str(rows[0].get("owned_by")) if rows else ""
            kind = {"vllm": "vLLM", "infinity": "Infinity", "llamacpp": "llama.cpp", "library": "Ollama"}.get(owner, "")
            names = [row["id"] for row in rows]
        else:
            kind = {"tei": "TEI", "tei-all": "TEI", "vllm": "vLLM", "ollama": "Ollama"}[api]
            names = []
        if kind == "Ollama":
            tags = self._get(f"{root}/api/tags").get("models") or []
            names = names or [row["name"] for row in tags if isinstance(row, dict) and "name" in row]
            return kind, str(self._get(f"{root}/api/version").get("version", "")), names
        if kind == "vLLM":
            models = self._get(f"{root}/v1/models").get("data") or []
            names = names or [row["id"] for row in models if isinstance(row, dict) and "id" in row]
            return kind, str(self._get(f"{root}/version").get("version", "")), names
        if kind in ("TEI", ""):
            info = self._get(f"{root}/info")
            if "model_id" in info:
                return "TEI", str(info.get("version", "")), names or [str(info["model_id"])]
        return kind, "", names

    def _get(self, url: str) -> dict[str, Any]:
        """The JSON object at a URL; empty if there is none."""
        response = self._send("GET", url)
        try:
            found = parse(response.text) if response.status_code == 200 else {}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _said(self, response: httpx.Response) -> str:
        """The message of an error answer, or its beginning."""
        try:
            found = parse(response.text)
            while isinstance(found, dict):
                found = next(found[key] for key in ("error", "message", "detail", "msg") if key in found)
            return self._plain(str(found), 200)
        except (ValueError, StopIteration):
            return self._plain(response.text, 200)

    def _plain(self, text: str, length: int) -> str:
        """One printable line without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = " ".join(re.sub(r"[^\x20-\x7e\u00a0-\uffff]", " ", text).split())
        return text if len(text) <= length else text[:length] + "..."


def embed_all(embed: Callable[[list[str], str], Any], texts: list[str], role: str, what: str) -> tuple[Array, str]:
    """The vectors of all texts of a role, nan where a text was refused, and the first refusal: n texts -> (n, D).

    Raises:
        ValueError: If the first text is refused, or an answer does not have one finite vector of one size for each.
    """
    try:
        rows = list(checked_vectors(embed(texts[:1], role), 1, what))
    except Refused as error:
        raise ValueError(f"{what} does not embed {texts[0]!r} ({error}); look at its log.") from None
    refusal = ""
    for start in range(1, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        try:
            rows += list(checked_vectors(embed(batch, role), len(batch), what, len(rows[0])))
        except Refused:  # one of them is too long, or there are too many
            for text in batch:
                try:
                    rows += list(checked_vectors(embed([text], role), 1, what, len(rows[0])))
                except Refused as error:
                    rows.append(np.full(len(rows[0]), np.nan))
                    refusal = refusal or str(error)
    return np.stack(rows), refusal


def checked_vectors(vectors: Any, count: int, what: str, dim: int | None = None) -> Array:
    """Vectors as an array: (count, D).

    Raises:
        ValueError: If they are not count finite vectors of one size.
    """
    try:
        found = np.asarray(vectors, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} returned vectors that are not rows of numbers of one size ({error}).") from None
    if len(found) != count:
        raise ValueError(
            f"{what} returned {len(found)} vectors for {count} texts; it must return one vector for each text, in "
            "their order."
        )
    if found.ndim != 2 or not found.shape[1]:
        raise ValueError(f"{what} returned an array of shape {found.shape} for {count} texts, not (texts, dimensions).")
    if dim is not None and found.shape[1] != dim:
        raise ValueError(f"{what} returned vectors of {dim} and of {found.shape[1]} dimensions.")
    if not np.isfinite(found).all():
        row = int(np.isfinite(found).all(axis=1).argmin())
        raise ValueError(f"{what} returned nan or infinity in vector {row} of {count}; look at its log and precision.")
    return found

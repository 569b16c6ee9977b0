"""Requests to a server over HTTP, and what can become of one."""

from __future__ import annotations

import json
import os
from typing import Any

import httpx2

from eyas.errors import EyasError


class Unreachable(Exception):
    """There is no server, or it went away in the middle of a request."""


class Away(Unreachable):
    """Nobody listens where the server should be."""


class Refused(Exception):
    """The server refuses the request for good."""


class Failed(Exception):
    """The request failed in a way that may pass."""


def read_key(variable: str | None, section: str) -> str | None:
    """The key of a running server, from the environment. `section`: of the configuration, for messages."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise EyasError(f"{section}.api_key_env: the environment variable {variable} is not set; export it")
    return key


class ServerClient:
    """A client of one server. Used by many threads at once."""

    def __init__(self, url: str, key: str | None, timeout_seconds: float, section: str) -> None:
        self.url = url.rstrip("/")
        self._key, self._section = key, section
        # The server closes idle connections after 5 s; one that is just closing would lose a request.
        self._http = httpx2.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {}, trust_env=False,
            timeout=httpx2.Timeout(timeout_seconds, connect=10.0, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=3.0),
        )  # fmt: skip

    def close(self) -> None:
        self._http.close()

    def said(self, text: str) -> str:
        """The server's words in one line, without the key."""
        words = " ".join(text.split())
        return (words.replace(self._key, "***") if self._key else words)[:300]  # in this order: half a key is one too

    def healthy(self) -> bool:
        """Whether the server answers at all."""
        try:
            return bool(self._http.get(f"{self.url}/model_info", timeout=10.0).status_code == 200)
        except httpx2.HTTPError:
            return False

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that the server answers; raises Unreachable, Refused, Failed, or EyasError for a refused key."""
        try:
            response = self._http.request(method, f"{self.url}{path}", json=body)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as exc:
            raise Away(self.said(str(exc) or type(exc).__name__)) from None
        except httpx2.ReadTimeout:
            raise Failed("no answer in time") from None
        except httpx2.HTTPError as exc:
            raise Unreachable(self.said(str(exc) or type(exc).__name__)) from None
        if response.status_code != 200:
            message = f"the server answers {response.status_code}: {self.said(_message(response))}"
            if response.status_code in (401, 403):
                raise EyasError(f"{self._section}: {self.url}: the key is refused ({message})")
            if response.status_code in (400, 404, 413, 422):
                raise Refused(message)
            raise Failed(message)
        try:
            return response.json()
        except (ValueError, RecursionError):
            raise Failed("the server's answer is no JSON") from None


def _message(response: httpx2.Response) -> str:
    try:
        values = response.json()
    except (ValueError, RecursionError):
        return response.text
    while isinstance(values, dict):
        values = next((values[key] for key in ("error", "message", "detail") if key in values), json.dumps(values))
    return values if isinstance(values, str) else json.dumps(values)

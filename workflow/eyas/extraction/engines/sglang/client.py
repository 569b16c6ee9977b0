"""Requests to the server's /generate: prefill, one token, states by way of a dump."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Reply:
    """What the server says of a captured prompt: the dump's file name and the token that it would write next."""

    file: str
    next_token: int | None


def read_key(variable: str | None) -> str | None:
    """The key of a running server, from the environment."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise EyasError(f"extraction.sglang.api_key_env: the environment variable {variable} is not set; export it")
    return key


class Client:
    """Posts prompts to one server. Used by many threads at once."""

    def __init__(self, url: str, key: str | None, timeout_seconds: float) -> None:
        self.url = url.rstrip("/")
        self._key = key
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

    def capture(self, rid: str, ids: list[int]) -> Reply:
        """Prefill `ids`; raises Unreachable, Refused or Failed."""
        body: dict[str, Any] = {
            "rid": rid, "input_ids": ids, "return_hidden_states": True,
            # Whole prompts, whatever the server keeps of earlier ones.
            "cache_salt": rid,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        }  # fmt: skip
        try:
            response = self._http.post(f"{self.url}/generate", json=body)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as exc:
            raise Away(self.said(str(exc) or type(exc).__name__)) from None
        except httpx2.ReadTimeout:
            raise Failed("no answer in time") from None
        except httpx2.HTTPError as exc:
            raise Unreachable(self.said(str(exc) or type(exc).__name__)) from None
        if response.status_code != 200:
            message = f"the server answers {response.status_code}: {self.said(_message(response))}"
            if response.status_code in (401, 403):
                raise EyasError(f"extraction.sglang: {self.url}: the key is refused ({message})")
            if response.status_code in (400, 404, 413, 422):
                raise Refused(message)
            raise Failed(message)
        try:
            values = response.json()
            facts = values["meta_info"]
            ids_out = values.get("output_ids") or []
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Failed("the server's answer is no generation") from None
        if error := _first(facts.get("hs_error")):
            raise Failed(self.said(error))
        file = _first(facts.get("hs_file"))
        if file is None:
            raise Failed(
                "the server wrote no states; is the capture plugin installed in its environment, and"
                " EYAS_CAPTURE_DIR set?"
            )
        return Reply(os.path.basename(file), int(ids_out[0]) if ids_out else None)


def _first(value: Any) -> str | None:
    """A text, or the first of a list of texts."""
    while isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, str) else None


def _message(response: httpx2.Response) -> str:
    try:
        values = response.json()
    except (ValueError, RecursionError):
        return response.text
    while isinstance(values, dict):
        values = next((values[key] for key in ("error", "message", "detail") if key in values), json.dumps(values))
    return values if isinstance(values, str) else json.dumps(values)

"""A client of OpenAI-compatible endpoints: several addresses in turn, retries, outages, one key.

Three kinds of failure are told apart. A server that says that this request is wrong (4xx) is right: the row is
refused. What may pass (429, 5xx, broken connections, junk) is tried again, `max_tries` times. And while nobody
answers at all, waiting is no row's fault: it costs no tries, and after `outage_minutes` the job stops.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2
import tenacity

from eyas.config.schema import EndpointOptions
from eyas.errors import EyasError

__all__ = ["Client", "EndpointOptions", "Failed", "Refused"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PASSING = {408, 409, 425, 429}
_OUTAGE = 10  # failures in a row, without one success, that are nobody's own


class Refused(Exception):
    """The server refuses this request; trying again will not help."""


class Failed(Exception):
    """A request failed in a way that may pass. `unreachable`: there was no connection."""

    def __init__(self, kind: str, message: str, retry_after: float | None = None, unreachable: bool = False) -> None:
        super().__init__(message)
        self.kind, self.retry_after, self.unreachable = kind, retry_after, unreachable


@dataclass
class _Address:
    """One base address with its circuit breaker: after failures in a row it is left alone for a while."""

    url: str
    failures: int = 0
    closed_until: float = 0.0
    probing: bool = False

    def succeeded(self) -> None:
        self.failures, self.closed_until, self.probing = 0, 0.0, False

    def failed(self) -> None:
        self.failures += 1
        self.probing = False
        if self.failures >= 3:
            self.closed_until = time.monotonic() + min(0.5 * 2 ** (self.failures - 3), 30.0)


class Client:
    """Posts chat completions. `errors` counts failures by kind."""

    def __init__(self, options: EndpointOptions) -> None:
        self.options = options
        self.errors: Counter[str] = Counter()
        self._addresses = [_Address(url.rstrip("/")) for url in options.urls]
        self._turn = 0
        self._answered = False
        self._refused = 0
        self._failed_in_a_row = 0
        self._silent_since: float | None = None
        self._last_failure = ""
        self._key = self._read_key()
        hosts = {urlsplit(address.url).hostname for address in self._addresses}
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._http = httpx2.AsyncClient(
            headers=headers, trust_env=not hosts <= set(_LOOPBACK),
            timeout=httpx2.Timeout(options.timeout_seconds, pool=None),
            # Servers close idle connections after 5 s (uvicorn); one that is just closing loses a request.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0),
        )  # fmt: skip

    def _read_key(self) -> str | None:
        name = self.options.api_key_env
        if name is None:
            return None
        key = os.environ.get(name, "").strip()
        if not key:
            raise EyasError(f"responses.endpoint.api_key_env: the environment variable {name} is not set; export it")
        return key

    async def close(self) -> None:
        await self._http.aclose()

    def _said(self, text: str) -> str:
        """A server's words, in one line, without the key."""
        words = " ".join(text.split())
        return (words.replace(self._key, "***") if self._key else words)[:300]  # in this order: half a key is one too

    # ---- one try

    def _choose(self) -> tuple[_Address | None, float]:
        """The next address in turn that may be used, or None and how long to wait for one."""
        now = time.monotonic()
        for step in range(len(self._addresses)):
            address = self._addresses[(self._turn + step) % len(self._addresses)]
            if address.failures < 3 or (address.closed_until <= now and not address.probing):
                self._turn = (self._turn + step + 1) % len(self._addresses)
                address.probing = address.failures >= 3
                return address, 0.0
        return None, max(min(a.closed_until for a in self._addresses) - now, 0.05)

    async def _try(self, address: _Address, body: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self.options.timeout_seconds):
                response = await self._http.post(f"{address.url}/chat/completions", json=body)
        except TimeoutError:
            raise Failed("timeout", f"no answer within {self.options.timeout_seconds:g} s") from None
        except httpx2.ConnectError as exc:
            raise Failed("unreachable", self._said(_reason(exc)), unreachable=True) from None
        except httpx2.TimeoutException:
            raise Failed("timeout", f"no answer within {self.options.timeout_seconds:g} s") from None
        except httpx2.HTTPError as exc:
            raise Failed("broken connection", self._said(str(exc) or type(exc).__name__)) from None
        status = response.status_code
        if status == 200:
            try:
                values = response.json()
                choice = values["choices"][0]
                if not isinstance(choice["message"], dict):
                    raise TypeError("no message")
            except (ValueError, KeyError, IndexError, TypeError, RecursionError):
                raise Failed("junk", "the answer is no chat completion") from None
            return dict(values)
        message = f"{status}: {self._said(_message(response))}"
        if status == 401:
            name = self.options.api_key_env
            where = f"the key in {name} is refused" if name else "a key is wanted; name its variable in api_key_env"
            raise EyasError(f"responses.endpoint: {address.url}: {where} ({message})")
        if status in _PASSING or status >= 500:
            raise Failed(str(status), message, _retry_after(response.headers.get("Retry-After")))
        raise Refused(message)

    async def _attempt(self, body: dict[str, Any]) -> dict[str, Any]:
        """One try at the next address that may be used."""
        address, wait = self._choose()
        while address is None:
            self._give_up_after_outage()
            await asyncio.sleep(min(wait, 1.0))
            address, wait = self._choose()
        try:
            values = await self._try(address, body)
        except Failed as exc:
            self.errors[exc.kind] += 1
            if exc.kind != "429":  # busy is not broken
                address.failed()
                self._failed_in_a_row += 1
                self._silent_since = self._silent_since or time.monotonic()
                self._last_failure = f"{address.url}: {exc}"
                if exc.unreachable or self._is_out:
                    self._give_up_after_outage()
            else:
                address.probing = False
            raise
        except Refused:
            self._heard(address)
            self.errors["refused"] += 1
            self._refused += 1
            raise
        except BaseException:
            address.probing = False
            raise
        self._heard(address)
        self._answered = True
        return values

    def _heard(self, address: _Address) -> None:
        """A server is there: it answered, be it with a refusal."""
        address.succeeded()
        self._failed_in_a_row, self._silent_since = 0, None

    @property
    def _is_out(self) -> bool:
        return self._failed_in_a_row >= _OUTAGE

    def _give_up_after_outage(self) -> None:
        silent = time.monotonic() - (self._silent_since or time.monotonic())
        reachable_elsewhere = any(address.failures < 3 for address in self._addresses)
        if silent >= 60 * self.options.outage_minutes and not (reachable_elsewhere and len(self._addresses) > 1):
            raise EyasError(
                f"responses.endpoint.urls: no answer for {silent / 60:.1f} minutes (last: {self._last_failure});"
                " finished answers are kept: start the server and run snakemake again"
            )

    # ---- until it is answered

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The server's answer; raises Failed when all tries failed, Refused, or EyasError when the job must stop."""
        counted = 0

        def count(state: tenacity.RetryCallState) -> bool:
            nonlocal counted
            error = state.outcome.exception() if state.outcome else None
            if isinstance(error, Failed) and not error.unreachable and not self._is_out:
                counted += 1
            return counted >= self.options.max_tries

        def wait(state: tenacity.RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            if isinstance(error, Failed):
                if error.retry_after is not None:
                    return error.retry_after
                if error.unreachable:
                    return 0.05  # the circuit breaker makes the pauses
            return min(0.4 * 2 ** min(state.attempt_number - 1, 8), 60.0) * random.uniform(0.8, 1.2)

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(Failed), stop=count, wait=wait, reraise=True
        )
        try:
            return await retrying(self._attempt, body)
        except Refused as exc:
            if not self._answered and self._refused >= 10:
                raise EyasError(
                    f"responses.endpoint: all of the first {self._refused} requests were refused ({exc}); correct the"
                    " model's name or the request's fields (responses.endpoint), then run snakemake again"
                ) from None
            raise


def _reason(exc: BaseException) -> str:
    """What the system says of a connection that could not be made, from under the library's own words."""
    seen: list[BaseException] = [exc]
    for error in seen:
        if isinstance(error, OSError) and error.errno is not None:
            return os.strerror(error.errno) if error.errno > 0 else str(error)
        below = [*getattr(error, "exceptions", ()), error.__cause__, error.__context__]
        seen += [e for e in below if e is not None and e not in seen]
    return str(exc) or type(exc).__name__


def _message(response: httpx2.Response) -> str:
    """What a server says of an error, whatever shape it has."""
    try:
        values = response.json()
    except (ValueError, RecursionError):
        return response.text
    for key in ("error", "message", "detail"):
        if isinstance(values, dict) and key in values:
            values = values[key]
    return values if isinstance(values, str) else json.dumps(values)


def _retry_after(value: str | None) -> float | None:
    """Seconds that a server asks to wait (a number or a date); None when it says nothing that can be read."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time() + 0.05
        except (ValueError, TypeError, OverflowError):
            return None
    return min(max(seconds, 0.0), 600.0) if seconds == seconds else None

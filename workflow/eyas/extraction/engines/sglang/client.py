"""Requests to the server's /generate: prefill, one token, states by way of a dump."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from eyas.jobs.server_client import Away, Failed, Refused, ServerClient, Unreachable

__all__ = ["Away", "Client", "Failed", "Refused", "Reply", "Unreachable"]

SECTION = "extraction.sglang"


@dataclass(frozen=True)
class Reply:
    """What the server says of a captured prompt: the dump's file name and the token that it would write next."""

    file: str
    next_token: int | None


class Client(ServerClient):
    """Posts prompts to one server. Used by many threads at once."""

    def __init__(self, url: str, key: str | None, timeout_seconds: float) -> None:
        super().__init__(url, key, timeout_seconds, SECTION)

    def capture(self, rid: str, ids: list[int]) -> Reply:
        """Prefill `ids`; raises Unreachable, Refused or Failed."""
        body: dict[str, Any] = {
            "rid": rid, "input_ids": ids, "return_hidden_states": True,
            # Whole prompts, whatever the server keeps of earlier ones.
            "cache_salt": rid,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        }  # fmt: skip
        values = self.request("POST", "/generate", body)
        try:
            facts = values["meta_info"]
            ids_out = values.get("output_ids") or []
            error, file = _first(facts.get("hs_error")), _first(facts.get("hs_file"))
        except (KeyError, TypeError, AttributeError):
            raise Failed("the server's answer is no generation") from None
        if error:
            raise Failed(self.said(error))
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

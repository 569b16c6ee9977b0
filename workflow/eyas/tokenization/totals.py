"""Totals of all tokens of a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from eyas.errors import EyasError
from eyas.shards import read_json, write_lock, write_sealed

log = logging.getLogger(__name__)

_COUNTED = ("rows", "sequences", "tokens", "supervised_tokens")


def write_totals(shards: Sequence[Path], output: Path) -> None:
    """Write the sums of the token shards' sidecars: rows, sequences, tokens, supervised tokens. Raises EyasError."""
    totals = dict.fromkeys(_COUNTED, 0)
    for shard in shards:
        sidecar = shard.with_suffix(".json")
        facts = read_json(sidecar, "tokens sidecar")
        for key in _COUNTED:
            if not isinstance(facts, dict) or type(facts.get(key)) is not int:
                raise EyasError(f"{sidecar}: damaged ({key} is missing); delete it and run snakemake again")
            totals[key] += facts[key]
    with write_lock(output):
        write_sealed(output, totals)
    log.info(
        "Counted %d tokens (%d supervised) of %d rows.", *(totals[k] for k in ("tokens", "supervised_tokens", "rows"))
    )

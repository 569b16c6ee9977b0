"""The server that captures: one that runs already, or one that this job starts, restarts and ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.extraction.engines.sglang.client import SECTION, Client
from eyas.extraction.engines.sglang.dumps import DumpFolder
from eyas.jobs import servers
from eyas.jobs.server_client import read_key

Probe = Callable[[Client], None]
_TERMS = servers.Terms(SECTION, f"{SECTION}.url", "finished rows are kept")


class RunningServer(servers.RunningServer[Client]):
    """A server that somebody else keeps. Waits `outage_minutes` for it to come back."""

    def __init__(self, options: dict[str, Any], probe: Probe) -> None:
        client = Client(options["url"], read_key(options["api_key_env"], SECTION), options["timeout_seconds"])
        super().__init__(client, options["outage_minutes"], probe, _TERMS)


class OwnServer(servers.OwnServer[Client]):
    """A server of this job, which writes states of `layers` to the folder of `dumps`."""

    def __init__(
        self, command: list[str], options: dict[str, Any], layers: list[int], dumps: DumpFolder, log_file: Path,
        probe: Probe,
    ) -> None:  # fmt: skip
        environment = options["environment"] | {
            "EYAS_CAPTURE_DIR": str(dumps.path), "EYAS_CAPTURE_LAYERS": json.dumps(layers),
        }  # fmt: skip

        def connect(url: str, key: str) -> Client:
            return Client(url, key, options["timeout_seconds"])

        super().__init__(
            command, environment, dumps.path, log_file, options["start_minutes"], options["restarts"], connect, probe,
            _TERMS,
        )  # fmt: skip

"""The engine: one server and one collector for all shards of a job."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eyas.config.sglang import sglang_problem
from eyas.errors import EyasError
from eyas.extraction.engines.base import Captured
from eyas.extraction.engines.sglang.client import Client
from eyas.extraction.engines.sglang.collector import Collector, Server, Shape
from eyas.extraction.engines.sglang.dumps import DumpFolder
from eyas.extraction.engines.sglang.head import TargetHead
from eyas.extraction.engines.sglang.server import OwnServer, RunningServer
from eyas.target.tokenizer import TargetReference, text_config

_PROBE_TOKENS = 16


class SglangEngine:
    """Prefill by a server. Nothing is started before a row is missing."""

    journal_seconds = 1.0

    def __init__(
        self, target: TargetReference, layers: Sequence[int], options: dict[str, Any], command: list[str] | None,
        gpus: int, server_log: Path,
    ) -> None:  # fmt: skip
        """`command`: the server to start; None for the running one that `options` (config.sglang) name."""
        config = text_config(target)
        if problem := sglang_problem(str(config.model_type), int(config.num_hidden_layers), layers):
            raise EyasError(problem)
        self._target, self._layers, self._options = target, list(layers), options
        self._command, self._gpus, self._log = command, gpus, server_log
        self._hidden_size, self._vocabulary = int(config.hidden_size), int(config.vocab_size)
        self._dumps: DumpFolder | None = None
        self._server: Server | None = None
        self._collector: Collector | None = None

    @property
    def way(self) -> dict[str, Any]:
        return {"engine": "sglang"}

    def capture(
        self, name: str, sequences: Sequence[np.ndarray], finished: frozenset[int]
    ) -> Generator[list[tuple[int, Captured]], None, None]:
        missing = [index for index in range(len(sequences)) if index not in finished]
        if missing:
            self.begin()
            assert self._collector
            yield from self._collector.capture(sequences, missing)

    def begin(self) -> None:
        if self._collector is None:
            options = self._options
            self._dumps = dumps = DumpFolder(Path(options["dump_folder"]), own=self._command is not None)
            head = TargetHead(self._target, self._gpus)
            if self._command is None:
                self._server = RunningServer(options, self._probe)
            else:
                self._server = OwnServer(self._command, options, self._layers, dumps, self._log, self._probe)
            # Four states a token of at most four bytes, and its id.
            shape = Shape(self._layers, self._hidden_size, 4 * self._hidden_size * self._item_bytes() + 4)
            self._collector = Collector(
                self._server, dumps, shape, head, options["concurrency"], options["max_tries"],
                int(options["dump_gb"] * 1e9),
            )  # fmt: skip
        assert self._server
        self._server.start()

    def _item_bytes(self) -> int:
        return 4 if self._target.dtype == "float32" else 2

    def _probe(self, client: Client) -> None:
        assert self._collector
        ids = 1 + np.arange(_PROBE_TOKENS, dtype=np.int32) * 7 % max(self._vocabulary - 2, 1)
        self._collector.probe(client, ids)

    def close(self) -> None:
        """End the server and delete the dumps."""
        if self._server:
            self._server.close()
        if self._dumps:
            self._dumps.close()
        self._server = self._dumps = self._collector = None

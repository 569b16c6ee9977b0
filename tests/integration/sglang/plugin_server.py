"""Real SGLang servers on a CPU, with the capture plugin or without: no engine, no collector, plain HTTP."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers import ENVIRONMENT


def server_command(python: str, model: Path, port: int, key_file: Path, *more: str) -> list[str]:
    """The launch that works on a CPU without AMX, with `SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1`,
    `EYAS_CAPTURE_DIR=/dev/shm/…` (0700) and `EYAS_CAPTURE_LAYERS='[1, 2, 4]'` in its environment:

        python -m sglang.launch_server --model-path MODEL --device cpu --attention-backend torch_native
          --dtype float32 --mem-fraction-static 0.1 --max-total-tokens 16384 --chunked-prefill-size 64
          --sleep-on-idle --skip-server-warmup --skip-tokenizer-init --disable-radix-cache
          --enable-return-aux-hidden-states --speculative-algorithm EAGLE3
          --host 127.0.0.1 --port PORT --config KEY_FILE

    KEY_FILE (0600) holds `{"api-key": "…"}`: command lines are there for all to see. No
    `--return-aux-hidden-state-layer-ids`: the plugin chooses the layers, and SGLang ends the whole server at its first
    forward when a listed layer cannot be captured. On GPUs leave `--device`, `--attention-backend` and
    `--max-total-tokens` out.
    """
    return [
        python, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu",
        "--attention-backend", "torch_native", "--dtype", "float32", "--mem-fraction-static", "0.1",
        "--max-total-tokens", "16384", "--chunked-prefill-size", "64", "--sleep-on-idle", "--skip-server-warmup",
        "--skip-tokenizer-init", "--disable-radix-cache", "--enable-return-aux-hidden-states",
        "--speculative-algorithm", "EAGLE3", "--host", "127.0.0.1", "--port", str(port), "--config", str(key_file),
        *more,
    ]  # fmt: skip


@dataclass
class SglangServer:
    """A server that is up."""

    url: str
    key: str
    log: Path
    process: subprocess.Popen[bytes]

    def post(self, path: str, body: dict[str, Any], timeout: float = 120.0) -> Any:
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json", "Connection": "close"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read() or b"null")

    def up(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5):
                return True
        except OSError:
            return False


@dataclass
class PluginServer(SglangServer):
    """A server with the capture plugin that is up."""

    dumps: Path

    def generate(self, rid: str, ids: list[int], states: bool = True, **more: Any) -> dict[str, Any]:
        """`meta_info` (and what else comes) of one prefill."""
        body = {
            "rid": rid, "input_ids": ids, "return_hidden_states": states,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        }  # fmt: skip
        found: dict[str, Any] = self.post("/generate", body | more)["meta_info"]
        return found


@contextlib.contextmanager
def plugin_server(
    python: str, model: Path, layers: Any, dumps: Path, folder: Path, *more: str, wait: float = 30.0
) -> Iterator[PluginServer]:
    """Start a server that captures, wait until it answers; ends it and all its processes."""
    environment = {
        "EYAS_CAPTURE_DIR": str(dumps), "EYAS_CAPTURE_LAYERS": json.dumps(layers), "EYAS_CAPTURE_WAIT": str(wait),
    }  # fmt: skip

    def command(port: int, key_file: Path) -> list[str]:
        return server_command(python, model, port, key_file, *more)

    with sglang_server(command, folder, environment) as server:
        yield PluginServer(**vars(server), dumps=dumps)


@contextlib.contextmanager
def sglang_server(
    command: Callable[[int, Path], list[str]], folder: Path, environment: Mapping[str, str]
) -> Iterator[SglangServer]:
    """Start a server, wait until it answers; ends it and all its processes.

    `command`: of its port and the file with its key; `environment`: more than a server on a CPU needs.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    key, key_file, log = secrets.token_hex(16), folder / "key.yaml", folder / "server.log"
    key_file.touch(mode=0o600)
    key_file.write_text(json.dumps({"api-key": key}))
    everything = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ENVIRONMENT | environment
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command(port, key_file), env=everything, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG: not longer than pytest
        )  # fmt: skip
    server = SglangServer(f"http://127.0.0.1:{port}", key, log, process)
    try:
        deadline = time.monotonic() + 600
        while not server.up():
            tail = log.read_text(errors="replace")[-3000:]
            assert process.poll() is None and time.monotonic() < deadline, tail
            time.sleep(0.5)
        yield server
    finally:
        # Killed processes leave segments in /dev/shm, whose names do not say whose they are: our own maps do.
        segments = _segments(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for segment in segments:
            segment.unlink(missing_ok=True)


def _segments(group: int) -> set[Path]:
    """Files in /dev/shm that the processes of one process group have mapped, by SGLang and multiprocessing."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if int((entry / "stat").read_text().rpartition(")")[2].split()[2]) != group:
                continue
            maps = (entry / "maps").read_text()
        except OSError:
            continue
        for line in maps.splitlines():
            path = Path(line.split(maxsplit=5)[-1])
            if path.parent == Path("/dev/shm") and path.name.startswith(("sglang_", "sgl_shm_", "sem.mp-")):
                found.add(path)
    return found

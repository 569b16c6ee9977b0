"""A stand-in for an SGLang server with the capture plugin: writes dumps by hand, misbehaves on request, keeps count.

`FakeSglang` serves in this process. Run as a script it is the server *command* of a job: it takes `--host`, `--port`
and `--config` as SGLang does, writes to EYAS_CAPTURE_DIR, and prints its key as SGLang does. No torch here: a job
starts it in a moment. Its states are a function of the ids (`made_up_states`) unless a test gives others.

A fault is named by the length of the row that it strikes; each request of that length takes the next of its list.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

States = Callable[[list[int]], tuple[np.ndarray, np.ndarray, int]]
KINDS = {"float32": "F32", "float16": "F16", "float64": "F64", "int32": "I32", "int64": "I64"}


def made_up_states(head: np.ndarray) -> States:
    """aux [T, 3·H], last [T, H] and the next token (by `head` [V, H]), from the ids alone."""

    def states(ids: list[int]) -> tuple[np.ndarray, np.ndarray, int]:
        width = head.shape[1]
        random = np.random.default_rng(ids)
        values = random.standard_normal((len(ids), 4 * width), dtype=np.float32)
        aux, last = values[:, : 3 * width].copy(), values[:, 3 * width :].copy()
        return aux, last, int((head @ last[-1]).argmax())

    return states


def dump_bytes(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> bytes:
    """A safetensors file, written out by hand."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, values in tensors.items():
        entries[name] = {
            "dtype": KINDS[str(values.dtype)], "shape": list(values.shape),
            "data_offsets": [position, position + values.nbytes],
        }  # fmt: skip
        position += values.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(values.tobytes() for values in tensors.values())


class FakeSglang:
    """The server; `faults`: what happens to rows of a length, request by request, before all goes well."""

    def __init__(
        self, folder: Path, states: States, layers: list[int], key: str | None = None,
        faults: dict[int, list[str]] | None = None, delay: float = 0.0,
    ) -> None:  # fmt: skip
        self.folder, self.states, self.layers, self.key = folder, states, layers, key
        self.faults, self.delay = faults or {}, delay
        self.requests: list[tuple[str, int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.most_bytes = self.most_at_once = self.now = 0
        self.lock = threading.Lock()
        self.released = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def lengths(self) -> list[int]:
        return [length for _, length in self.requests]

    def start(self, host: str = "127.0.0.1") -> FakeSglang:
        fake = self

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:  # clients may leave
                pass

        class Handler(_Handler):
            server_state = fake

        self._server = Server((host, self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def stop(self) -> None:
        self.released.set()
        with self.lock:  # several threads of a test may stop it at once
            server, self._server = self._server, None
        if server:
            server.shutdown()
            server.server_close()

    def __enter__(self) -> FakeSglang:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def next_fault(self, length: int) -> str | None:
        with self.lock:
            waiting = self.faults.get(length)
            return waiting.pop(0) if waiting else None

    def note_bytes(self) -> None:
        """How much lies in the folder."""
        total = 0
        for path in self.folder.rglob("*"):
            if path.suffix in (".safetensors", ".part"):
                try:
                    total += path.stat().st_size
                except FileNotFoundError:
                    continue
        self.most_bytes = max(self.most_bytes, total)

    def write(self, rid: str, ids: list[int], fault: str | None) -> tuple[Path, int]:
        """Write the dump, with what the fault says wrong about it."""
        aux, last, token = self.states(ids)
        metadata = {
            "format": "eyas.capture", "version": "1", "rid": rid, "layers": json.dumps(self.layers), "prefix": "0",
        }  # fmt: skip
        tensors = {"aux_hidden_states": aux, "last_hidden_state": last, "input_ids": np.array(ids, dtype=np.int32)}
        if fault == "rid":
            metadata["rid"] = "eyas-" + "0" * 16 + "-1"
        elif fault == "format":
            metadata["format"] = "other"
        elif fault == "version":
            metadata["version"] = "2"
        elif fault == "layers":
            metadata["layers"] = json.dumps([layer + 1 for layer in self.layers])
        elif fault == "prefix":
            metadata["prefix"] = "5"
        elif fault == "ids":
            tensors["input_ids"] = tensors["input_ids"][::-1] + 1
        elif fault == "id dtype":
            tensors["input_ids"] = tensors["input_ids"].astype(np.int64)
        elif fault == "dtype":
            tensors["last_hidden_state"] = last.astype(np.int64)
        elif fault == "short":
            tensors = {name: values[:-1] for name, values in tensors.items()}
        elif fault == "narrow":
            tensors["aux_hidden_states"] = aux[:, :-1].copy()
        elif fault == "no last":
            del tensors["last_hidden_state"]
        elif fault == "nan":
            last[-1, 0] = np.nan
        elif fault == "other states":
            last[:] = last[:, ::-1]
        path = self.folder / f"{rid}.safetensors"
        raw = dump_bytes(metadata, tensors)
        if fault == "truncated":
            raw = raw[:-1]
        elif fault == "empty":
            raw = b""
        elif fault == "garbage":
            raw = b"\xff" * 64
        place = path.with_name("elsewhere") if fault == "symlink" else path.with_name(f".{rid}.part")
        if fault == "fifo":
            os.mkfifo(path)
            return path, token
        with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(raw)
        if fault == "writable":
            os.chmod(place, 0o602)
        if fault == "symlink":
            path.symlink_to(place)
        elif fault != "gone":
            with self.lock:  # what lies there is counted before anybody can take it away
                os.rename(place, path)
                self.note_bytes()
        else:
            place.unlink()
        return path, token


class _Handler(BaseHTTPRequestHandler):
    server_state: FakeSglang
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def say(self, code: int, values: Any) -> None:
        body = values if isinstance(values, bytes) else json.dumps(values).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def gone(self) -> bool:
        """Whether the server was stopped: connections that were kept open end too."""
        self.close_connection = self.server is not self.server_state._server
        return self.close_connection

    def allowed(self) -> bool:
        fake = self.server_state
        if fake.key is None or self.headers.get("Authorization") == f"Bearer {fake.key}":
            return True
        self.say(401, {"error": f"Unauthorized: {self.headers.get('Authorization')}"})
        return False

    def do_GET(self) -> None:
        if self.gone():
            return
        if self.path == "/model_info":  # SGLang answers it to everybody
            self.say(200, {"model_path": "fake"})
        else:
            self.say(404, {})

    def do_POST(self) -> None:
        fake = self.server_state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.gone() or not self.allowed():
            return
        ids, rid = body["input_ids"], body["rid"]
        with fake.lock:
            fake.requests.append((rid, len(ids)))
            fake.bodies.append(body)
            fake.now += 1
            fake.most_at_once = max(fake.most_at_once, fake.now)
        try:
            fault = fake.next_fault(len(ids))
            if fake.delay:
                time.sleep(fake.delay)
            answer = self.answer(fake, rid, ids, fault)
        finally:
            with fake.lock:
                fake.now -= 1
        if answer is None:
            self.close_connection = True
        else:
            self.say(*answer)

    def answer(self, fake: FakeSglang, rid: str, ids: list[int], fault: str | None) -> tuple[int, Any] | None:
        """Status and body, or None to close the connection without a word."""
        if fault == "drop":
            return None
        if fault == "stop":  # the server goes away in the middle of it
            fake.stop()
            return None
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "slow":
            fake.released.wait(60)
            return None
        if fault is not None and fault.isdigit():
            return int(fault), {"error": {"message": f"fault {fault}"}}
        if fault == "no json":
            return 200, b"<html>"
        info: dict[str, Any] = {"id": rid}
        if fault == "hs_error":
            return 200, {"meta_info": info | {"hs_error": ["no room for it"]}, "output_ids": [1]}
        if fault == "nothing":
            return 200, {"meta_info": info, "output_ids": [1]}
        path, token = fake.write(rid, ids, fault)
        name = str(path.with_name("eyas-other.safetensors")) if fault == "name" else str(path)
        if fault == "other token":
            token = (token + 1) % 8
        return 200, {"meta_info": info | {"hs_file": [name]}, "output_ids": [token]}


def main() -> None:
    """The server command of a job."""
    from safetensors.numpy import load_file

    parser = argparse.ArgumentParser()
    parser.add_argument("--target", type=Path, required=True, help="folder with model.safetensors")
    parser.add_argument("--notes", type=Path, required=True, help="folder to write the processes' ids to")
    parser.add_argument("--faults", type=json.loads, default={}, help="JSON: {length: [fault, …]}, every start anew")
    parser.add_argument("--first-faults", type=json.loads, default={}, help="the same, at the first start alone")
    parser.add_argument("--dies", help="at the start, with this last line")
    parser.add_argument("--stubborn", action="store_true", help="SIGTERM does not end it")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--config", type=Path, required=True)
    args = parser.parse_args()
    key = json.loads(args.config.read_text())["api-key"]
    if key.startswith("-"):  # SGLang makes arguments of the file's lines
        parser.error("argument --api-key: expected one argument")
    print(f"server_args=ServerArgs(host={args.host!r}, api_key={key!r}, other=1)")
    if args.dies:
        print(f"Error: {args.dies} {key}")
        print("bye")
        sys.exit(3)
    if args.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # As SGLang's own processes are: one that has left the server's session, and does not end with it.
    below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    starts = len(list(args.notes.glob("*.start")))
    facts = {"server": os.getpid(), "below": below.pid, "guard": os.getppid()}
    folder = Path(os.environ["EYAS_CAPTURE_DIR"])
    facts |= {"mode": oct(folder.stat().st_mode & 0o777), "layers": os.environ["EYAS_CAPTURE_LAYERS"]}
    facts |= {"host": args.host, "port": args.port, "key": key, "environment": dict(os.environ)}
    weights = load_file(args.target / "model.safetensors")
    head = weights.get("lm_head.weight", weights.get("model.embed_tokens.weight"))
    faults = {
        int(length): list(kinds)
        for length, kinds in (args.faults if starts else args.faults | args.first_faults).items()
    }
    layers = json.loads(os.environ["EYAS_CAPTURE_LAYERS"])
    fake = FakeSglang(folder, made_up_states(head), layers, key, faults, args.delay)
    fake.port = args.port
    fake.start(args.host)
    new = args.notes / f".{starts}.part"
    new.write_text(json.dumps(facts))
    new.rename(args.notes / f"{starts}.start")
    threading.Event().wait()


if __name__ == "__main__":
    main()

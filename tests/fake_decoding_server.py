"""A stand-in for an SGLang server that decodes, with a drafter or without: answers from the ids alone, and its counts.

`FakeDecoder` serves in this process. Run as a script it is the server *command* of a job. A fault is named by the number
of the request that it strikes (the first, which warms the server up, is 0).
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def continuation(ids: list[int], max_new_tokens: int, ends: list[int]) -> list[int]:
    """What the server writes: it ends after a few tokens, or runs on in a loop for every third sum of ids."""
    total = sum(ids)
    if total % 3 == 0:
        return [5 + total % 20] * max_new_tokens
    tokens = [5 + (total + 3 * i * i) % 30 for i in range(6 + total % 9)]
    return [*tokens, *ends[:1]][:max_new_tokens]


def rounds_of(tokens: int, pattern: list[int]) -> list[tuple[int, int]]:
    """(accepted, accepted within the output) of each round that follows the prefill's own token."""
    rounds, left = [], tokens - 1
    while left > 0:
        accepted = pattern[len(rounds) % len(pattern)]
        rounds.append((accepted, min(accepted, left)))
        left -= accepted + 1
    return rounds


class FakeDecoder:
    """The server. `pattern`: drafted tokens accepted by round, over and over; None is a server without a drafter.

    `tells`: `all` of its counts, `sums`, or `nothing`. `info`: what /server_info says; None: nothing.
    """

    def __init__(
        self, pattern: list[int] | None = None, steps: int = 3, key: str | None = None, tells: str = "all",
        faults: dict[int, str] | None = None, info: dict[str, Any] | None = None, delay: float = 0.0,
    ) -> None:  # fmt: skip
        self.pattern, self.steps, self.key, self.tells = pattern, steps, key, tells
        self.faults, self.info, self.delay = faults or {}, info, delay
        self.bodies: list[dict[str, Any]] = []
        self.now = self.most_at_once = 0
        self.lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeDecoder:
        fake = self

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:  # clients may leave
                pass

        class Handler(_Handler):
            fake_server = fake

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server
        self._server.shutdown()
        self._server.server_close()

    def generate(self, body: dict[str, Any], fault: str | None) -> dict[str, Any]:
        sampling = body["sampling_params"]
        ends = [] if sampling["ignore_eos"] else sampling["stop_token_ids"]
        ids = continuation(body["input_ids"], sampling["max_new_tokens"], ends)
        if fault == "other":
            ids[1] += 1
        facts: dict[str, Any] = {"finish_reason": {"type": "stop"}, "completion_tokens": len(ids)}
        if self.pattern is not None and self.tells != "nothing" and len(ids) > 1:
            rounds = [accepted for accepted, _ in rounds_of(len(ids), self.pattern)]
            facts |= {"spec_verify_ct": len(rounds), "spec_num_correct_drafts": sum(rounds)}
            if self.tells == "all":
                facts["spec_correct_drafts_histogram"] = [rounds.count(n) for n in range(max(rounds) + 1)]
        return {"output_ids": ids, "meta_info": facts}


class _Handler(BaseHTTPRequestHandler):
    fake_server: FakeDecoder
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def say(self, code: int, values: Any) -> None:
        body = json.dumps(values).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def allowed(self) -> bool:
        key = self.fake_server.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self.say(401, {"error": f"Unauthorized: {self.headers.get('Authorization')}"})
        return False

    def do_GET(self) -> None:
        if self.path == "/model_info":  # SGLang answers it to everybody
            self.say(200, {"model_path": "fake"})
        elif self.path == "/server_info" and self.fake_server.info is not None and self.allowed():
            self.say(200, self.fake_server.info)
        else:
            self.say(404, {})

    def do_POST(self) -> None:
        fake = self.fake_server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        with fake.lock:
            fault = fake.faults.get(len(fake.bodies))
            fake.bodies.append(body)
            fake.now += 1
            fake.most_at_once = max(fake.most_at_once, fake.now)
        try:
            time.sleep(fake.delay)
        finally:
            with fake.lock:
                fake.now -= 1
        if fault == "drop":
            self.close_connection = True
        elif fault == "die":
            print(f"Error: out of memory {fake.key}", flush=True)
            os._exit(7)
        elif fault is not None and fault.isdigit():
            self.say(int(fault), {"error": {"message": f"fault {fault}"}})
        else:
            self.say(200, fake.generate(body, fault))


def main() -> None:
    """The server command of a job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--notes", type=Path, required=True, help="folder to write the process's id to")
    parser.add_argument("--pattern", type=json.loads, help="JSON: drafted tokens accepted by round")
    parser.add_argument("--faults", type=json.loads, default={}, help="JSON: {number: fault}")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that each answer takes")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--sglang", action="store_true", help="pass by the arguments of SGLang that are unknown here")
    args, unknown = parser.parse_known_args()
    if unknown and not args.sglang:
        parser.error(f"unknown: {unknown}")
    key = json.loads(args.config.read_text())["api-key"]
    print(f"server_args=ServerArgs(host={args.host!r}, api_key={key!r}, other=1)", flush=True)
    faults = {int(n): fault for n, fault in args.faults.items()}
    fake = FakeDecoder(args.pattern, key=key, faults=faults, delay=args.delay)
    fake.port = args.port
    facts = {"pid": os.getpid(), "key": key, "host": args.host, "mode": oct(args.config.stat().st_mode & 0o777)}
    new = args.notes / f".{os.getpid()}.part"
    new.write_text(json.dumps(facts | {"folder": str(args.config.parent), "drafts": args.pattern is not None}))
    with fake:
        new.rename(args.notes / f"{os.getpid()}.start")
        threading.Event().wait()


if __name__ == "__main__":
    main()

"""A canary key in the environment of a whole run over an endpoint: nowhere but in the requests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest
from fake_endpoint import FakeEndpoint
from ledger import Faults
from workflow_runs import Workdir

KEY = "sk-canary-7f3a91d2c4-do-not-show"


def holders(folder: Path, canary: bytes) -> list[str]:
    return [str(f) for f in folder.rglob("*") if f.is_file() and not f.is_symlink() and canary in f.read_bytes()]


@pytest.mark.timeout(1800)
def test_the_key_of_an_endpoint(faults: Faults, workdir: Workdir, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EYAS_TEST_KEY", KEY)
    requests = tmp_path / "requests.log"
    with FakeEndpoint(requests) as fake:
        workdir.settings["responses"] = {
            "engine": "openai", "max_new_tokens": 24,
            "endpoint": {"urls": [fake.url], "model": "m", "api_key_env": "EYAS_TEST_KEY"},
        }  # fmt: skip
        goals = [] if faults.all else ["--", "results/tiny/tokens/statistics.json"]
        log = tmp_path / "snakemake.log"
        shown: set[str] = set()
        with open(log, "w") as file:
            process = subprocess.Popen(workdir.command(*goals), cwd=workdir.path, stdout=file, stderr=file)
            while process.poll() is None:
                for one in psutil.process_iter(["cmdline"]):
                    line = " ".join(one.info["cmdline"] or [])
                    if KEY in line:
                        shown.add(line)
                try:
                    process.wait(0.05)
                except subprocess.TimeoutExpired:
                    pass
        assert process.returncode == 0, log.read_text()[-4000:]
        with faults.tried("a canary key: the endpoint gets it"):
            assert KEY in requests.read_text()
    with faults.tried("a canary key: files of the run, logs, reports, Snakemake's own records"):
        assert holders(workdir.path, KEY.encode()) == []
    with faults.tried("a canary key: what is printed"):
        assert KEY not in log.read_text()
    with faults.tried("a canary key: the process list"):
        assert shown == set()
    if faults.all:
        with faults.tried("a canary key: snakemake --report"):
            workdir.run("--report", "report.html")
            assert holders(workdir.path, KEY.encode()) == []


@pytest.mark.timeout(900)
def test_an_endpoint_that_repeats_the_key(faults: Faults, workdir: Workdir, monkeypatch) -> None:
    """In its error message, as some proxies do; also where the message is cut off inside the key."""
    import http.server
    import threading

    monkeypatch.setenv("EYAS_TEST_KEY", KEY)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = f'{{"error": {{"message": "{"x" * self.server.padding} bad key {self.headers["Authorization"]}"}}}}'
            self.send_response(401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    workdir.settings["responses"] = {
        "engine": "openai", "max_new_tokens": 24,
        "endpoint": {
            "urls": [f"http://127.0.0.1:{server.server_port}/v1"], "model": "m", "api_key_env": "EYAS_TEST_KEY",
        },
    }  # fmt: skip
    for padding in (0, 275) if faults.all else (275,):
        server.padding = padding
        with faults.tried("an endpoint that repeats the key", padding):
            result = workdir.snakemake("--", "results/tiny/conversations/rows_0-20.jsonl")
            assert result.code == 1 and "key in EYAS_TEST_KEY is refused" in result.text, result.text[-2000:]
            assert KEY[:12] not in result.text and holders(workdir.path, KEY[:12].encode()) == []
    server.shutdown()

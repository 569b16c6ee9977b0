"""A stand-in for kubectl: keeps jobs in the folder FAKE_KUBERNETES, and runs their commands on this machine.

Answers `create -f -`, `get job NAME` and `delete job NAME…` as profiles/kubernetes asks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

FOLDER = Path(os.environ["FAKE_KUBERNETES"])
action, words = sys.argv[1], sys.argv[2:]
if action == "create":
    job = yaml.safe_load(sys.stdin)
    name = f"{job['metadata']['generateName']}{len(list(FOLDER.glob('*.job.json'))):05d}"
    (FOLDER / f"{name}.job.json").write_text(json.dumps(job))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    with open(FOLDER / f"{name}.log", "w") as log:
        subprocess.Popen(
            ["/bin/sh", "-c", '"$@"; echo $? > "$0"', str(FOLDER / f"{name}.code"), *container["command"]],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    print(name, end="")
elif action == "get":
    outage, name = FOLDER / "outage", words[1]
    if outage.exists():
        outage.unlink()
        sys.exit("Unable to connect to the server: dial tcp: connection refused")
    if not (FOLDER / f"{name}.job.json").exists():
        sys.exit(f'Error from server (NotFound): jobs.batch "{name}" not found')
    code = FOLDER / f"{name}.code"
    if code.exists() and (text := code.read_text()):
        print("Complete" if text.strip() == "0" else "FailureTarget Failed", end="")
elif action == "delete":
    for name in [word for word in words[1:] if not word.startswith("-")]:
        (FOLDER / f"{name}.job.json").unlink(missing_ok=True)
else:
    sys.exit(f"unknown: {sys.argv[1:]}")

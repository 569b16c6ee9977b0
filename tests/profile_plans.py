"""Started by test_profiles: dry runs with several profiles, in one process, since Snakemake loads slowly.

Arguments: a JSON list of [arguments of Snakemake, environment]. Prints, for each, the exit code, the text, and what the
SLURM executor would submit for each job.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from snakemake.cli import main
from snakemake.executors.dryrun import Executor
from snakemake_executor_plugin_slurm.submit_string import get_submit_command
from snakemake_executor_plugin_slurm.utils import set_gres_string

CHECKOUT = Path(__file__).parents[1]

submitted: list[list[str]] = []
run_job = Executor.run_job


def noting(self: Executor, job: object) -> None:
    names = ("run_uuid", "slurm_logfile", "comment_str", "account", "partition", "workdir")
    options = get_submit_command(job, dict.fromkeys(names, "")) + set_gres_string(job)
    submitted.append([job.rule.name, options])
    run_job(self, job)


Executor.run_job = noting
results = []
for arguments, environment in json.loads(sys.argv[1]):
    text, code = io.StringIO(), None
    submitted.clear()
    os.environ.update(environment)
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            main(["--dry-run", "--snakefile", str(CHECKOUT / "Snakefile"), *arguments])
        except SystemExit as exc:
            code = exc.code
    for name in environment:
        del os.environ[name]
    results.append({"code": code, "text": text.getvalue(), "submitted": list(submitted)})
json.dump(results, sys.stdout)

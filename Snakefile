"""Eyas: prompts and a target in, a measured EAGLE-3 drafter out. The stages are in rules/."""

import gc
import json
import os
import re
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

# The package is imported from this checkout, here and in the scripts that the rules call.
sys.path.insert(0, str(Path(workflow.basedir) / "workflow"))

from eyas.errors import EyasError
from eyas.extraction.space import describe, run_space
from eyas.plan import (
    WorkingFolder,
    begin_record,
    end_record,
    is_dry_run,
    plan_run,
    prepare_environment,
    remember_min_job_age,
)

# What is imported by now stays: the garbage collector need not look through it each time that the DAG has grown.
gc.freeze()

prepare_environment(Path(workflow.basedir))
remember_min_job_age(sys.modules.get("snakemake_executor_plugin_slurm"))

# A configuration given with --configfile stands alone; it is not merged with the default one.
DEFAULT_CONFIG = "config/config.yaml"
if not os.path.isfile(DEFAULT_CONFIG):
    DEFAULT_CONFIG = str(Path(workflow.basedir) / DEFAULT_CONFIG)
if not workflow.overwrite_configfiles:

    configfile: DEFAULT_CONFIG


try:
    PLAN = plan_run(config, ", ".join(map(str, workflow.configfiles)) or "configuration")
except EyasError as exc:
    raise WorkflowError(f"The configuration cannot be used:\n{exc}")


# Held until this process ends: nobody holding it means that a lock in here is a killed Snakemake's.
WORKING_FOLDER = WorkingFolder(Path(".snakemake"))
if workflow.is_main_process and not is_dry_run(sys.argv[1:]) and WORKING_FOLDER.hold():
    WORKING_FOLDER.drop_stale_lock()


# What stands on the first page of `snakemake --report`.
report: "workflow/report/run.rst"


include: "rules/common.smk"
include: "rules/target.smk"
include: "rules/prompts.smk"
include: "rules/responses.smk"
include: "rules/tokens.smk"
include: "rules/extraction.smk"
include: "rules/vocabulary.smk"
include: "rules/training.smk"
include: "rules/evaluation.smk"
include: "rules/export.smk"
include: "rules/summary.smk"


# Downloads stay where Snakemake runs: a cluster's nodes seldom reach the internet.
localrules:
    all,
    fetch_packaged_file,


rule all:
    default_target: True
    input:
        # The other rules take the target's files as `ancient`, and Snakemake does not look at jobs behind such files
        # when these are made again: they would be left out, in silence.
        PLAN.target_files,
        # All shards, so that a deleted one is noticed even when everything made from it is there.
        PLAN.response_files.wanted,
        PLAN.token_files.wanted,
        PLAN.state_files.wanted,
        f"{RUN}/hidden_states/data_config.json",
        [
            f"{RUN}/drafters/{drafter}/epoch_{epoch}/model.safetensors"
            for drafter, settings in CONFIG.drafters.items()
            for epoch in range(settings.training.epochs + 1)
        ],
        expand(f"{RUN}/drafters/{{drafter}}/evaluation.json", drafter=CONFIG.drafters),
        expand(
            f"{RUN}/drafters/{{drafter}}/export/{{server}}/{{name}}",
            drafter=CONFIG.drafters,
            server=SERVERS,
            name=["config.json", "export.json", "README.md", "provenance.json", *PLAN.export_weights],
        ),
        f"{RUN}/tokens/statistics.json",
        f"{RUN}/summary.txt",
        f"{RUN}/report.html",


onstart:
    # Another run that was just ending may have had it in the moment when this one began.
    if workflow.is_main_process:
        WORKING_FOLDER.hold(patience=30)
        begin_record(PLAN)
        try:
            print(*describe(run_space(PLAN)), sep="\n", file=sys.stderr)
        except EyasError as exc:  # the job that needs what is damaged will stop at it
            print(f"The space of the hidden states cannot be told: {exc}", file=sys.stderr)


onsuccess:
    end_record(PLAN, "succeeded")
    if os.path.isfile(f"{RUN}/summary.txt"):
        print(Path(f"{RUN}/summary.txt").read_text(encoding="utf-8"), file=sys.stderr)


onerror:
    end_record(PLAN, "failed")
    print(
        "Finished work is kept: when the cause is mended, run the same command again and it goes on from here.",
        file=sys.stderr,
    )

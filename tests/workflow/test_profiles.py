"""Every profile plans every configuration without a cluster, and asks SLURM for what the jobs need."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from eyas.cli.main import build_parser
from workflow_runs import CHECKOUT

PROFILES = ["default", "gpu8", "slurm", "kubernetes"]
CONFIGS = ["config", "kimi-k2.5", "qwen3-8b"]
PLANS = Path(__file__).parents[1] / "profile_plans.py"


# Pages whose commands are all run here or elsewhere in the tests, or say that they are not.
PAGES = [
    "docs/one-node.md",
    "docs/slurm.md",
    "docs/kubernetes.md",
    "docs/resuming.md",
    "docs/monitoring.md",
    "README.md",
]


def commands(page: str) -> list[str]:
    """The lines of a page's shell blocks."""
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    return [line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines() if line.strip()]


def planned_commands() -> dict[tuple[str, str], list[Any]]:
    """The pages' calls of Snakemake with a profile or configuration of the project, as dry runs."""
    found: dict[tuple[str, str], list[Any]] = {}
    for page in PAGES:
        for line in commands(page):
            words = shlex.split(line, comments=True)
            if ".venv/bin/snakemake" not in words or "my.yaml" in words:
                continue
            at = words.index(".venv/bin/snakemake")
            inside = [str(CHECKOUT / word) if word.startswith(("profiles/", "config/")) else word for word in words]
            if "--workflow-profile" not in words:
                inside += ["--workflow-profile", str(CHECKOUT / "profiles" / "default")]
            arguments = [word for word in inside[at + 1 :] if word != "--dry-run"]
            found[page, line] = [arguments, dict(word.split("=", 1) for word in words[:at])]
    return found


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What Snakemake says and SLURM would be asked for: by profile and configuration, and by page and command."""
    folder = tmp_path_factory.mktemp("plans")
    settings = yaml.safe_load((CHECKOUT / "config" / "kimi-k2.5.yaml").read_text())
    settings["drafters"]["eagle3"]["training"] |= {"gpu": 16, "nodes": 2}
    (folder / "nodes.yaml").write_text(yaml.safe_dump(settings))

    def case(profile: str, config: Path, **environment: str) -> list[Any]:
        # A dry run is for one core where none are named; cluster profiles name none.
        words = ["--cores", "64", "--workflow-profile", str(CHECKOUT / "profiles" / profile)]
        return [[*words, "--configfile", str(config)], environment]

    cases = {
        (profile, config): case(profile, CHECKOUT / "config" / f"{config}.yaml")
        for profile in PROFILES
        for config in CONFIGS
    }
    site = {"EYAS_SLURM_PARTITION": "h200-long", "EYAS_SLURM_ACCOUNT": "12345", "EYAS_SLURM_GRES": "gpu:h200"}
    cases["slurm", "site"] = case("slurm", CHECKOUT / "config" / "kimi-k2.5.yaml", **site)
    cases["slurm", "nodes"] = case("slurm", folder / "nodes.yaml")
    cases |= planned_commands()
    texts = {key: json.dumps(value) for key, value in cases.items()}
    each = list(dict.fromkeys(texts.values()))  # pages repeat each other
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("EYAS_", "KUBE", "SLURM"))}
    done = subprocess.run(
        [sys.executable, str(PLANS), f"[{','.join(each)}]"], cwd=folder, capture_output=True, text=True,
        timeout=800, env=outside | {"KUBECONFIG": "/nowhere"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (folder / "results").exists()
    results = dict(zip(each, json.loads(done.stdout), strict=True))
    return {key: results[text] for key, text in texts.items()}


def options(submitted: list[list[str]], rule: str) -> list[str]:
    """The options of one job of a rule; several jobs must agree."""
    found = {text for name, text in submitted if name == rule}
    assert len(found) == 1, found
    return found.pop().split()


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_dry_run_needs_no_cluster(profile: str, config: str, plans: dict) -> None:
    result = plans[profile, config]
    assert result["code"] == 0, result["text"][-3000:]
    jobs = dict(re.findall(r"^(\w[\w-]*) +(\d+)$", result["text"], re.M))
    assert jobs["train_epoch"] == "3" and jobs["all"] == "1"
    plain = plans["default", config]["text"]
    assert jobs == dict(re.findall(r"^(\w[\w-]*) +(\d+)$", plain, re.M))


def test_slurm_is_asked_for_the_gpus_of_a_job_on_one_node(plans: dict) -> None:
    submitted = plans["slurm", "kimi-k2.5"]["submitted"]
    extraction = options(submitted, "extract_rows_0-999")  # one replica: one job for all shards
    assert {"--nodes=1", "--gpus=8", "--cpus-per-task=8"} <= set(extraction)
    # 8 + 4 a thread + 16 a GPU, and the states that wait in memory, in GB; a day
    assert extraction[extraction.index("--mem") + 1] == str(1000 * (8 + 4 * 8 + 16 * 8 + 64))
    assert extraction[extraction.index("-t") + 1] == "1440"
    assert {"--nodes=1", "--gpus=8", "--cpus-per-task=16"} <= set(options(submitted, "train_epoch"))
    for rule, text in submitted:
        assert "--nodes=1" in text and "--array" not in text, rule
        if rule in ("tokenize", "write_manifest", "respond"):
            assert "gpu" not in text
    # the first attempt of jobs that load no model
    manifest = options(submitted, "write_manifest")
    assert manifest[manifest.index("--mem") + 1] == "8000" and manifest[manifest.index("-t") + 1] == "240"


def test_slurm_is_asked_for_training_over_several_nodes(plans: dict) -> None:
    result = plans["slurm", "nodes"]
    asked = options(result["submitted"], "train_epoch")
    assert {"--nodes=2", "--ntasks=2", "--gpus=16", "--gres=gpu:8", "--cpus-per-task=16"} <= set(asked)
    assert asked[asked.index("--mem") + 1] == str(1000 * (8 + 4 * 16 + 16 * 8))  # on each node
    assert not [option for option in asked if "ntasks-per-gpu" in option]
    assert "--gpu 16 --gpu-wanted 16 --processes 16 --nodes 2" in result["text"]


def test_sites_that_take_gres_only(plans: dict) -> None:
    result = plans["slurm", "site"]
    for rule in ("extract_rows_0-999", "train_epoch", "evaluate"):
        asked = options(result["submitted"], rule)
        assert "--gres=gpu:h200:8" in asked and "--gpus" not in " ".join(asked)
    assert "gres" not in " ".join(options(result["submitted"], "respond"))
    assert result["text"].count("--gpu 8 --gpu-wanted 8") == 5


def test_partition_and_account_are_variables(plans: dict) -> None:
    site = plans["slurm", "site"]
    assert site["text"].count("slurm_partition=h200-long, slurm_account=12345") == len(site["submitted"])
    assert "slurm_partition=, slurm_account=," in plans["slurm", "qwen3-8b"]["text"]


@pytest.mark.parametrize("page", PAGES[:-1])
def test_commands_of_the_documentation(page: str, plans: dict) -> None:
    """Each call of Snakemake is planned above; `eyas` and what remains must be known, or marked."""
    lines = commands(page)
    assert lines
    for line in lines:
        if "# not run here" in line:
            continue
        if (page, line) in plans:
            assert plans[page, line]["code"] == 0, f"{line}\n{plans[page, line]['text'][-2000:]}"
        elif line.startswith(".venv/bin/eyas "):  # what these do is tested in test_cli, test_status_run and test_verify
            build_parser().parse_args(shlex.split(line, comments=True)[1:])
        else:
            assert line.startswith("squeue --me "), line  # tests/integration/slurm


def test_every_profile_has_a_working_line_in_the_readme(plans: dict) -> None:
    for profile in PROFILES[1:]:
        found = [
            line for page, line in plans if page == "README.md" and f"--workflow-profile profiles/{profile} " in line
        ]
        assert found and all(plans["README.md", line]["code"] == 0 for line in found), profile
    assert plans["README.md", ".venv/bin/snakemake --cores all        # make demo"]["code"] == 0


def test_profiles_that_replace_the_default_one_keep_its_triggers() -> None:
    def read(name: str) -> dict[str, Any]:
        return yaml.safe_load((CHECKOUT / "profiles" / name / "config.yaml").read_text())

    default = read("default")
    assert sorted(path.parent.name for path in (CHECKOUT / "profiles").glob("*/config.yaml")) == sorted(PROFILES)
    for name in PROFILES:
        profile = read(name)
        for key in ("rerun-triggers", "max-checksum-file-size", "scheduler", "rerun-incomplete", "printshellcmds"):
            assert profile[key] == default[key], f"{name}: {key}"
        assert "keep-incomplete" not in profile and "slurm-array-jobs" not in profile
    assert "gpu" not in read("slurm").get("resources", {})  # it would hold for all jobs in the queue together

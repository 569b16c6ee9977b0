"""The Snakefile that the planning benchmark compares Eyas with has the same jobs and files as Eyas."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from workflow_runs import CHECKOUT


@pytest.fixture(scope="module")
def dag():
    spec = importlib.util.spec_from_file_location("benchmark_dag", CHECKOUT / "benchmarks" / "dag.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_both_plan_the_same_jobs(dag, tmp_path):
    shards = 300  # many: jobs of ranges, as in the benchmark
    dag.write_inputs(tmp_path, shards)
    assert len(dag.same_jobs(tmp_path, shards)) > 300

"""The SLURM executor goes on with what it knew when SLURM does not answer."""

from __future__ import annotations

from types import ModuleType

import pytest
from eyas.plan import remember_min_job_age


def test_min_job_age_is_remembered_through_an_outage() -> None:
    executor, answers = ModuleType("executor"), [None, 400, None, 200, None]
    executor.get_min_job_age = lambda: answers.pop(0)  # type: ignore[attr-defined]
    remember_min_job_age(executor)
    remember_min_job_age(executor)  # the Snakefile may be read twice
    assert [executor.get_min_job_age() for _ in range(5)] == [300, 400, 400, 200, 200]  # 300: slurm.conf's default


def test_an_executor_without_it_is_left_alone() -> None:
    remember_min_job_age(None)
    remember_min_job_age(ModuleType("executor"))


def test_the_installed_executor_asks_by_this_name(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = pytest.importorskip("snakemake_executor_plugin_slurm")
    monkeypatch.setattr(executor, "get_min_job_age", lambda: 300)
    remember_min_job_age(executor)
    assert executor.get_min_job_age() == 300
    assert "get_min_job_age" in executor.Executor.check_active_jobs.__code__.co_names

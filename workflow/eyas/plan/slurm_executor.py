"""What the SLURM executor forgets during an outage of SLURM."""

from __future__ import annotations

from types import ModuleType

_DEFAULT = 300  # seconds: slurm.conf(5), MinJobAge


def remember_min_job_age(executor: ModuleType | None) -> None:
    """Have Snakemake's SLURM executor (its module, if it is loaded) remember how long SLURM knows ended jobs.

    It asks for MinJobAge whenever it looks at its jobs (2.8). Without an answer it turns to `sacct` for that look: on a
    site without accounting that fails until the attempts are used up, and then it never looks at those jobs again.
    In an outage that began before its first look, SLURM's default is taken.
    """
    ask = getattr(executor, "get_min_job_age", None)
    if executor is None or ask is None or getattr(ask, "remembers", False):
        return
    known = _DEFAULT

    def remembering() -> int:
        nonlocal known
        age: int | None = ask()
        if age is not None:
            known = age
        return known

    remembering.remembers = True  # type: ignore[attr-defined]
    executor.get_min_job_age = remembering  # type: ignore[attr-defined]

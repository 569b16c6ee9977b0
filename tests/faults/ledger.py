"""The ledger of injected faults: each is tried, and survived or not.

A test takes the fixture `faults` and wraps each of its cases in `faults.tried("what is done", case)`: a case that
fails is noted and the next is tried; the test fails at its end, with every failed case.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

Ledger = dict[str, list[int]]
BEGIN, END = "<!-- faults -->", "<!-- end of faults -->"


class Faults:
    """What one test injects."""

    def __init__(self, ledger: Ledger, config: pytest.Config, name: str) -> None:
        self.ledger = ledger
        self.all = config.getoption("--faults") == "all"
        self.random = random.Random(f"{config.getoption('--faults-seed')} {name}")
        self.failures: list[str] = []

    def count(self, quick: int, full: int) -> int:
        """How many cases to try."""
        return full if self.all else quick

    def skip_unless_all(self) -> None:
        """For whole runs of Snakemake, which the quick subset has no time for."""
        if not self.all:
            pytest.skip("with --faults all")

    def record(self, fault: str, tried: int, survived: int) -> None:
        add(self.ledger, {fault: [tried, survived]})

    @contextmanager
    def tried(self, fault: str, case: object = "") -> Iterator[None]:
        """One case of a fault: survived if nothing in here fails."""
        try:
            yield
        except (Exception, pytest.fail.Exception) as exc:
            self.failures.append(f"{fault} ({case}): {type(exc).__name__}: {exc}")
            self.record(fault, 1, 0)
        else:
            self.record(fault, 1, 1)


def add(ledger: Ledger, more: Ledger) -> None:
    """Add what another process, or another case, tried."""
    for fault, (tried, survived) in more.items():
        line = ledger.setdefault(fault, [0, 0])
        line[0] += tried
        line[1] += survived


def table(ledger: Ledger) -> list[str]:
    """The ledger as lines: a Markdown table, which a terminal shows as well."""
    width = max(map(len, ledger), default=0)
    lines = [f"| {'fault':{width}} | tried | survived |", f"|-{'-' * width}-|------:|---------:|"]
    lines += [f"| {fault:{width}} | {tried:5} | {survived:8} |" for fault, (tried, survived) in ledger.items()]
    return [*lines, "", total(ledger)]


def total(ledger: Ledger) -> str:
    tried, survived = (sum(line[i] for line in ledger.values()) for i in (0, 1))
    return f"{tried} tried, {survived} survived"


def replace_table(page: Path, ledger: Ledger) -> None:
    text = page.read_text(encoding="utf-8")
    new = "\n".join([BEGIN, *table(ledger), END])
    page.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: new, text, flags=re.DOTALL), encoding="utf-8")

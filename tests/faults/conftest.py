"""The fixture `faults`; and the table of all faults, at the very end."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from ledger import Faults, Ledger, add, replace_table, table

LEDGER = pytest.StashKey[Ledger]()


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> Faults:
    ledger = request.config.stash.setdefault(LEDGER, {})
    return Faults(ledger, request.config, request.node.name)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    result = yield
    faults = pyfuncitem.funcargs.get("faults")
    if isinstance(faults, Faults) and faults.failures:
        pytest.fail("\n\n".join([f"{len(faults.failures)} not survived", *faults.failures]), pytrace=False)
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist hands its ledger to the process that prints the table."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["faults"] = session.config.stash.get(LEDGER, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    add(node.config.stash.setdefault(LEDGER, {}), getattr(node, "workeroutput", {}).get("faults", {}))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Below pytest's own last line."""
    ledger = config.stash.get(LEDGER, {})
    if not ledger or hasattr(config, "workeroutput"):
        return
    print("", *table(ledger), sep="\n")
    if page := config.getoption("--faults-page"):
        replace_table(page, ledger)

"""Fixtures of the browser tests: one Chromium for all of them, and a report with all that a report can have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from browser import Browser, missing_parts, start


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    if missing := missing_parts():
        pytest.skip(f"{', '.join(missing)} not installed: make test-browser")
    from selenium.common.exceptions import WebDriverException

    for left in (2, 1, 0):
        try:
            driver = start(tmp_path_factory.mktemp("profile"))
            break
        except WebDriverException:  # on a machine that is busy it may give up before Chromium is there
            if not left:
                raise
    yield driver
    driver.quit()


@pytest.fixture
def browser(driver: object) -> Browser:
    return Browser(driver)


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a sweep with many shards, a stall, and names that try to be markup."""
    from eyas.report import page
    from eyas.shards import write_json
    from report_runs import plan_of, rules_of, shard_facts, write_run

    plan = plan_of(tmp_path_factory.mktemp("browser") / "results", drafters=3, shards=45)
    run = write_run(plan, EVIL)
    slow = shard_facts(7)
    slow["timeline"]["longest_pause"] = [20.0, 400.0]
    write_json(run / "hidden_states" / f"{plan.shard_names[7]}.json", slow)
    page.write_report(plan, rules_of(plan), run / "report.html")
    return run / "report.html"


EVIL = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>\u2028\"&'"

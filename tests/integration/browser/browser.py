"""A headless Chromium that tests can drive, and that tells what it asked for and complained of."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 120.0  # seconds; a condition that holds ends the wait at once
DESKTOP, PHONE = (1280, 900), (390, 844)


def missing_parts() -> list[str]:
    """What is not installed here."""
    found = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    try:
        import selenium  # noqa: F401
    except ImportError:
        found.append("selenium")
    return found


def start(profile: Path) -> Any:
    """A Chromium with an empty profile in `profile`, which fetches nothing of its own."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (
        "headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-quic", "no-first-run",
        "disable-background-networking", "disable-component-update", "disable-sync", f"user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.set_page_load_timeout(300)
    driver.set_script_timeout(300)
    return driver


class Browser:
    """One window. Waits are for conditions; they end with an error after `PATIENCE` seconds."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def command(self, name: str, **values: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, values)

    def wait(self, what: str, condition: Callable[[], Any]) -> Any:
        end = time.monotonic() + PATIENCE
        while not (value := condition()):
            assert time.monotonic() < end, f"waited in vain: {what}"
            time.sleep(0.05)
        return value

    def look(self, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> None:
        """Set the window's size in CSS pixels (a phone's where it is narrow) and the reader's colour scheme."""
        width, height = size
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, page: Path) -> None:
        """Open a file and wait until its plots are drawn, or say why they are not."""
        self.complaints(), self.requests()  # of earlier pages
        self.driver.get(page.resolve().as_uri())
        self.wait(
            "plots are drawn or say why not",
            lambda: self.run(
                "return [...document.querySelectorAll('.plot')].every(plot => plot.querySelector('svg') || plot.textContent)"
            ),
        )

    def complaints(self) -> list[str]:
        """What came up in the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the last call, but for data in the page and the browser's own pages."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith(("data:", "chrome:"))]

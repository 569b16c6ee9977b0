"""Install what the browser tests need and pip does not bring: Chromium and its driver, from Debian's packages.

    python tests/integration/browser/set_up.py

Needs root (or sudo without a password) where they are not there yet; nothing is done where they are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PROGRAMS = ("chromium", "chromedriver")
PACKAGES = ("chromium", "chromium-driver")


def missing() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


def main() -> None:
    if not missing():
        return
    by_hand = f"install {' and '.join(missing())} by hand"
    if shutil.which("apt-get") is None:
        sys.exit(f"There is no apt-get here: {by_hand}.")
    apt = ["apt-get", "-o", "Acquire::Retries=5", "-o", "DPkg::Lock::Timeout=300", "--quiet=2"]
    if os.geteuid() != 0:
        if shutil.which("sudo") is None:
            sys.exit(f"apt-get needs root, and there is no sudo: {by_hand}.")
        apt = ["sudo", "--non-interactive", *apt]
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    install = [*apt, "install", "--yes", "--no-install-recommends", *PACKAGES]
    # The lists may be old, and then an update is needed; where they are not, it would only take time.
    if subprocess.run(install).returncode and (
        subprocess.run([*apt, "update"]).returncode or subprocess.run(install).returncode
    ):
        sys.exit(f"apt-get could not install {' and '.join(PACKAGES)}: {by_hand}.")
    if missing():
        sys.exit(f"{' and '.join(missing())} is still missing after apt-get: {by_hand}.")


if __name__ == "__main__":
    main()

"""Draw docs/rulegraph.svg: the rules of the default configuration and what feeds what."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
PICTURE = CHECKOUT / "docs" / "rulegraph.svg"


def run(command, text=None):
    """A command's standard output; its errors end this script."""
    result = subprocess.run(command, input=text, cwd=CHECKOUT, capture_output=True, encoding="utf-8")
    if result.returncode:
        sys.exit(f"{command[0]} failed, {PICTURE.name} is left as it was:\n{result.stderr.strip()}")
    return result.stdout


def tidy(printed):
    """The graph among what Snakemake printed, its edges sorted (they come in another order each time)."""
    graph = re.search(r"^digraph .*?^}", printed, re.DOTALL | re.MULTILINE)
    if not graph:
        sys.exit(f"snakemake printed no graph:\n{printed.strip()}")
    lines = graph[0].splitlines()[:-1]
    edges = sorted(tuple(map(int, line.split("->"))) for line in lines if "->" in line)
    return "\n".join([*(line for line in lines if "->" not in line), *(f"{a} -> {b}" for a, b in edges), "}"])


def main():
    if not shutil.which("dot"):
        sys.exit("Graphviz's `dot` is missing: apt-get install graphviz (or: conda install -c conda-forge graphviz)")
    # --forceall: the picture does not depend on what has been built here; --dry-run: nothing is touched.
    graph = run([sys.executable, "-m", "snakemake", "--dry-run", "--forceall", "--rulegraph"])
    picture = run(["dot", "-Tsvg"], tidy(graph))
    picture = re.sub(r"<!--.*?-->\n?", "", picture, flags=re.DOTALL)  # graphviz's version
    PICTURE.write_text(picture.replace('"sans"', '"sans-serif"'), encoding="utf-8")  # a name that browsers know


if __name__ == "__main__":
    main()

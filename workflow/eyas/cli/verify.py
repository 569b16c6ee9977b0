"""Read a run again: every checksum, every count, and that the stages fit each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eyas.conversations import read_rows
from eyas.errors import EyasError
from eyas.extraction.layout import shard_layout
from eyas.plan.export import SERVERS
from eyas.shards import Shard, check_page, checksum, map_arrays, read_header, read_json, shards_of
from eyas.tokenization import read_tokens
from eyas.vocabulary import read_map


class _Verifier:
    def __init__(self, run: Path) -> None:
        self.run = run
        self.problems: list[str] = []
        self.files = 0
        self.bytes = 0

    def problem(self, path: Path, what: str) -> None:
        self.problems.append(f"{path}: {what}; delete it and run `snakemake {path}` to rebuild it")

    def attempt(self, check: Callable[..., object], *what: Any) -> None:
        """Run a check; what it cannot read is one more problem."""
        try:
            check(*what)
        except EyasError as exc:
            self.problems.append(str(exc))
        except (KeyError, TypeError, AttributeError, ValueError) as exc:
            self.problems.append(
                f"{self.run}: {check.__name__} cannot be checked, an entry is missing or wrong: {exc!r}"
            )

    def file(self, path: Path, entry: dict[str, Any]) -> bool:
        """Size and checksum of one file against what was recorded."""
        self.files += 1
        if not path.is_file():
            self.problem(path, "missing")
            return False
        size = path.stat().st_size
        self.bytes += size
        if size != entry["bytes"]:
            self.problem(path, f"{size} bytes, {entry['bytes']} were written")
        elif (found := checksum(path)) != entry["checksum"]:
            self.problem(path, f"checksum {found}, {entry['checksum']} was written")
        else:
            return True
        return False

    def sealed(self, path: Path, what: str) -> dict[str, Any]:
        """Read a sealed file, which holds a digest of itself."""
        self.files += 1
        facts: dict[str, Any] = read_json(path, what, sealed=True)
        return facts

    def sidecar(self, path: Path, what: str = "sidecar") -> dict[str, Any]:
        """Read a sealed file and check the files it describes."""
        facts = self.sealed(path, what)
        for name, entry in facts["files"].items():
            self.file(path.parent / name, entry)
        return facts

    def expect(self, path: Path, what: str, found: Any, wanted: Any) -> None:
        if found != wanted:
            self.problem(path, f"{what} {found}, expected {wanted}")

    def prompts(self) -> tuple[int, int]:
        index = self.run / "prompts" / "index.json"
        facts = self.sidecar(index, "index of the prompts")
        return int(facts["rows"]), int(facts["shard_rows"])

    def whole_run(self) -> None:
        """Files of the whole run that belong to no shard and no drafter."""
        for name, what in (("tokens/statistics.json", "statistics file"), ("tokens/totals.json", "file of totals")):
            self.attempt(self.sealed, self.run / name, what)
        self.attempt(self.sidecar, self.run / "summary.json", "summary")
        for stage in ("conversations", "tokens", "hidden_states"):  # where there are many shards
            for path in sorted((self.run / stage / "ranges").glob("*.json")):
                self.attempt(self.sealed, path, "record of a range of shards")
        page = self.run / "report.html"
        if page.is_file():
            self.files += 1
            self.attempt(check_page, page)
        else:
            self.problems.append(f"{page}: missing; run snakemake to go on")

    def conversations(self, shard: Shard) -> None:
        path = self.run / "conversations" / f"{shard.name}.jsonl"
        facts = self.sidecar(path.with_suffix(".json"))
        rows = read_rows(path)
        self.expect(path, "rows", [row.row for row in rows], list(range(shard.start, shard.end)))
        self.expect(path, "usable rows", sum(row.skipped is None for row in rows), facts["rows"])

    def tokens(self, shard: Shard) -> None:
        path = self.run / "tokens" / f"{shard.name}.safetensors"
        facts = self.sidecar(path.with_suffix(".json"))
        tokens = read_tokens(path)
        rows = set(map(int, tokens.row_ids))  # a row may come to several sequences
        self.expect(path, "rows", len(rows), facts["rows"])
        self.expect(path, "sequences", len(tokens), facts["sequences"])
        self.expect(path, "tokens", len(tokens.input_ids), facts["tokens"])
        self.expect(path, "supervised tokens", int(tokens.loss_mask.sum()), facts["supervised_tokens"])
        numbers = sorted([*rows, *(skip["row"] for skip in facts["skipped"])])
        self.expect(path, "rows and skipped rows", numbers, list(range(shard.start, shard.end)))

    def states(self, shard: Shard, entry: dict[str, Any]) -> None:
        path = self.run / "hidden_states" / f"{shard.name}.safetensors"
        facts = self.sidecar(path.with_suffix(".json"))
        for key in ("rows", "sequences", "tokens", "bytes", "checksum", "tokens_checksum"):
            self.expect(path, f"{key} in its sidecar", facts[key], entry[key])
        specs, _ = read_header(path)
        layout = shard_layout(entry["tokens"], entry["sequences"], facts["hidden_size"], facts["dtype"])
        self.expect(path, "tensors", sorted(specs), sorted(layout.tensors))
        for name, spec in layout.tensors.items():
            if name in specs:
                stored = (specs[name].dtype, specs[name].shape)
                self.expect(path, f"{name} is", stored, (spec.dtype, spec.shape))
        tokens = read_json(self.run / "tokens" / f"{shard.name}.json", "tokens sidecar")
        recorded = tokens["files"][f"{shard.name}.safetensors"]["checksum"]
        self.expect(path, "made from tokens with checksum", facts["tokens_checksum"], recorded)
        shard_tokens = read_tokens(self.run / "tokens" / path.name)
        for name, found in map_arrays(path, ("input_ids", "offsets", "row_ids")).items():
            agree = np.array_equal(found, getattr(shard_tokens, name))
            self.expect(path, f"{name} agree with the tokens shard:", agree, True)

    def manifest(self, shards: list[Shard]) -> dict[str, dict[str, Any]]:
        path = self.run / "hidden_states" / "data_config.json"
        facts = self.sealed(path, "manifest")
        entries = {entry["file"]: entry for entry in facts["shards"]}
        self.expect(path, "shards", list(entries), [f"{shard.name}.safetensors" for shard in shards])
        for key in ("rows", "sequences", "tokens", "bytes"):
            self.expect(path, f"total {key}", facts["totals"][key], sum(e[key] for e in entries.values()))
        return entries

    def vocabulary(self, path: Path) -> None:
        facts = self.sidecar(path)
        mapping = read_map(path.with_suffix(".safetensors"))
        self.expect(path, "draft vocabulary", len(mapping.d2t), facts["draft_vocab_size"])
        self.expect(path, "target vocabulary", len(mapping.t2d), facts["vocab_size"])

    def checkpoint(self, epoch: Path) -> None:
        facts = self.sidecar(epoch / "trainer_state.json", "trainer state")
        self.expect(epoch / "trainer_state.json", "epoch", facts["epoch"], int(epoch.name.split("_")[1]))

    def drafter(self, folder: Path) -> None:
        epochs = sorted(folder.glob("epoch_*"), key=lambda p: int(p.name.split("_")[1]))
        if not epochs:
            self.problems.append(f"{folder}: no checkpoint; run snakemake to go on")
        for epoch in epochs:
            self.attempt(self.checkpoint, epoch)
        exports = [f"export/{server}/{name}.json" for server in SERVERS for name in ("export", "provenance")]
        for sidecar in (folder / name for name in ("best/selection.json", *exports)):
            self.attempt(self.sidecar, sidecar)
        self.attempt(self.sealed, folder / "evaluation.json", "evaluation")


def find_run(run: str, results: Path) -> Path:
    """The folder of a run by its name or its folder; raises EyasError."""
    for folder in (results / run, Path(run)):
        if (folder / "prompts").is_dir():
            return folder
    raise EyasError(f"no run {run!r} in {results}, and no such run folder; runs lie in RESULTS/NAME after snakemake")


def verify_run(run: str, results: Path = Path("results")) -> dict[str, Any]:
    """Verify a run by name or folder: `{run, files, bytes, problems}`. Raises EyasError when there is none."""
    verifier = _Verifier(find_run(run, results))
    try:
        rows, shard_rows = verifier.prompts()
    except EyasError as exc:
        return {"run": str(verifier.run), "files": 0, "bytes": 0, "problems": [str(exc)]}
    except (KeyError, TypeError, AttributeError, ValueError):
        return {
            "run": str(verifier.run),
            "files": 0,
            "bytes": 0,
            "problems": [f"{verifier.run}/prompts/index.json: damaged"],
        }
    shards = shards_of(rows, shard_rows)
    entries: dict[str, dict[str, Any]] = {}

    def manifest() -> None:
        entries.update(verifier.manifest(shards))

    verifier.whole_run()
    verifier.attempt(manifest)
    maps = sorted((verifier.run / "vocab_map").glob("*.json"))
    drafters = sorted(p for p in (verifier.run / "drafters").glob("*") if p.is_dir() and not p.name.startswith("."))
    if not maps:
        verifier.problems.append(f"{verifier.run / 'vocab_map'}: no vocabulary map; run snakemake to go on")
    if not drafters:
        verifier.problems.append(f"{verifier.run / 'drafters'}: no drafter; run snakemake to go on")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for shard in progress.track(shards, description=f"Verifying {verifier.run}"):
            entry = entries.get(f"{shard.name}.safetensors")
            verifier.attempt(verifier.conversations, shard)
            verifier.attempt(verifier.tokens, shard)
            if entry:
                verifier.attempt(verifier.states, shard, entry)
    for path in maps:
        verifier.attempt(verifier.vocabulary, path)
    for folder in drafters:
        verifier.attempt(verifier.drafter, folder)
    problems = list(dict.fromkeys(verifier.problems))
    return {"run": str(verifier.run), "files": verifier.files, "bytes": verifier.bytes, "problems": problems}


def show(result: dict[str, Any]) -> None:
    """Print the outcome for people."""
    for problem in result["problems"]:
        print(problem)
    count = len(result["problems"])
    found = f"{count} problem{'s' if count != 1 else ''} found" if count else "all is well"
    print(f"{result['run']}: {result['files']} files, {result['bytes']:,} bytes read; {found}.")

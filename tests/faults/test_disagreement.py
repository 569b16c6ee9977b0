"""Parts of two runs put together: refused, with both values named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eyas.cli.verify import verify_run
from ledger import Faults
from workflow_runs import Workdir

GOAL = "results/tiny/drafters/small/epoch_2/model.safetensors"
Change = Callable[[dict[str, Any]], None]


def put(key: str, value: Any) -> Change:
    def change(values: dict[str, Any]) -> None:
        *outer, last = key.split(".")
        for name in outer:
            values = values[name]
        values[last] = value

    return change


# what differs: (change of the manifest, what the message names: the manifest's, then the other's)
MANIFESTS: dict[str, tuple[Change, list[str]]] = {
    "another target": (put("target.config_hash", "sha256:" + "0" * 64), ["0" * 64, "sha256:"]),
    "another revision": (put("target.revision", "v2"), ["v2", "None"]),
    "another dtype of the target": (put("target.dtype", "float16"), ["float16", "float32"]),
    "a target that is missing": (put("target", None), ["target is missing or wrong"]),
    "another tokenizer": (put("tokenizer_hash", "xxh3_128:" + "0" * 32), ["0" * 32, "xxh3_128:"]),
    "another chat template": (put("chat_template_hash", "xxh3_128:" + "1" * 32), ["1" * 32, "xxh3_128:"]),
    "other layers": (put("layers", [0, 1, 2]), ["[0, 1, 2]", "[0, 2, 3]"]),
    "another dtype": (put("dtype", "float16"), ["float16", "bfloat16"]),
    "another width": (put("hidden_size", 128), ["128", "64"]),
    "another format": (put("format_version", 99), ["99", "3"]),
    "more rows": (put("totals.rows", 41), ["(40, not 41)"]),
    "more tokens": (put("totals.tokens", 1), ["tokens", "not 1)"]),
}


def manifest_of(work: Workdir) -> Path:
    return work.run_folder / "hidden_states" / "data_config.json"


@pytest.mark.timeout(1800)
def test_a_manifest_that_does_not_fit(faults: Faults, finished: Workdir) -> None:
    """The trainer refuses it, even where its times say that nothing changed."""
    cases = MANIFESTS if faults.all else {key: MANIFESTS[key] for key in faults.random.sample(sorted(MANIFESTS), 2)}
    path = manifest_of(finished)
    whole = path.read_text()
    for what, (change, words) in cases.items():
        values = json.loads(whole)
        values.pop("digest")
        change(values)
        path.write_text(json.dumps(values))
        shutil.rmtree(finished.run_folder / "drafters" / "small" / "epoch_2", ignore_errors=True)
        with faults.tried(f"a manifest of {what}"):
            # `--touch`ed by nobody: Snakemake takes the manifest for newer, the trainer looks into it
            result = finished.snakemake("--", GOAL)
            assert result.code == 1 and "Traceback" not in result.text, result.text[-3000:]
            assert all(word in result.text for word in words) and str(path.name) in result.text, result.text[-3000:]
        path.write_text(whole)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["tokens", "hidden_states"])
def test_a_shard_of_another_run(kind: str, faults: Faults, finished: Workdir, tmp_path: Path) -> None:
    """Swapped with its neighbour's: whole, of the same size, but not what belongs there."""
    folder = finished.run_folder / kind
    first, second = folder / "rows_0-20.safetensors", folder / "rows_20-40.safetensors"
    kept = tmp_path / "kept"
    first.rename(kept)
    second.rename(first)
    kept.rename(second)
    with faults.tried("a shard swapped with another: eyas verify", kind):
        problems = verify_run("tiny", finished.path / "results")["problems"]
        assert any(str(first) in problem for problem in problems) and any(str(second) in p for p in problems)
    shutil.rmtree(finished.run_folder / "drafters" / "small" / "epoch_2")
    with faults.tried("a shard swapped with another: training", kind):
        result = finished.snakemake("--", GOAL)
        assert result.code == 1 and "rows_" in result.text and "fault of Eyas" not in result.text, result.text[-3000:]

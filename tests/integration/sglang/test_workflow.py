"""Real Snakemake over real SGLang servers: two replicas, the manifest, a shard that comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from eyas.target.tokenizer import TargetReference
from safetensors.torch import load_file
from servers import ARGUMENTS, expected_states, sglang_settings
from workflow_runs import Workdir, new_workdir

STATES = [
    f"results/tiny/hidden_states/{n}" for n in ("data_config.json", "rows_0-20.safetensors", "rows_20-40.safetensors")
]


def test_two_replicas(python: str, tiny_target: Path, tmp_path: Path, dump_folder: Path) -> None:
    work: Workdir = new_workdir(tmp_path / "work", tiny_target)
    settings: dict[str, Any] = sglang_settings(python, dump_folder, extra_args=list(ARGUMENTS), concurrency=4)
    work.settings["extraction"] = {
        "engine": "sglang", "layers": [0, 1, 2], "dtype": "float32", "replicas": 2, "sglang": settings,
    }  # fmt: skip
    work.run(*STATES)
    target = TargetReference(str(tiny_target))
    for name in ("rows_0-20", "rows_20-40"):
        found = load_file(work.run_folder / "hidden_states" / f"{name}.safetensors")
        tokens = load_file(work.run_folder / "tokens" / f"{name}.safetensors")
        ends = tokens["offsets"].tolist()
        rows = [(0, tokens["input_ids"][a:b].numpy(), None) for a, b in zip(ends[:-1], ends[1:], strict=True)]
        aux, last, best = expected_states(target, [0, 1, 2], rows)
        torch.testing.assert_close(found["aux_hidden_states"], aux, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found["last_hidden_state"], last, rtol=1e-4, atol=1e-4)
        assert torch.equal(found["target_token"].long(), best)
        log = (work.run_folder / "logs" / "hidden_states" / f"{name}.server.log").read_text()
        assert log.count("==== start") == 1
    assert work.dry_run(*STATES).nothing_to_do
    assert list(dump_folder.iterdir()) == []
    assert "'--api-key'" not in log and "api_key': '***'" in log

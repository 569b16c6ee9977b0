"""`eyas plan`: the bytes of a run's hidden states, compared with files that are there and with `du`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from eyas.cli.main import main
from eyas.errors import EyasError
from eyas.extraction import space
from eyas.extraction.layout import shard_layout
from eyas.extraction.space import Need, amount, bytes_a_token, describe, plan_space, require_space, shard_bytes
from eyas.plan import plan_run
from eyas.shards import TensorFileWriter, shards_of, write_json
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

WIDTH = 64


def write_token_sidecars(run: Path, rows: int, shard_rows: int, tokens: int = 50, skipped: int = 0) -> None:
    """Sidecars as tokenize_shard writes them, of `tokens` tokens a row."""
    for shard in shards_of(rows, shard_rows):
        listed = [{"row": shard.start + i, "source": "set", "reason": "too long: 9999 tokens"} for i in range(skipped)]
        used = len(shard) - skipped
        facts = {
            "rows": used, "sequences": used, "tokens": tokens * used, "skipped": listed, "sources": ["set"],
            "source_of_sequence": [0] * used,
        }  # fmt: skip
        (run / "tokens").mkdir(parents=True, exist_ok=True)
        (run / "tokens" / f"{shard.name}.json").write_text(json.dumps(facts, indent=1))


@given(
    tokens=st.integers(0, 5000), sequences=st.integers(0, 200), width=st.integers(1, 40),
    dtype=st.sampled_from(["bfloat16", "float16", "float32", "fp8_e4m3"]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_sizes_are_those_of_real_files(
    tmp_path_factory: pytest.TempPathFactory, tokens: int, sequences: int, width: int, dtype: str
) -> None:
    file = tmp_path_factory.mktemp("sizes") / "x.safetensors"
    with TensorFileWriter(file, shard_layout(tokens, sequences, width, dtype)):
        pass
    assert shard_bytes(tokens, sequences, width, dtype) == file.stat().st_size
    if tokens and sequences:
        with safe_open(file, "np") as opened:  # the reference reader takes it as whole
            assert opened.get_slice("aux_hidden_states").get_shape() == [tokens, 3 * width]
            assert opened.get_slice("last_hidden_state").get_shape() == [tokens, width]


@pytest.mark.parametrize("dtype, item, more", [("bfloat16", 2, 8), ("float32", 4, 8), ("fp8_e4m3", 1, 24)])
def test_bytes_a_token(dtype: str, item: int, more: int) -> None:
    """Four vectors, token id and argmax, and for fp8 four scales."""
    assert bytes_a_token(7168, dtype) == item * 4 * 7168 + more


def test_total_is_what_du_says_after_a_run(tmp_path: Path) -> None:
    run = tmp_path / "real"
    write_token_sidecars(run, 60, 20, tokens=700, skipped=4)
    plan = plan_space(run, 60, 20, 576, "bfloat16")
    assert plan.exact and plan.tokens == 3 * 16 * 700 and plan.shards_known == 3
    assert plan.bytes_left == pytest.approx(plan.total_bytes, rel=0.001)
    states = run / "hidden_states"
    states.mkdir()
    for shard in shards_of(60, 20):
        with TensorFileWriter(states / f"{shard.name}.safetensors", shard_layout(16 * 700, 16, 576, "bfloat16")):
            pass
        facts = json.loads((run / "tokens" / f"{shard.name}.json").read_text())
        write_json(states / f"{shard.name}.json", {"filler": "x" * 850, "skipped": facts["skipped"]})
    write_json(states / "data_config.json", {"filler": "x" * 1400})
    for options in (["-B1"], ["-B1", "--apparent-size"]):
        measured = int(subprocess.check_output(["du", "-s", *options, states]).split()[0])
        assert plan.total_bytes == pytest.approx(measured, rel=0.001), options
    assert plan.disk_bytes == pytest.approx(plan.total_bytes, rel=0.001)
    assert plan_space(run, 60, 20, 576, "bfloat16").bytes_left == 0


def test_what_is_allocated_needs_nothing_more(tmp_path: Path) -> None:
    run = tmp_path / "r"
    write_token_sidecars(run, 40, 10)
    whole = shard_bytes(500, 10, WIDTH, "bfloat16")
    states = run / "hidden_states"
    staged = states / ".staging" / "rows_10-20" / "rows_10-20.safetensors"
    staged.parent.mkdir(parents=True)
    (states / "rows_0-10.safetensors").write_bytes(b"x" * whole)
    staged.write_bytes(b"x" * whole)
    (states / "rows_20-30.safetensors").write_bytes(b"x" * (whole - 20_000))  # of other settings: written over
    blocks = -(-whole // 4096) * 4096
    assert plan_space(run, 40, 10, WIDTH, "bfloat16").bytes_left == blocks + 20_480
    (states / "rows_20-30.safetensors").write_bytes(b"x" * (whole + 1))  # larger: it leaves room
    assert plan_space(run, 40, 10, WIDTH, "bfloat16").bytes_left == blocks


def test_unknown_shards_are_scaled_by_rows_and_marked(tmp_path: Path) -> None:
    run = tmp_path / "r"
    write_token_sidecars(run, 95, 10)
    whole = plan_space(run, 95, 10, WIDTH, "bfloat16")
    for name in ("rows_30-40", "rows_40-50"):
        (run / "tokens" / f"{name}.json").unlink()
    plan = plan_space(run, 95, 10, WIDTH, "bfloat16")
    assert (plan.exact, plan.shards, plan.shards_known, plan.tokens) == (False, 10, 8, 95 * 50)
    assert plan.state_bytes == pytest.approx(whole.state_bytes, rel=0.01)
    assert plan.bytes_left == pytest.approx(whole.bytes_left, rel=0.1)
    text = " ".join(describe(plan))
    assert "8 of 10 shards" in text and "about 4,750 tokens" in text
    assert "about" not in " ".join(describe(whole))


def test_nothing_is_known_yet(tmp_path: Path) -> None:
    plan = plan_space(tmp_path / "r", 95, 10, WIDTH, "bfloat16")
    assert (plan.exact, plan.tokens, plan.total_bytes, plan.bytes_left) == (False, None, None, None)
    assert plan.fits and "tokens not counted yet" in describe(plan)[0]
    require_space(plan)
    write_token_sidecars(tmp_path / "r", 95, 10)
    plan = plan_space(tmp_path / "r", 95, 10, None, "bfloat16")  # a hub model that is not there yet
    assert plan.tokens == 95 * 50 and plan.total_bytes is None and "width is not known" in describe(plan)[0]


def test_a_full_disk_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "r"
    write_token_sidecars(run, 40, 10)
    plan = plan_space(run, 40, 10, WIDTH, "bfloat16")
    require_space(plan)
    real = space.os.statvfs

    def small(path: Path) -> object:
        usage = real(path)
        return type("Usage", (), {"f_bavail": plan.bytes_left // 4096 - 3, "f_frsize": 4096, "f_bsize": usage.f_bsize})

    monkeypatch.setattr(space.os, "statvfs", small)
    plan = plan_space(run, 40, 10, WIDTH, "bfloat16")
    assert not plan.fits and plan.file_systems[0].short_bytes == 3 * 4096
    assert "SHORT BY 12.3 kB" in describe(plan)[-1]
    with pytest.raises(EyasError) as error:
        require_space(plan)
    text = str(error.value)
    assert f"{plan.bytes_left:,}" in text and "short by 12,288" in text and str(run / "hidden_states") in text
    assert "fp8_e4m3" in text and "results" in text


def test_needs_on_one_file_system_add_up_and_others_stand_alone(tmp_path: Path) -> None:
    run = tmp_path / "r"
    write_token_sidecars(run, 10, 10)
    more = [Need("dumps", Path("/proc/self"), 7), Need("exports", tmp_path / "not" / "there", 1000)]
    plan = plan_space(run, 10, 10, WIDTH, "bfloat16", more)
    first, other = plan.file_systems
    assert first.purposes == ("hidden states", "exports") and first.needed_bytes == plan.bytes_left + 1000
    assert (other.purposes, other.needed_bytes, other.free_bytes, other.short_bytes) == (("dumps",), 7, 0, 7)
    with pytest.raises(EyasError, match="dumps need 7 bytes .* in /proc/self"):
        require_space(plan)


def test_damaged_sidecar_is_named(tmp_path: Path) -> None:
    run = tmp_path / "r"
    write_token_sidecars(run, 10, 10)
    (run / "tokens" / "rows_0-10.json").write_text('{"tokens": "many"}')
    with pytest.raises(EyasError, match="rows_0-10.json: this tokens sidecar"):
        plan_space(run, 10, 10, WIDTH, "bfloat16")


def test_a_thousand_shards_in_a_moment(tmp_path: Path) -> None:
    run = tmp_path / "r"
    write_token_sidecars(run, 500_000, 500, skipped=20)
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        plan_space(run, 500_000, 500, 7168, "bfloat16")
        best = min(best, time.process_time() - started)
    assert best < 1  # 0.1 on an idle machine; listing folders or worse would take many times that


def test_needs_no_torch() -> None:
    code = (
        "import sys, eyas.extraction.space, eyas.plan; "
        "print([m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


@pytest.mark.parametrize(
    "nbytes, text", [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (828e9, "828.0 GB"), (999.96e9, "1.0 TB")]
)
def test_amounts(nbytes: float, text: str) -> None:
    assert amount(nbytes) == text


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration of 40 rows, prompts and a target that is only a config.json."""
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "target"
    target.mkdir()
    write_json(
        target / "config.json",
        {"vocab_size": 500, "num_hidden_layers": 6, "hidden_size": WIDTH, "intermediate_size": 8, "head_dim": 4},
    )
    (target / "tokenizer.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 40)
    settings = {
        "name": "mine", "target": {"path": "target"}, "data": {"prompts": ["prompts.jsonl"], "shard_rows": 10},
        "drafters": {"small": {"draft_vocab_size": 100}},
    }  # fmt: skip
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def test_command(configured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_token_sidecars(configured / "results" / "mine", 40, 10)
    assert main(["plan", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["run"], facts["rows"], facts["shards"], facts["tokens"], facts["exact"]) == (
        "mine",
        40,
        4,
        2000,
        True,
    )
    assert facts["bytes_per_token"] == 8 * WIDTH + 8 and facts["fits"]
    assert facts["state_bytes"] == 4 * shard_bytes(500, 10, WIDTH, "bfloat16")
    assert main(["plan", "mine", "--results", "elsewhere"]) == 0
    assert "elsewhere/mine" in capsys.readouterr().out


def test_command_for_a_run_that_was_started(configured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from eyas.plan import begin_record

    values = yaml.safe_load((configured / "config" / "config.yaml").read_text())
    begin_record(plan_run(values | {"name": "other"}, "test"))
    write_token_sidecars(configured / "results" / "other", 40, 10)
    for name in ("other", "results/other"):
        assert main(["plan", name, "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["run"], facts["tokens"], facts["hidden_size"]) == ("other", 2000, WIDTH)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["plan", "nothing"], "describes the run 'mine', not 'nothing'"),
        (["plan", "--configfile", "none.yaml"], "none.yaml: cannot be read"),
        (["plan", "other", "--configfile", "config/config.yaml"], "describes the run 'mine', not 'other'"),
    ],
)
def test_command_refuses(
    configured: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error

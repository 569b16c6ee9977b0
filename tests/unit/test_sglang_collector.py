"""The SGLang engine's collector against a stand-in for the server: what it takes, what it refuses, what it leaves."""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_reference import random_rows, read_json_file, save_llama, write_tokens
from eyas.config.sglang import Sglang, sglang_problem
from eyas.errors import EyasError
from eyas.extraction.engines.base import FailedRow
from eyas.extraction.engines.sglang import collector as collector_module
from eyas.extraction.engines.sglang.dumps import DumpFolder, clean
from eyas.extraction.engines.sglang.engine import SglangEngine
from eyas.extraction.shard import extract_shard
from eyas.jobs import servers
from eyas.target.tokenizer import TargetReference
from fake_sglang import FakeSglang, States, made_up_states
from safetensors.torch import load_file

LENGTHS = [5, 1, 17, 9, 4, 3, 12]  # none as long as another, nor as the probe
PROBE = 16
LAYERS = [0, 1, 3]
NAMES = ("aux_hidden_states", "last_hidden_state")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetReference:
    return save_llama(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="module")
def states(target: TargetReference) -> States:
    return made_up_states(load_file(Path(target.path) / "model.safetensors")["lm_head.weight"].numpy())


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries are short here."""
    monkeypatch.setattr(collector_module.random, "uniform", lambda low, high: 0.02)
    monkeypatch.setattr(servers, "_POLL_SECONDS", 0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "dumps"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def serve(folder: Path, states: States) -> Iterator[Callable[..., FakeSglang]]:
    with ExitStack() as stack:
        yield lambda **changes: stack.enter_context(
            FakeSglang(folder, **({"states": states, "layers": LAYERS} | changes))
        )


def options(fake: FakeSglang, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"url": fake.url, "dump_folder": str(fake.folder), "concurrency": 4, "timeout_seconds": 20}
    return Sglang(**(values | changes)).options()


def extract(
    target: TargetReference, fake: FakeSglang, place: Path, lengths: list[int], failed: int = 0, **changes: Any
):
    """The shard's file, and nothing left among the dumps."""
    tokens = write_tokens(place / "tokens" / f"rows_0-{len(lengths)}.safetensors", random_rows(lengths))
    output = place / "hidden_states" / tokens.name
    engine = SglangEngine(target, LAYERS, options(fake, **changes), None, 0, place / "server.log")
    try:
        extract_shard(tokens, output, target, LAYERS, "float32", engine=engine, max_failed_rows=failed)
    finally:
        engine.close()
        assert [path.name for path in fake.folder.iterdir() if path.name != "elsewhere"] == []
    return output


def require_states(output: Path, fake: FakeSglang, target: TargetReference, lengths: list[int], without: tuple = ()):
    """Every row's states are what the server wrote for it, and its tokens the head's best ones."""
    found = load_file(output)
    head = load_file(Path(target.path) / "model.safetensors")["lm_head.weight"]
    for index, (_, ids, _) in enumerate(random_rows(lengths)):
        begin, end = found["offsets"][index : index + 2].tolist()
        aux, last, _ = fake.states(ids.tolist())
        if index in without:
            aux, last = np.zeros_like(aux), np.zeros_like(last)
        else:
            best = (torch.from_numpy(last) @ head.T).argmax(-1)
            assert torch.equal(found["target_token"][begin:end].long(), best)
        assert np.array_equal(found["aux_hidden_states"][begin:end].numpy(), aux)
        assert np.array_equal(found["last_hidden_state"][begin:end].numpy(), last)


# ---- what it takes


def test_the_shard_equals_that_of_transformers(
    target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path
) -> None:
    """The server computes states as transformers does, one prompt at a time; so does the other engine."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()

    def computed(ids: list[int]) -> tuple[np.ndarray, np.ndarray, int]:
        with torch.inference_mode():
            output = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        aux = torch.cat([output.hidden_states[layer + 1][0] for layer in LAYERS], -1)
        return aux.numpy(), output.hidden_states[-1][0].numpy(), int(output.logits[0, -1].argmax())

    fake = serve(states=computed)
    output = extract(target, fake, tmp_path, LENGTHS)
    tokens, other = tmp_path / "tokens" / output.name, tmp_path / "transformers" / output.name
    extract_shard(tokens, other, target, LAYERS, "float32", batch_tokens=1)
    found, expected = load_file(output), load_file(other)
    assert set(found) == set(expected)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-6, atol=1e-6)
    assert expected["aux_hidden_states"].std() > 0.1
    facts, other_facts = (read_json_file(path.with_suffix(".json")) for path in (output, other))
    assert facts["fingerprint"] == other_facts["fingerprint"]
    assert facts["failed"] == []


def test_what_the_server_is_asked(target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path) -> None:
    fake = serve(key="s3cret")
    os.environ["EYAS_TEST_KEY"] = "s3cret"
    try:
        output = extract(target, fake, tmp_path, LENGTHS, api_key_env="EYAS_TEST_KEY")
    finally:
        del os.environ["EYAS_TEST_KEY"]
    require_states(output, fake, target, LENGTHS)
    assert fake.lengths()[0] == PROBE
    assert sorted(fake.lengths()[1:]) == sorted(LENGTHS)  # each once
    rids = [body["rid"] for body in fake.bodies]
    assert len(set(rids)) == len(rids)
    for body in fake.bodies:
        assert body["sampling_params"]["max_new_tokens"] == 1
        assert body["return_hidden_states"] is True
        assert body["cache_salt"] == body["rid"]  # no prefix of another request
    sent = {tuple(body["input_ids"]) for body in fake.bodies}
    assert {tuple(ids.tolist()) for _, ids, _ in random_rows(LENGTHS)} <= sent


def test_rows_in_flight_are_bounded_and_many(
    target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path
) -> None:
    fake = serve(delay=0.1)
    output = extract(target, fake, tmp_path, list(range(1, 13)), concurrency=3)
    assert fake.most_at_once == 3
    require_states(output, fake, target, list(range(1, 13)))


# ---- tries


@pytest.mark.parametrize("fault", ["500", "503", "429", "hs_error", "nothing", "no json", "gone"])
def test_a_passing_fault_is_tried_again(
    fault: str, target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path
) -> None:
    fake = serve(faults={9: [fault] * 3, 1: [fault]})
    output = extract(target, fake, tmp_path, LENGTHS, max_tries=4)
    assert fake.lengths().count(9) == 4
    assert fake.lengths().count(1) == 2
    assert fake.lengths().count(5) == 1
    require_states(output, fake, target, LENGTHS)


def test_a_fault_that_stays_fails_the_row(
    target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path
) -> None:
    fake = serve(faults={9: ["500"] * 4})
    with pytest.raises(EyasError, match=r"1 row\(s\).*allows 0; row 3: the server answers 500: fault 500 \(tried 3"):
        extract(target, fake, tmp_path, LENGTHS, max_tries=3)
    assert fake.lengths().count(9) == 3
    # The next job tries that row alone again.
    before = len(fake.requests)
    output = extract(target, fake, tmp_path, LENGTHS, max_tries=3)
    assert fake.lengths()[before:] == [PROBE, 9, 9]
    require_states(output, fake, target, LENGTHS)


@pytest.mark.parametrize("fault", ["400", "413", "422"])
def test_a_refused_row_is_recorded(
    fault: str, target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path
) -> None:
    fake = serve(faults={17: [fault] * 9, 4: [fault] * 9})
    output = extract(target, fake, tmp_path, LENGTHS, failed=2)
    reason = f"the server answers {fault}: fault {fault}"
    recorded = read_json_file(output.with_suffix(".json"))["failed"]
    assert recorded == [{"sequence": i, "row": i, "reason": reason} for i in (2, 4)]
    assert fake.lengths().count(17) == 1  # it is for good
    require_states(output, fake, target, LENGTHS, without=(2, 4))
    with pytest.raises(EyasError, match="2 row.*max_failed_rows allows 1"):
        extract(target, serve(faults={17: ["400"], 4: ["400"]}), tmp_path / "again", LENGTHS, failed=1)


FORGED = {
    "rid": "its dump says rid eyas-0000000000000000-1, expected eyas-",
    "format": "its dump says format other, expected eyas.capture",
    "version": "its dump says version 2, expected 1",
    "layers": r"its dump says layers \[1, 2, 4\], expected \[0,1,3\]",
    "prefix": "its dump says prefix 5, expected 0",
    "ids": "its dump is of other token ids",
    "id dtype": "its dump has input_ids of dtype I64, expected I32",
    "dtype": "its dump has last_hidden_state in I64, expected one of",
    "short": r"its dump has aux_hidden_states of shape \(8, 48\), expected \(9, 48\)",
    "narrow": r"its dump has aux_hidden_states of shape \(9, 47\), expected \(9, 48\)",
    "no last": "its dump has last_hidden_state of shape None",
    "truncated": "its dump is truncated or damaged",
    "garbage": "its dump is truncated or damaged",
    "empty": "its dump is empty",
    "writable": "others may write to its dump",
    "symlink": "its dump cannot be opened",
    "fifo": "its dump is no file",
    "gone": "its dump cannot be opened",
    "name": "the server names the dump eyas-other.safetensors for request eyas-",
}


@pytest.mark.parametrize("fault", FORGED)
def test_a_forged_dump_is_refused_and_costs_a_try(
    fault: str, target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path
) -> None:
    fake = serve(faults={9: [fault] * 3})
    with pytest.raises(EyasError, match=f"row 3: {FORGED[fault]}.*tried 2 times"):
        extract(target, fake, tmp_path, LENGTHS, max_tries=2)
    assert fake.lengths().count(9) == 2
    fake = serve(faults={9: [fault]})
    output = extract(target, fake, tmp_path / "again", LENGTHS, max_tries=2)
    require_states(output, fake, target, LENGTHS)


def test_a_dump_of_another_user_is_refused(
    target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid():
        pytest.skip("only root can give files away")
    fake = serve()
    write = fake.write

    def given_away(rid: str, ids: list[int], fault: str | None) -> tuple[Path, int]:
        path, token = write(rid, ids, fault)
        if len(ids) == 9:
            os.chown(path, 12345, -1)
        return path, token

    monkeypatch.setattr(fake, "write", given_away)
    with pytest.raises(EyasError, match="its dump belongs to user 12345, not to 0"):
        extract(target, fake, tmp_path, LENGTHS, max_tries=2)


def test_states_that_are_not_finite_fail_their_row(
    target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path
) -> None:
    fake = serve(faults={9: ["nan"]})
    output = extract(target, fake, tmp_path, LENGTHS, failed=1)
    (failed,) = read_json_file(output.with_suffix(".json"))["failed"]
    assert failed["row"] == 3
    assert "last_hidden_state hold NaN" in failed["reason"]
    require_states(output, fake, target, LENGTHS, without=(3,))


# ---- bytes


def test_dumps_never_take_more_than_they_may(
    target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path
) -> None:
    """Rows of 40 tokens: 10,400 bytes of dump and the allowance for its header, 26,784. Two go into 60,000."""
    fake = serve(delay=0.02)
    lengths = [40] * 20
    output = extract(target, fake, tmp_path, lengths, concurrency=8, dump_gb=60_000 / 1e9)
    assert fake.most_bytes <= 60_000
    assert fake.most_at_once == 2
    require_states(output, fake, target, lengths)
    wide = serve(delay=0.5)  # long enough for eight to meet on a busy machine
    extract(target, wide, tmp_path / "wide", lengths, concurrency=8)
    assert wide.most_at_once == 8
    assert wide.most_bytes > fake.most_bytes


def test_a_row_larger_than_the_credits_goes_alone(
    target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path
) -> None:
    fake = serve(delay=0.02)
    output = extract(target, fake, tmp_path, [30, 50, 40], dump_gb=1e-6)
    assert fake.most_at_once == 1
    require_states(output, fake, target, [30, 50, 40])


def test_a_row_larger_than_the_folder_fails(
    target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DumpFolder, "total_bytes", lambda self: 25_000)
    fake = serve()
    with pytest.raises(EyasError, match=r"row 1: its states take 26,784 bytes, and .*dump_folder holds 25,000"):
        extract(target, fake, tmp_path, [9, 40, 4])
    assert 40 not in fake.lengths()


# ---- folders


def test_what_dead_jobs_left_is_deleted_and_the_living_keep_theirs(folder: Path) -> None:
    dead, living = DumpFolder(folder, own=False), DumpFolder(folder, own=False)
    own_dead, own_living = DumpFolder(folder, own=True), DumpFolder(folder, own=True)
    assert own_dead.path.stat().st_mode & 0o777 == 0o700
    for place in (dead, living, own_dead, own_living):
        place.dump(place.rid(1)).write_bytes(b"x")
        (place.path / f".{place.rid(2)}.part").write_bytes(b"x")
    (folder / "notes.txt").write_text("somebody else's")
    fcntl.flock(dead._fd, fcntl.LOCK_UN)  # as the end of its process does
    fcntl.flock(own_dead._fd, fcntl.LOCK_UN)
    clean(folder)
    names = {path.name for path in folder.iterdir()}
    assert names == {
        f"{living.rid(1)}.safetensors", f".{living.rid(2)}.part", f".{living.token}.lock", own_living.path.name,
        "notes.txt",
    }  # fmt: skip
    assert {path.name for path in own_living.path.iterdir()} == {
        f"{own_living.rid(1)}.safetensors", f".{own_living.rid(2)}.part", f".{own_living.token}.lock",
    }  # fmt: skip
    living.close()
    own_living.close()
    assert {path.name for path in folder.iterdir()} == {"notes.txt"}


def test_a_run_cleans_up_after_a_dead_one(
    target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path, folder: Path
) -> None:
    left = DumpFolder(folder, own=False)
    left.dump(left.rid(7)).write_bytes(bytes(1000))
    fcntl.flock(left._fd, fcntl.LOCK_UN)
    extract(target, serve(), tmp_path, LENGTHS)  # requires an empty folder in the end


def test_a_folder_that_others_can_reach_is_refused(
    target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path, folder: Path
) -> None:
    folder.chmod(0o755)
    with pytest.raises(EyasError, match=r"dump_folder: .* must be yours alone \(mode 0700\)"):
        extract(target, serve(), tmp_path, LENGTHS)
    missing = FakeSglang(tmp_path / "missing", lambda ids: None, LAYERS)  # type: ignore[arg-type]
    with pytest.raises(EyasError, match="missing is no folder"):
        DumpFolder(missing.folder, own=True)


# ---- a server that goes away


def test_a_server_that_comes_back_loses_no_row(
    target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path
) -> None:
    """It goes in the middle of several requests, more often than a row has tries."""
    fake = serve(faults={9: ["stop", "stop", "stop"]}, delay=0.02)
    done = threading.Event()

    def keep() -> None:
        while not done.wait(0.1):
            if fake._server is None:
                time.sleep(1.0)  # long enough to be seen as away
                fake.start()

    keeper = threading.Thread(target=keep)
    keeper.start()
    try:
        output = extract(target, fake, tmp_path, LENGTHS, max_tries=2)
    finally:
        done.set()
        keeper.join()
    assert fake.lengths().count(9) == 4
    require_states(output, fake, target, LENGTHS)


def test_a_server_that_stays_away_ends_the_job(
    target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path
) -> None:
    fake = serve(faults={9: ["stop"]})
    started = time.monotonic()
    with pytest.raises(
        EyasError, match=r"sglang.url: http\S+ does not answer since 0.0 minutes; finished rows are kep"
    ):
        extract(target, fake, tmp_path, LENGTHS, outage_minutes=0.02, concurrency=1)
    assert time.monotonic() - started < 15
    before = len(fake.requests)
    assert before == 5  # the probe, three rows, the one it went with
    fake.start()
    output = extract(target, fake, tmp_path, LENGTHS, concurrency=1)
    assert fake.lengths()[before:] == [PROBE, 9, 4, 3, 12]
    require_states(output, fake, target, LENGTHS)


def test_no_server_at_all(target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path) -> None:
    fake = serve()
    fake.stop()
    with pytest.raises(EyasError, match="does not answer since 0.0 minutes"):
        extract(target, fake, tmp_path, LENGTHS, outage_minutes=0.01)


def test_a_row_that_a_living_server_drops_fails(
    target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path
) -> None:
    fake = serve(faults={9: ["drop"] * 100})
    with pytest.raises(EyasError, match=r"row 3: the connection broke.*tried 3 times"):
        extract(target, fake, tmp_path, LENGTHS, max_tries=3)
    fake = serve(faults={9: ["drop"] * 2})
    require_states(extract(target, fake, tmp_path / "again", LENGTHS, max_tries=3), fake, target, LENGTHS)


def test_a_server_that_does_not_answer_in_time(
    target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path
) -> None:
    fake = serve(faults={9: ["slow"]})
    output = extract(target, fake, tmp_path, LENGTHS, timeout_seconds=0.5)
    assert fake.lengths().count(9) == 2
    require_states(output, fake, target, LENGTHS)


def test_an_outage_does_not_hold_up_the_end_of_the_job(
    target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row's fault ends the job while others wait for the server: they wait no longer."""
    fake = serve()
    tokens = write_tokens(tmp_path / "tokens" / "rows_0-7.safetensors", random_rows(LENGTHS))
    engine = SglangEngine(target, LAYERS, options(fake, outage_minutes=5), None, 0, tmp_path / "server.log")

    def full(*_: Any) -> None:
        fake.stop()
        time.sleep(0.3)  # the others notice
        raise KeyboardInterrupt

    monkeypatch.setattr("eyas.extraction.shard._Writer.write", full)
    fake.delay = 0.1
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        extract_shard(tokens, tmp_path / "out" / tokens.name, target, LAYERS, "float32", engine=engine)
    engine.close()
    assert time.monotonic() - started < 10
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rows")]


# ---- keys, probes, targets


@pytest.mark.parametrize("sent", [None, "wr0ng"])
def test_a_wrong_key_is_one_clear_error(
    sent: str | None, target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fake = serve(key="s3cret")
    changes: dict[str, Any] = {}
    if sent:
        monkeypatch.setenv("EYAS_TEST_KEY", sent)
        changes["api_key_env"] = "EYAS_TEST_KEY"
    with pytest.raises(EyasError, match="extraction.sglang: http.*: the key is refused") as caught:
        extract(target, fake, tmp_path, LENGTHS, **changes)
    assert "wr0ng" not in str(caught.value)
    assert len(fake.requests) == 0


def test_a_key_that_is_not_set(target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="environment variable EYAS_TEST_NO_KEY is not set"):
        extract(target, serve(), tmp_path, LENGTHS, api_key_env="EYAS_TEST_NO_KEY")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other states", "the server writes token .* behind a probe, the head gives"),
        ("other token", "the server writes token .* behind a probe, the head gives"),
        ("layers", "does not capture a probe of 16 tokens: its dump says layers"),
        (
            "nothing",
            "does not capture a probe of 16 tokens: the server wrote no states; is the capture plugin installed",
        ),
        ("hs_error", "does not capture a probe of 16 tokens: no room for it"),
    ],
)
def test_a_server_that_captures_wrongly_gets_no_row(
    fault: str, message: str, target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path
) -> None:
    fake = serve(faults={PROBE: [fault] * 9})
    with pytest.raises(EyasError, match=message):
        extract(target, fake, tmp_path, LENGTHS, max_tries=2)
    assert set(fake.lengths()) == {PROBE}


def save_config(target: TargetReference, folder: Path, **changes: Any) -> TargetReference:
    """A copy of the target with other values in its config.json."""
    folder.mkdir()
    for path in Path(target.path).iterdir():
        if path.name == "config.json":
            (folder / path.name).write_text(json.dumps(json.loads(path.read_text()) | changes))
        else:
            (folder / path.name).symlink_to(path)
    return TargetReference(str(folder))


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma3", "mimo_v2_flash", "step3p5"])
def test_targets_that_sglang_captures_wrongly_are_refused(model_type: str) -> None:
    problem = sglang_problem(model_type, 10, [0, 1, 2]) or ""
    assert re.search(rf"wrong hidden states for {model_type} \(SGLang.*set.*engine: transformers", problem)
    assert sglang_problem("llama", 10, [0, 1, 8]) is None


def test_the_last_layer_is_refused(target: TargetReference, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"\[0, 1, 4\] has the target's last layer.*write layers up to 3"):
        SglangEngine(target, [0, 1, 4], Sglang().options(), None, 0, tmp_path / "server.log")


def test_gemma3_is_refused_before_anything_is_asked(
    target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path
) -> None:
    gemma = save_config(target, tmp_path / "gemma", model_type="gemma3_text", architectures=["Gemma3ForCausalLM"])
    fake = serve()
    with pytest.raises(EyasError, match="without the residual that is still to be added"):
        extract(gemma, fake, tmp_path, LENGTHS)
    assert fake.requests == []


def test_a_target_that_caps_its_logits_is_refused(
    target: TargetReference, serve: Callable[..., FakeSglang], tmp_path: Path
) -> None:
    capped = save_config(target, tmp_path / "capped", final_logit_softcapping=30.0)
    fake = serve()
    with pytest.raises(EyasError, match=r"final_logit_softcapping: 30.0.*not supported yet"):
        extract(capped, fake, tmp_path, LENGTHS)
    assert fake.requests == []


def test_a_failed_row_has_nothing_to_release() -> None:
    FailedRow("reason").release()

"""The exported drafter in real SGLang servers: greedy outputs stay, as many tokens are accepted as in `eyas.decoding`;
and an evaluation with `engine: sglang`, which starts its servers itself."""

from __future__ import annotations

import json
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_world import END, World, build_world
from eyas.conversations import Row
from eyas.decoding.acceptance import StepAcceptance
from eyas.decoding.decode import decode
from eyas.decoding.eagle import EagleProposer
from eyas.decoding.evaluate import evaluate
from eyas.decoding.on_server import Commands, evaluate_on_server
from eyas.decoding.run_data import RunFiles
from eyas.export import export_drafter
from eyas.plan import plan_run
from eyas.target.tokenizer import TargetReference
from plugin_server import SglangServer, sglang_server
from recorded_rows import write_recorded_rows
from servers import ARGUMENTS, ENVIRONMENT
from tiny import WORDS, answer, make_target, question
from transformers import AutoTokenizer

pytestmark = pytest.mark.timeout(1800)
LAYERS, SHIFTED = [0, 1, 2], [1, 2, 3]
MAX_NEW_TOKENS = 40


@dataclass
class Served:
    """The trained drafter's world and export, prompts, and the target's own greedy outputs."""

    world: World
    target: Path
    export: Path
    prompts: list[list[int]]
    plain: list[list[int]]

    def acceptance_length(self, layers: list[int], steps: int, topk: int, draft_tokens: int) -> float:
        """Of `eyas.decoding`, for the drafter on the outputs of `layers`."""
        found = StepAcceptance(steps)
        proposer = EagleProposer(self.world.drafters["trained"], layers, steps, topk, draft_tokens)
        for prompt, plain in zip(self.prompts, self.plain, strict=True):
            made = decode(self.world.target, proposer, prompt, [END], MAX_NEW_TOKENS)
            assert made.ids == plain
            found.add(made.rounds)
        assert found.length
        return found.length


@pytest.fixture(scope="module")
def served(python: str, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A target of five layers: its drafter's layers can be one further, and none of both is the last."""
    folder, threads = tmp_path_factory.mktemp("served"), torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower with more, much slower on a busy machine
    try:
        target = make_target(folder / "target", num_hidden_layers=5)
        world = build_world(target, folder, LAYERS, epochs=12, learning_rate=1e-3)
    finally:
        torch.set_num_threads(threads)
    drafter = world.run / "drafters" / "eagle3"
    export_drafter(drafter / "best", "sglang", "llama", drafter / "export" / "sglang")
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question(start)}], add_generation_prompt=True, return_dict=False
        )
        for start in range(0, len(WORDS) - 1, 2)
    ]
    plain = [decode(world.target, None, prompt, [END], MAX_NEW_TOKENS).ids for prompt in prompts]
    return Served(world, target, drafter / "export" / "sglang", prompts, plain)


def ask(server: SglangServer, prompt: list[int]) -> dict[str, Any]:
    sampling = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 0, "stop_token_ids": [END]}
    found: dict[str, Any] = server.post("/generate", {"input_ids": prompt, "sampling_params": sampling}, timeout=600)
    return found


def served_length(
    served: Served, python: str, export: Path, folder: Path, steps: int, topk: int, draft_tokens: int
) -> float:
    """The acceptance length in a server, all of whose outputs must be the target's own."""

    def command(port: int, key_file: Path) -> list[str]:
        return [
            python, "-m", "sglang.launch_server", "--model-path", str(served.target), "--dtype", "float32",
            "--mem-fraction-static", "0.1", *ARGUMENTS, "--skip-tokenizer-init", "--skip-server-warmup",
            "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(export),
            "--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk),
            "--speculative-num-draft-tokens", str(draft_tokens),
            "--host", "127.0.0.1", "--port", str(port), "--config", str(key_file),
        ]  # fmt: skip

    with sglang_server(command, folder, {}) as server, ThreadPoolExecutor(4) as pool:
        ask(server, served.prompts[0])  # the first request compiles
        answers = list(pool.map(lambda prompt: ask(server, prompt), served.prompts))
    assert [found["output_ids"] for found in answers] == served.plain
    rounds = accepted = 0
    for found in answers:
        facts = found["meta_info"]
        rounds += facts["spec_verify_ct"]
        # Drafted tokens behind the end of the output are no output: the server counts them all the same.
        accepted += min(facts["spec_num_correct_drafts"], facts["completion_tokens"] - facts["spec_verify_ct"])
    return 1 + accepted / rounds


@pytest.mark.parametrize(("steps", "topk", "draft_tokens"), [(3, 1, 4), (3, 2, 6)], ids=["chain", "tree"])
def test_acceptance_is_that_of_our_own_decoding(
    served: Served, python: str, tmp_path: Path, steps: int, topk: int, draft_tokens: int
) -> None:
    ours = served.acceptance_length(LAYERS, steps, topk, draft_tokens)
    found = served_length(served, python, served.export, tmp_path, steps, topk, draft_tokens)
    assert ours > 1.8
    assert found == pytest.approx(ours, rel=0.1)


def test_shifted_layer_ids_are_clearly_worse(served: Served, python: str, tmp_path: Path) -> None:
    """Ids that are one too high are a server's other counting: nothing fails, less is accepted."""
    export = shutil.copytree(served.export, tmp_path / "export")
    config = json.loads((export / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == LAYERS
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = SHIFTED
    (export / "config.json").write_text(json.dumps(config))
    right = served.acceptance_length(LAYERS, 3, 1, 4)
    wrong = served.acceptance_length(SHIFTED, 3, 1, 4)
    found = served_length(served, python, export, tmp_path / "server", 3, 1, 4)
    assert found < 0.9 * right
    assert found == pytest.approx(wrong, rel=0.1)


def test_an_evaluation_with_servers_of_its_own(served: Served, python: str, tmp_path: Path) -> None:
    """One with the drafter and one without, one after the other; beside an evaluation in this process."""
    run = served.world.run
    rows = [
        Row(start, "s", [{"role": "user", "content": question(start)}, {"role": "assistant", "content": answer(start)}])
        for start in range(len(WORDS) - 1)
    ]
    (run / "conversations").mkdir()
    write_recorded_rows(run / "conversations" / f"rows_0-{len(rows)}.jsonl", rows)
    (tmp_path / "set.jsonl").write_text("".join(json.dumps({"question": f"say {w} ?"}) + "\n" for w in WORDS[:4]))
    values = {
        "name": run.name, "results": str(run.parent), "target": {"path": str(served.target)},
        "data": {"prompts": [str(tmp_path / "set.jsonl")], "rows": len(rows), "held_out_every": 7},
        "extraction": {"layers": LAYERS}, "drafters": {"eagle3": {"draft_vocab_size": 120}},
        "evaluation": {
            "engine": "sglang", "draft_steps": 3, "max_new_tokens": MAX_NEW_TOKENS,
            "prompt_sets": {"held_out": {}, "mine": {"path": str(tmp_path / "set.jsonl")}},
            "sglang": {
                "python": python, "environment": ENVIRONMENT, "mem_fraction": 0.1, "extra_args": list(ARGUMENTS),
                "start_minutes": 10.0,
            },
        },
    }  # fmt: skip
    plan = plan_run(values, "test")
    commands = Commands(
        *(shlex.split(plan.evaluation_server("eagle3", drafting)) for drafting in (False, True)),
        tmp_path / "plain.log", tmp_path / "drafting.log",
    )  # fmt: skip
    files, target = RunFiles(run, len(rows), 100), TargetReference(str(served.target))
    drafter, settings = run / "drafters" / "eagle3", json.loads(plan.evaluation_settings)
    evaluate_on_server(
        files, target, drafter / "best", drafter / "epoch_0", settings, json.loads(plan.evaluation_options), commands,
        tmp_path / "served.json",
    )  # fmt: skip
    evaluate(files, target, drafter / "best", drafter / "epoch_0", settings, tmp_path / "here.json")
    found, here = (json.loads((tmp_path / name).read_text()) for name in ("served.json", "here.json"))
    assert (found["engine"], here["engine"]) == ("sglang", "transformers")
    assert found["offline"] == here["offline"]
    for name, figures in found["prompt_sets"].items():
        ours = here["prompt_sets"][name]
        assert figures["lossless"] is True and figures["speedup"] > 0
        assert figures["tokens"] == ours["tokens"] == figures["baselines"]["none"]["tokens"]
        assert figures["acceptance_length"] == pytest.approx(ours["acceptance_length"], rel=0.1)
        assert figures["looping_share"] == ours["looping_share"]
        assert figures["acceptance_by_step"][0] == pytest.approx(ours["acceptance_by_step"][0], abs=0.1)
    assert not [line for line in command_lines() if str(served.target) in line]
    assert "api_key='***'" in (tmp_path / "drafting.log").read_text() or "***" in (tmp_path / "plain.log").read_text()


def command_lines() -> list[str]:
    """Of all processes that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found

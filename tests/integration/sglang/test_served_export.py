"""The exported drafter in real SGLang servers: greedy outputs stay, as many tokens are accepted as in `eyas.decoding`."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from decoding_world import END, World, build_world
from eyas.decoding.acceptance import StepAcceptance
from eyas.decoding.decode import decode
from eyas.decoding.eagle import EagleProposer
from eyas.export import export_drafter
from plugin_server import SglangServer, sglang_server
from servers import ARGUMENTS
from tiny import WORDS, make_target, question
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
    folder = tmp_path_factory.mktemp("served")
    target = make_target(folder / "target", num_hidden_layers=5)
    world = build_world(target, folder, LAYERS, epochs=12, learning_rate=1e-3)
    export_drafter(world.run / "drafters" / "eagle3" / "best", "sglang", "llama", folder / "export")
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question(start)}], add_generation_prompt=True, return_dict=False
        )
        for start in range(0, len(WORDS) - 1, 2)
    ]
    plain = [decode(world.target, None, prompt, [END], MAX_NEW_TOKENS).ids for prompt in prompts]
    return Served(world, target, folder / "export", prompts, plain)


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
    assert [answer["output_ids"] for answer in answers] == served.plain
    rounds = accepted = 0
    for answer in answers:
        facts = answer["meta_info"]
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

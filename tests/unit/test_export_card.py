"""Model cards and provenance: what they say, that other people's text stays text, and that equal runs agree."""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from drafter_reference import file_bytes, read_json_file, small_shape
from eyas.config import check_config
from eyas.drafter.checkpoint import Checkpoint, save_checkpoint
from eyas.drafter.initialise import random_weights
from eyas.errors import EyasError
from eyas.export import describe_exports, export_drafter
from eyas.export.licence import Licence, find_licence, target_folder
from eyas.export.markdown import block, code, prose, table
from eyas.export.provenance import git_state, package_versions
from eyas.export.serving import speculation
from eyas.plan.export import public_config
from eyas.shards import describe_file
from eyas.target.tokenizer import TargetReference
from markdown_it import MarkdownIt

HOSTILE = "a|b`c``d\n# x\n<script>alert(1)</script> [y](http://z) **q** \\| &lt; ~~s~~"


def figures(length: float | None, **changes: Any) -> dict[str, Any]:
    return {
        "prompts": 10, "acceptance_length": length, "acceptance_by_step": [0.31, 0.26], "tokens_per_forward": 1.35,
        "tokens": 480, "target_forwards": 350, "seconds": 12.3, "tokens_per_second": 21.5, "speedup": 0.91, "lossless": True, "differences": [],
        "looping_share": 0.125, "without_looping": {"prompts": 9, "acceptance_length": 1.33},
    } | changes  # fmt: skip


EVALUATION: dict[str, Any] = {
    "format_version": 3,
    "definitions": {"decoding": "1 + drafted tokens accepted per target forward", "looping": "an output *in* a loop"},
    "engine": "transformers",
    "settings": {"draft_steps": 4, "topk": 2, "draft_tokens": 8, "temperature": 0.0, "max_new_tokens": 48},
    "checkpoint": "epoch_2",
    "held_out_rows": 40,
    "offline": {"trained": {"expected_acceptance_length": 1.377}, "untrained": {}},
    "prompt_sets": {
        "held_out": figures(1.371)
        | {
            "source": "held-out rows of the run",
            "baselines": {
                "none": {"acceptance_length": 1.0, "speedup": 1.0, "lossless": True, "acceptance_by_step": None},
                "ngram": figures(1.111),
                "untrained": figures(1.0, lossless=False, speedup=None),
            },
        },
        "mt_bench": figures(None, lossless=None, acceptance_by_step=[], without_looping=None) | {"baselines": {}},
    },
}


def put(file: Path, values: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values))


class Run:
    """The files of a run that cards are made of."""

    def __init__(self, folder: Path) -> None:
        self.base, self.run = folder, folder / "results" / "mine"
        self.target = folder / "models" / "Tiny-1B"
        put(self.target / "config.json", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
        self.config = {
            "name": "mine", "target": {"path": "models/Tiny-1B"}, "data": {"prompts": ["p.jsonl"], "rows": 100},
            "drafters": {"small": {"draft_vocab_size": 11}},
        }  # fmt: skip
        self.drafter = self.run / "drafters" / "small"
        shape = small_shape()
        weights = random_weights(shape, 0)
        ids = torch.arange(shape.draft_vocab_size)
        weights |= {"d2t": ids * 0, "t2d": torch.arange(shape.vocab_size) < len(ids)}
        save_checkpoint(Checkpoint(shape, weights, {}, {"epoch": 1, "trained": []}), self.drafter / "best", "mark")
        put(
            self.drafter / "best" / "selection.json",
            {
                "epoch": 2, "last_epoch": 3, "definition": "the best by <the> held-out rows",
                "files": {"model.safetensors": describe_file(self.drafter / "best" / "model.safetensors")},
            },
        )  # fmt: skip
        held_out = {"rows": 5, "loss": 9.5, "acceptance_length": 1.38}
        history = [{"epoch": 1, "loss": 15.25, "held_out": held_out}, {"epoch": 2, "loss": 8.75, "held_out": held_out}]
        put(
            self.drafter / "epoch_3" / "trainer_state.json",
            {
                "epoch": 3, "step": 253, "parameters": 7448832, "manifest_digest": "xxh3_128:feed",
                "history": [*history, {"epoch": 3, "stopped_after": 2}],
            },
        )  # fmt: skip
        put(
            self.run / "hidden_states" / "data_config.json",
            {
                "target": {"path": str(self.target), "revision": None, "config_hash": "sha256:1", "dtype": "float32"},
                "layers": [0, 1, 2], "hidden_size": 12,
            },
        )  # fmt: skip
        source = {"rows": 99, "tokens": 46115, "supervised_tokens": 26251, "skipped": 1}
        self.statistics = {"sources": {"chat.jsonl": source}, "skipped_rows": 1} | source
        put(self.run / "tokens" / "statistics.json", self.statistics)
        vocabulary = {"draft_vocab_size": 11, "vocab_size": 23, "coverage": 1.0, "coverage_held_out": 0.8444}
        put(self.run / "vocab_map" / "11.json", vocabulary)
        put(self.drafter / "evaluation.json", EVALUATION)
        for server in ("sglang", "vllm"):
            export_drafter(self.drafter / "best", server, "llama", self.drafter / "export" / server)

    def describe(self, target: str | None = None, results: str = "results", **reference: Any) -> dict[str, str]:
        """Cards by server. The working folder is the run's base in production; here the target's path is absolute."""
        config = check_config(self.config, "x")
        settings = {"results": results, "config": public_config(config, "small")}
        describe_exports(self.run, "small", TargetReference(target or str(self.target), **reference), None, settings)
        return {s: (self.drafter / "export" / s / "README.md").read_text() for s in ("sglang", "vllm")}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def front_matter(card: str) -> dict[str, Any]:
    _, values, _ = card.split("---\n", 2)
    return yaml.safe_load(values)


def html(card: str) -> str:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(card.split("---\n", 2)[2])


def blocks(card: str) -> list[list[str]]:
    """Words of the command lines."""
    return [shlex.split(text.replace("\\\n", " ")) for text in re.findall(r"```sh\n(.*?)\n```", card, re.DOTALL)]


def tables(page: str) -> list[list[list[str]]]:
    found = []
    for body in re.findall(r"<table>(.*?)</table>", page, re.DOTALL):
        rows = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
        found.append([[re.sub(r"<.*?>", "", c) for c in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)] for row in rows])
    return found


def test_front_matter_is_what_hubs_read(run: Run) -> None:
    cards = run.describe()
    for server, card in cards.items():
        values = front_matter(card)
        assert values["base_model"] == "Tiny-1B" and values["license"] == "unknown"
        assert {"eagle3", "speculative-decoding", server} <= set(values["tags"])
        assert "not stated in the target's folder; see the target's own page" in card
    run.config["target"] = {"path": "owner/Tiny-1B", "revision": "v2"}
    (run.target / "README.md").write_text("---\nlicense: other\nlicense_name: tiny-licence\n---\n# Tiny")
    card = run.describe(target="no-such-owner/no-such-model")["vllm"]
    assert front_matter(card)["base_model"] == "owner/Tiny-1B"
    assert "https://huggingface.co/owner/Tiny-1B" in card and "`v2`" in card
    run.config["target"] = {"path": "models/Tiny-1B"}
    values = front_matter(run.describe()["vllm"])
    assert (values["license"], values["license_name"]) == ("other", "tiny-licence")


def test_the_command_lines_are_exact(run: Run) -> None:
    cards = run.describe()
    sglang = [
        "python", "-m", "sglang.launch_server", "--model-path", "models/Tiny-1B", "--speculative-algorithm", "EAGLE3",
        "--speculative-draft-model-path", "results/mine/drafters/small/export/sglang", "--speculative-num-steps", "4",
        "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "8",
    ]  # fmt: skip
    assert blocks(cards["sglang"])[0] == blocks(cards["vllm"])[1] == sglang
    vllm = blocks(cards["vllm"])[0]
    assert vllm == blocks(cards["sglang"])[1]
    assert vllm[:4] == ["vllm", "serve", "models/Tiny-1B", "--speculative-config"]
    draft = {"method": "eagle3", "model": "results/mine/drafters/small/export/vllm", "num_speculative_tokens": 4}
    assert json.loads(vllm[4]) == draft and len(vllm) == 5
    run.config["target"] = {"path": "models/it's `mine`", "revision": "a b", "trust_remote_code": True}
    for words in blocks(run.describe()["vllm"]):
        assert "models/it's `mine`" in words
        assert words[-3:] == ["--revision", "a b", "--trust-remote-code"]


def test_a_quantised_target_is_served_quantised(run: Run) -> None:
    run.config["extraction"] = {"engine": "sglang", "layers": [0, 1, 2], "sglang": {"quantization": "fp8"}}
    sglang, vllm = blocks(run.describe()["sglang"])
    assert sglang[-4:] == ["--quantization", "fp8", "--speculative-draft-model-quantization", "unquant"]
    assert "--quantization" not in vllm


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gemma3_text", "num_hidden_layers": 9}, "takes wrong hidden states of gemma3\\_text targets"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "few drafts will be accepted"),
        ({"model_type": "llama", "num_hidden_layers": 3}, "reads the output of the target's last layer, which SGLang"),
        ({"model_type": "llama", "num_hidden_layers": 4}, None),
    ],
)
def test_what_sglang_cannot_do_is_said(
    run: Run, config: dict[str, Any], said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    put(run.target / "config.json", {"architectures": ["X"]} | config)
    card = run.describe()["vllm"]
    assert ("Not to be used there as it is" in card) == (said is not None)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if said:
        assert said in card and card.index("With SGLang") < card.index(said) < card.index("sglang.launch_server")
        assert len(warnings) == 1 and said.replace("\\", "") in warnings[0] and "export/sglang" in warnings[0]
    else:
        assert warnings == []


def test_a_normed_residual_is_not_for_sglang(run: Run) -> None:
    run.config["drafters"]["small"]["model"] = {"norm_before_residual": True}
    assert "SGLang 0.5.23 does not know norm\\_before\\_residual" in run.describe()["sglang"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (5, 1, 6)),
        ({"draft_steps": 3}, (3, 1, 4)),
        ({"draft_steps": 3, "topk": 1, "draft_tokens": None}, (3, 1, 4)),
        ({"draft_steps": 4, "topk": 4, "draft_tokens": 16}, (4, 4, 16)),
    ],
)
def test_speculation_as_sglang_names_it(settings: dict, expected: tuple[int, int, int]) -> None:
    assert speculation(settings) == expected


def test_acceptance_table(run: Run) -> None:
    card = run.describe()["sglang"]
    acceptance = tables(html(card))[0]
    assert {len(row) for row in acceptance} == {10}
    assert acceptance[1] == [
        "held_out (10)", "this drafter", "1.37", "1.33", "0.31 0.26", "1.35", "21.5", "0.91", "yes", "12.5%",
    ]  # fmt: skip
    assert [row[1] for row in acceptance[2:5]] == ["no drafter", "prompt lookup (n-gram)", "untrained drafter"]
    assert acceptance[3][2] == "1.11" and acceptance[4][7:9] == ["–", "no"]
    assert acceptance[5][0] == "mt_bench (10)" and acceptance[5][2:5] == ["–"] * 3
    assert "–: not measured, or nothing to compare with." in card
    assert "a tree of 8 tokens (depth 4, topk 2), greedy" in card
    for text in ("1 + drafted tokens accepted per target forward", "an output *in* a loop", "40 held-out rows: 1.38"):
        assert text in re.sub(r"<.*?>", "", html(card))


@pytest.mark.parametrize("found", ["none", "earlier format", "no prompt sets"])
def test_a_card_without_acceptance(run: Run, found: str) -> None:
    file = run.drafter / "evaluation.json"
    if found == "none":
        file.unlink()
    elif found == "earlier format":
        put(file, {"format_version": 2, "draft_steps": 5, "drafters": {}})
    else:
        put(file, {"format_version": 3, "prompt_sets": {}})
    card = run.describe()["sglang"]
    assert ("Not measured." in card) == (found != "no prompt sets")
    words = blocks(card)[0]
    assert words[words.index("--speculative-num-steps") + 1] == "5"  # the configuration's


def test_what_the_card_tells_of_data_training_and_coverage(run: Run) -> None:
    page = html(run.describe()["vllm"])
    found = {row[0]: row[1:] for rows in tables(page) for row in rows if row}
    assert found["chat.jsonl"] == found["all"] == ["99", "46,115", "26,251", "1"]
    assert found["architecture"] == ["LlamaForCausalLM"]
    assert found["trained parameters"] == ["7,448,832"] and found["learning_rate"] == ["0.0004"]
    assert found["ttt_steps"] == ["7"] and found["batch_tokens"] == ["2048"]
    assert found["epochs"][0].startswith("3; this is epoch 2")
    assert (found["1"], found["2"]) == (["15.250", "9.500", "1.380"], ["8.750", "9.500", "1.380"]) and "3" not in found
    assert "84.4%" in page and "100.0%" in page


def test_other_peoples_text_stays_text(run: Run) -> None:
    """Names and texts that are full of markup change no structure, and are there to read."""
    plain = html(run.describe()["sglang"])
    source = run.statistics["sources"].pop("chat.jsonl")
    put(run.run / "tokens" / "statistics.json", run.statistics | {"sources": {HOSTILE: source}})
    evaluation = copy.deepcopy(EVALUATION)
    evaluation["prompt_sets"] = {HOSTILE: evaluation["prompt_sets"]["held_out"], "mt_bench": figures(1.0)}
    evaluation["definitions"] = {HOSTILE: HOSTILE, "looping": "x"}
    evaluation["engine"] = HOSTILE
    put(run.drafter / "evaluation.json", evaluation)
    put(run.target / "config.json", {"architectures": [HOSTILE], "license": "other"})
    selection = read_json_file(run.drafter / "best" / "selection.json") | {"definition": HOSTILE}
    put(run.drafter / "best" / "selection.json", selection)
    run.config["target"] = {"path": f"models/{HOSTILE}", "revision": HOSTILE}
    card = run.describe()["sglang"]
    page = html(card)
    assert front_matter(card)["license"] == "other"
    assert "<script" not in page and "<del>" not in page and 'href="http://z"' not in page
    for tag in ("h1", "h2", "table", "pre"):
        assert page.count(f"<{tag}>") == plain.count(f"<{tag}>"), tag
    assert all(len({len(row) for row in rows}) == 1 for rows in tables(page))
    assert page.count("alert(1)") >= 7


def test_pieces_of_markdown() -> None:
    render = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render
    for text in ("plain", "a`b", "``", "`", "a|b", "*x* _y_ <b>", "\\`", "trailing\\"):
        for page in (render(code(text)), render("\n".join(table(["h"], [[code(text)]])))):
            spans = re.findall(r"<code>(.*?)</code>", page)
            assert [s.replace("&lt;", "<").replace("&gt;", ">") for s in spans] == [text], text
        shown = re.sub(r"</?p>", "", render(prose(text))).strip()
        assert shown.replace("&lt;", "<").replace("&gt;", ">") == text
    assert code("") == code("\n") == "(empty)"
    assert render("\n".join(block("a\n```\nb"))).count("<pre>") == 1


# ---- no machine's paths, no times ----


def test_no_absolute_path_and_no_time(run: Run) -> None:
    run.config["target"] = {"path": str(run.target)}
    run.config["data"] = {"prompts": [str(run.base / "p.jsonl")], "rows": 100}
    run.describe(results="results")
    texts = {path: path.read_text() for path in (run.drafter / "export").rglob("*") if path.suffix in (".md", ".json")}
    assert len(texts) == 8
    for path, text in texts.items():
        assert str(run.base) not in text, path
        assert not re.search(r"20\d\d-\d\d|\d\d:\d\d:\d\d", text), path
    before = file_bytes(run.drafter / "export" / "sglang") | file_bytes(run.drafter / "export" / "vllm")
    run.describe()
    assert before == file_bytes(run.drafter / "export" / "sglang") | file_bytes(run.drafter / "export" / "vllm")


def test_provenance_says_where_it_comes_from(run: Run) -> None:
    run.describe()
    for server in ("sglang", "vllm"):
        values = read_json_file(run.drafter / "export" / server / "provenance.json")
        assert values["server"] == server and values["manifest_digest"] == "xxh3_128:feed"
        weights = describe_file(run.drafter / "best" / "model.safetensors")
        assert values["checkpoint"] == {"epoch": 2, **weights}
        assert values["files"]["config.json"] == describe_file(run.drafter / "export" / server / "config.json")
        assert values["config"]["drafter"]["training"]["ttt_steps"] == 7
        assert values["versions"]["torch"] == torch.__version__ and values["versions"] == package_versions()
        assert values["target"]["path"] == "Tiny-1B"


def test_a_missing_file_is_one_message(run: Run) -> None:
    (run.run / "tokens" / "statistics.json").unlink()
    with pytest.raises(EyasError, match=r"statistics.json.* is missing"):
        run.describe()


def test_git_state(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "workflow" / "eyas"
    package.mkdir(parents=True)
    (package / "versions.py").write_text("1")
    assert git_state(package) is None
    git("init", "-q")
    (tmp_path / "mine.txt").write_text("somebody's own repository")
    git("add", "mine.txt")
    git("commit", "-qm", "x")
    assert git_state(package) is None  # unpacked in it, not part of it
    git("add", ".")
    git("commit", "-qm", "y")
    assert git_state(package) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "untracked").write_text("")
    assert git_state(package)["dirty"] is False
    (package / "versions.py").write_text("2")
    assert git_state(package)["dirty"] is True


# ---- licences ----


def write_gguf(file: Path, licence: str | None) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(file, "llama")
    if licence:
        writer.add_license(licence)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("README.md", "---\nlicense: apache-2.0\ntags: [a]\n---\n# Model", Licence("apache-2.0", None, "README.md")),
        ("README.md", "---\nlicense: [broken\n---\n", None),
        ("README.md", "# no front matter\nlicense: mit", None),
        ("config.json", '{"license": "mit"}', Licence("mit", None, "config.json")),
        ("config.json", '{"license": 3}', None),
        ("LICENSE", "\n   Apache License\n Version 2.0", Licence("apache-2.0", "Apache License", "LICENSE")),
        ("LICENSE", "MIT License\n\nCopyright", Licence("mit", "MIT License", "LICENSE")),
        ("LICENSE.txt", "Modified MIT License\n", Licence("other", "Modified MIT License", "LICENSE.txt")),
        ("LICENCE", "Gemma Terms", Licence("other", "Gemma Terms", "LICENCE")),
        ("NOTES", "MIT License", None),
    ],
)
def test_licence_of_the_target(tmp_path: Path, name: str, text: str, expected: Licence | None) -> None:
    (tmp_path / name).write_text(text)
    assert find_licence(tmp_path) == expected


def test_licence_of_a_hub_model_is_read_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub" / "models--owner--tiny"
    for revision, licence in (("aaa", "mit"), ("bbb", "apache-2.0")):
        snapshot = cache / "snapshots" / revision
        snapshot.mkdir(parents=True)
        (snapshot / "README.md").write_text(f"---\nlicense: {licence}\n---\n")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("aaa")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    found = [find_licence(target_folder(TargetReference("owner/tiny", revision=r))) for r in (None, "bbb", "ccc")]
    assert [licence and licence.identifier for licence in found] == ["mit", "apache-2.0", None]
    assert find_licence(target_folder(TargetReference("owner/other"))) is None
    assert find_licence(target_folder(TargetReference("no/hub/name"))) is None
    assert target_folder(TargetReference(str(tmp_path))) == tmp_path


def test_licence_of_a_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "apache-2.0")
    assert find_licence(tmp_path / "none", tmp_path / "model.gguf") == Licence("apache-2.0", None, "model.gguf")
    write_gguf(tmp_path / "silent.gguf", None)
    assert find_licence(tmp_path / "none", tmp_path / "silent.gguf") is None
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    assert find_licence(tmp_path / "none", tmp_path / "damaged.gguf") is None
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert find_licence(tmp_path, tmp_path / "model.gguf").identifier == "mit"  # the card's word goes first

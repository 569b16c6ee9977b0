"""The model card of an export (README.md), in the form that model hubs read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from eyas.export.licence import Licence
from eyas.export.markdown import block, code, prose, table
from eyas.export.serving import sglang_command, speculation, vllm_command

SERVER_NAMES = {"sglang": "SGLang", "vllm": "vLLM"}
_UNKNOWN = "–"
_BASELINES = {"none": "no drafter", "ngram": "prompt lookup (n-gram)", "untrained": "untrained drafter"}


@dataclass(frozen=True)
class CardFacts:
    """What the cards of a drafter tell. All of it may hold text that others wrote."""

    drafter: str
    folder: str
    """The drafter's folder as it may be published, without `export/…`."""
    config: dict[str, Any]
    """The settings that may be published (eyas.plan.export.public_config)."""
    manifest: dict[str, Any]
    statistics: dict[str, Any]
    vocabulary: dict[str, Any]
    training: dict[str, Any]
    """trainer_state.json of the last epoch."""
    selection: dict[str, Any]
    evaluation: dict[str, Any] | None
    """evaluation.json; None where there is none, or one of another format."""
    on_hub: bool
    """Whether the target's path is a name on a model hub."""
    architectures: list[str]
    licence: Licence | None
    sglang_problem: str | None = None
    """Why SGLang cannot draft with it as it should."""

    @property
    def target(self) -> dict[str, Any]:
        target: dict[str, Any] = self.config["target"]
        return target

    @property
    def quantization(self) -> str | None:
        """How SGLang was told to compute the target, where it was."""
        stages = (self.config[stage].get("sglang") or {} for stage in ("evaluation", "extraction"))
        return next((str(options["quantization"]) for options in stages if options.get("quantization")), None)

    @property
    def target_name(self) -> str:
        return str(self.target["path"]).rstrip("/").rsplit("/", 1)[-1]

    @property
    def settings(self) -> dict[str, Any]:
        """How acceptance was measured, or would be."""
        settings: dict[str, Any] = (self.evaluation or {}).get("settings") or self.config["evaluation"]
        return settings


def render_card(facts: CardFacts, server: str) -> str:
    """README.md of the export for `server`: front matter, then what a person wants to know before serving it."""
    lines = [
        *_front_matter(facts, server),
        f"# EAGLE-3 drafter {code(facts.drafter)} for {code(facts.target_name)}",
        "",
        f"A one-layer EAGLE-3 draft model in the form that {SERVER_NAMES[server]} loads. It proposes tokens, which the"
        " target verifies: greedy output stays the target's own, and comes with fewer passes through the target."
        " Trained with Eyas; `provenance.json` beside this file says from what, with which versions and settings.",
        "",
        *_serving(facts, server),
        *_acceptance(facts),
        *_target(facts),
        *_data(facts),
        *_training(facts),
        *_vocabulary(facts),
        *_licence(facts),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _front_matter(facts: CardFacts, server: str) -> list[str]:
    values: dict[str, Any] = {
        "base_model": facts.target["path"] if facts.on_hub else facts.target_name,
        "license": facts.licence.identifier if facts.licence else "unknown",
    }
    if facts.licence and facts.licence.name and facts.licence.identifier == "other":
        values["license_name"] = facts.licence.name
    values |= {
        "library_name": server,
        "pipeline_tag": "text-generation",
        "tags": ["eagle3", "speculative-decoding", "draft-model", "eyas", server],
    }
    return ["---", *yaml.safe_dump(values, sort_keys=False, allow_unicode=True).splitlines(), "---", ""]


def _serving(facts: CardFacts, server: str) -> list[str]:
    folders = {name: f"{facts.folder}/export/{name}" for name in SERVER_NAMES}
    commands = {
        "sglang": sglang_command(facts.target, folders["sglang"], facts.settings, facts.quantization),
        "vllm": vllm_command(facts.target, folders["vllm"], facts.settings),
    }
    lines = ["## How to serve it", ""]
    for name in sorted(commands, key=lambda other: other != server):  # this folder's server first
        lines += [f"With {SERVER_NAMES[name]}:", ""]
        if name == "sglang" and facts.sglang_problem:
            lines += [f"**Not to be used there as it is:** {prose(facts.sglang_problem)}.", ""]
        lines += block(commands[name], "sh")
    other = next(name for name in commands if name != server)
    _, topk, _ = speculation(facts.settings)
    tree = " vLLM drafts chains, SGLang also trees; the figures below are of a tree." if topk > 1 else ""
    return [
        *lines,
        "The paths are those of the run; write others where target and drafter have been moved. A target on N GPUs"
        f" needs {code('--tp-size N')} for SGLang, {code('--tensor-parallel-size N')} for vLLM. This folder is for"
        f" {SERVER_NAMES[server]}, and {code(f'export/{other}')} for {SERVER_NAMES[other]}: they count the target's"
        f" layers differently. Each loads the other's folder without a word, and then few tokens are accepted.{tree}",
        "",
    ]


def _number(value: Any, digits: int = 2) -> str:
    return _UNKNOWN if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.{digits}f}"


def _share(value: Any) -> str:
    return _UNKNOWN if value is None else f"{100 * value:.1f}%"


def _lossless(value: Any) -> str:
    return {True: "yes", False: "**no**"}.get(value, _UNKNOWN)


def _acceptance(facts: CardFacts) -> list[str]:
    lines = ["## Acceptance", ""]
    evaluation = facts.evaluation
    if evaluation is None:
        return [*lines, "Not measured.", ""]
    steps, topk, tokens = speculation(facts.settings)
    shape = f"a chain of {steps}" if topk == 1 else f"a tree of {tokens} tokens (depth {steps}, topk {topk})"
    temperature = facts.settings.get("temperature") or 0.0
    lines += [
        f"Measured with {code(evaluation.get('engine', 'transformers'))}, {shape}, "
        + (f"temperature {temperature}" if temperature else "greedy")
        + f", up to {_number(facts.settings.get('max_new_tokens'))} tokens an answer.",
        "",
    ]
    rows = []
    for name, figures in (evaluation.get("prompt_sets") or {}).items():
        rows.append(_figures(f"{code(name)} ({_number(figures.get('prompts'))})", "**this drafter**", figures))
        for key, baseline in (figures.get("baselines") or {}).items():
            if baseline:
                rows.append(_figures("", _BASELINES.get(key) or code(key), baseline))
    header = [
        "prompt set (prompts)", "drafter", "acceptance length", "without looping outputs", "acceptance by step",
        "tokens per target forward", "tokens per second", "speedup", "lossless", "looping outputs",
    ]  # fmt: skip
    lines += table(header, rows) if rows else ["No prompt set was decoded.", ""]
    if any(_UNKNOWN in cell for row in rows for cell in row):
        lines += [f"{_UNKNOWN}: not measured, or nothing to compare with.", ""]
    offline = ((evaluation.get("offline") or {}).get("trained") or {}).get("expected_acceptance_length")
    if offline is not None:
        lines += [
            f"Expected from the hidden states of {_number(evaluation.get('held_out_rows'))} held-out rows:"
            f" {_number(offline)}.",
            "",
        ]
    definitions = evaluation.get("definitions") or {}
    if definitions:
        lines += [*(f"- {code(name)}: {prose(text)}" for name, text in definitions.items()), ""]
    return lines


def _figures(prompt_set: str, who: str, figures: dict[str, Any]) -> list[str]:
    by_step = figures.get("acceptance_by_step")
    clean = figures.get("without_looping") or {}
    return [
        prompt_set,
        who,
        _number(figures.get("acceptance_length")),
        _number(clean.get("acceptance_length")),
        " ".join(_number(share) for share in by_step) if by_step else _UNKNOWN,
        _number(figures.get("tokens_per_forward")),
        _number(figures.get("tokens_per_second"), 1),
        _number(figures.get("speedup")),
        _lossless(figures.get("lossless")),
        _share(figures.get("looping_share")),
    ]


def _target(facts: CardFacts) -> list[str]:
    path = str(facts.target["path"])
    rows = [["name", f"[{code(path)}](https://huggingface.co/{path})" if facts.on_hub else code(path)]]
    if revision := facts.target.get("revision"):
        rows.append(["revision", code(revision)])
    layers = ", ".join(map(str, facts.manifest["layers"]))
    rows += [
        ["architecture", ", ".join(map(code, facts.architectures)) or "not stated"],
        ["configuration", code(facts.manifest["target"].get("config_hash"))],
        ["hidden size", _number(facts.manifest["hidden_size"])],
        ["layers read", f"outputs of decoder layers {layers} (0-based), and the last state"],
        ["computed in", code(facts.manifest["target"].get("dtype"))],
    ]
    return ["## Target", "", *table(["", ""], rows)]


def _data(facts: CardFacts) -> list[str]:
    statistics, responses = facts.statistics, facts.config["responses"]
    answers = {
        "keep": "The answers are those of the data",
        "openai": "The answers are the target's own, over an endpoint",
    }.get(responses["engine"], "The answers are the target's own")
    how = f", temperature {responses['temperature']}" if responses["engine"] != "keep" else ""
    rows = [
        [code(name), *(_number(source.get(key)) for key in ("rows", "tokens", "supervised_tokens", "skipped"))]
        for name, source in statistics["sources"].items()
    ]
    total = ["all", *(_number(statistics[key]) for key in ("rows", "tokens", "supervised_tokens", "skipped_rows"))]
    return [
        "## Data",
        "",
        f"{answers}{how}. Every {facts.config['data']['held_out_every']}th row was kept out of training.",
        "",
        *table(["source", "rows", "tokens", "supervised tokens", "skipped rows"], [*rows, total]),
    ]


def _training(facts: CardFacts) -> list[str]:
    training, model = facts.config["drafter"]["training"], facts.config["drafter"]["model"]
    best, last = facts.selection["epoch"], facts.selection["last_epoch"]
    keys = (
        "ttt_steps", "loss_decay", "learning_rate", "schedule", "schedule_epochs", "warmup_steps", "weight_decay",
        "grad_clip", "batch_tokens", "precision",
    )  # fmt: skip
    rows = [
        ["epochs", f"{last}; this is epoch {best}, {prose(facts.selection['definition'])}"],
        ["started from", code(model["init_from"] or model["init"])],
        ["trained parameters", _number(facts.training["parameters"])],
        ["optimizer steps", _number(facts.training["step"])],
        *([code(key), code(training[key])] for key in keys if key in training),
    ]
    history = [
        [
            str(record["epoch"]),
            _number(record.get("loss"), 3),
            _number((record.get("held_out") or {}).get("loss"), 3),
            _number((record.get("held_out") or {}).get("acceptance_length"), 3),
        ]
        for record in facts.training["history"]
        if "loss" in record
    ]
    return [
        "## Training",
        "",
        *table(["", ""], rows),
        *table(["epoch", "loss", "held-out loss", "held-out expected acceptance length"], history),
    ]


def _vocabulary(facts: CardFacts) -> list[str]:
    vocabulary = facts.vocabulary
    return [
        "## Draft vocabulary",
        "",
        f"{_number(vocabulary['draft_vocab_size'])} of the target's {_number(vocabulary['vocab_size'])} tokens can be"
        f" drafted. They hold {_share(vocabulary['coverage'])} of the supervised tokens of the training rows and"
        f" {_share(vocabulary['coverage_held_out'])} of those of the held-out rows.",
        "",
    ]


def _licence(facts: CardFacts) -> list[str]:
    lines = ["## Licence", ""]
    if facts.licence is None:
        stated = "The target's licence is not stated in the target's folder; see the target's own page."
    else:
        name = f" ({code(facts.licence.name)})" if facts.licence.name else ""
        stated = (
            f"The target's licence is {code(facts.licence.identifier)}{name}, says {code(facts.licence.stated_in)}."
        )
    return [
        *lines,
        f"{stated} The drafter was trained on the target's hidden states and, where it has the target's width, holds"
        " its embedding: look there for what you may do with it. The data's sources have their own terms.",
        "",
    ]

"""A chat template that refuses a conversation costs that row, not the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from eyas.conversations import Row, read_rows
from eyas.regeneration.responses import respond_shard
from eyas.target.tokenizer import TargetReference
from eyas.tokenization import read_tokens, tokenize_shard
from recorded_rows import write_recorded_rows

REFUSING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system messages here') }}{% endif %}"


def test_a_refused_row_is_skipped_with_its_reason(tiny_target: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    template = folder / "chat_template.jinja"
    template.write_text(REFUSING + template.read_text())
    target = TargetReference(str(folder))
    user = {"role": "user", "content": "what follows baba ?"}
    write_recorded_rows(
        tmp_path / "rows_0-2.jsonl",
        [Row(0, "a:1", [{"role": "system", "content": "Be brief."}, user]), Row(1, "a:2", [user])],
        index=tmp_path / "index.json",
    )
    settings = {
        "engine": "transformers", "max_new_tokens": 4, "temperature": 0.0, "top_p": 1.0, "truncated": "keep",
        "seed": 0, "max_length": 64,
    }  # fmt: skip
    answered = tmp_path / "conversations" / "rows_0-2.jsonl"
    respond_shard(tmp_path / "rows_0-2.jsonl", answered, target, settings)
    first, second = read_rows(answered)
    assert first.skipped == "the chat template refuses it: no system messages here"
    assert second.skipped is None and second.messages[-1]["role"] == "assistant"

    # the data's own answers meet the template only when they are tokenised
    kept = tmp_path / "kept" / "rows_0-2.jsonl"
    answer = {"role": "assistant", "content": "bado baki"}
    write_recorded_rows(
        kept, [Row(0, "a:1", [{"role": "system", "content": "Be brief."}, user, answer]), Row(1, "a:2", [user, answer])]
    )
    tokens = tmp_path / "tokens" / "rows_0-2.safetensors"
    tokenize_shard(
        kept,
        tokens,
        target,
        {
            "max_length": 64,
            "overlong": "skip",
            "truncation_side": "right",
            "train_on": "all_turns",
            "reasoning": "train",
            "template_options": {},
        },
    )
    assert read_tokens(tokens).row_ids.tolist() == [1]
    assert "refuses it" in json.loads(tokens.with_suffix(".json").read_text())["skipped"][0]["reason"]

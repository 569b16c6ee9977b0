"""Token ids and loss masks, against a reference that joins the pieces of ChatML by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eyas.conversations import Row
from eyas.errors import EyasError
from eyas.shards import map_arrays
from eyas.target.tokenizer import TargetReference, TemplateRefusal, end_of_turn_ids, tokenizer_hashes
from eyas.tokenization import read_tokens, tokenize_shard
from eyas.tokenization.mask import Encoder, UnusableRow
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recorded_rows import write_recorded_rows
from tiny import TEMPLATE, make_tokenizer, tiny_config

Messages = list[dict[str, str]]
TOKENIZER = make_tokenizer()
START, END = TOKENIZER.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
TALK: Messages = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what follows bado ?"},
    {"role": "assistant", "content": "kilu meno"},
    {"role": "user", "content": "kilu meno"},  # the words of the assistant: a mask found by searching marks them
    {"role": "assistant", "content": "naïve 🦅"},
]


def pieces(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def reference(messages: Messages, supervised: set[int] | None = None) -> tuple[list[int], list[int]]:
    """ChatML joined from special ids and plain text; a byte-level token has one character per byte.

    `supervised` are the indices of the messages to mark; all assistant turns if None.
    """
    ids: list[int] = []
    mask: list[int] = []
    for index, message in enumerate(messages):
        marked = message["role"] == "assistant" if supervised is None else index in supervised
        header = len(f"{message['role']}\n".encode())
        ids.append(START)
        mask.append(0)
        position = 0
        for token in pieces(f"{message['role']}\n{message['content']}"):
            ids.append(token)
            mask.append(int(marked and position >= header))
            position += len(TOKENIZER.convert_ids_to_tokens(token))
        ids.append(END)
        mask.append(int(marked))
        after = pieces("\n")  # the separator behind a turn: the template's, not the target's
        ids += after
        mask += [0] * len(after)
    return ids, mask


def encoded(messages: Messages, template: str = TEMPLATE, **options: Any) -> tuple[list[int], list[int]]:
    tokenizer = make_tokenizer() if template != TEMPLATE else TOKENIZER
    tokenizer.chat_template = template
    [(ids, mask)] = Encoder(tokenizer, [END]).encode(messages, **options)
    assert (ids.dtype, mask.dtype) == (np.int32, np.uint8)
    return ids.tolist(), mask.tolist()


def said(ids: list[int], mask: list[int]) -> str:
    """The supervised text."""
    return TOKENIZER.decode([i for i, m in zip(ids, mask, strict=True) if m])


# ---- one conversation


def test_talk_of_several_turns():
    ids, mask = encoded(TALK)
    assert (ids, mask) == reference(TALK)
    assert said(ids, mask) == "kilu meno<|im_end|>naïve 🦅<|im_end|>"
    assert TOKENIZER.decode(ids) == TOKENIZER.apply_chat_template(TALK, tokenize=False)


CONTENT = st.text(st.characters(codec="utf-8"), max_size=12)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(user=st.lists(CONTENT, min_size=1, max_size=3), reply=st.lists(CONTENT, min_size=3, max_size=3), system=CONTENT)
@example(user=["assistant\n"], reply=["", "", ""], system="")  # an empty answer still ends
@example(user=[" \n"], reply=["\n\n a", "", ""], system="\n")
@example(user=["👩‍👩‍👧"], reply=["é\u0301👩‍👩‍👧\r\n", "", ""], system="\u2028")
def test_any_text_in_any_turn(user: list[str], reply: list[str], system: str):
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in zip(user, reply, strict=False):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    assert encoded(messages) == reference(messages)


def test_special_tokens_in_an_answer_are_the_targets_own_until_its_end():
    messages = [TALK[1], {"role": "assistant", "content": "ki<|im_end|>lu"}]
    ids, mask = encoded(messages)
    assert said(ids, mask) == "ki<|im_end|>lu<|im_end|>"


def test_cut_off_answer_has_no_end_of_turn():
    ids, mask = encoded(TALK, cut_off=True)
    whole_ids, whole_mask = reference(TALK)
    length = len(whole_ids) - 1 - len(pieces("\n"))  # neither the end nor the separator
    assert (ids, mask) == (whole_ids[:length], whole_mask[:length])
    assert said(ids, mask) == "kilu meno<|im_end|>naïve 🦅" and mask[-1] == 1


@pytest.mark.parametrize("messages", [TALK[:2], [TALK[1]]])
def test_nothing_supervised_is_unusable(messages: Messages):
    with pytest.raises(UnusableRow, match="no supervised token"):
        Encoder(TOKENIZER, [END]).encode(messages)


def test_open_user_turn_at_the_end_is_not_supervised():
    assert encoded(TALK[:4]) == reference(TALK[:4], supervised={2})


GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and MARKED %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("tag", ["{% generation %}", "{%- generation %}", "{%- generation -%}", "{%generation%}"])
def test_template_that_marks_the_generation(tag: str):
    template = GENERATION.replace("{% generation %}", tag)
    assert encoded(TALK, template.replace("MARKED", "true")) == reference(TALK)
    # The template's word counts, also where it marks less than the turns.
    assert encoded(TALK, template.replace("MARKED", "loop.last")) == reference(TALK, supervised={4})


def test_cut_off_with_a_template_that_marks_the_generation():
    assert encoded(TALK, GENERATION.replace("MARKED", "true"), cut_off=True) == encoded(TALK, cut_off=True)


def test_earlier_turn_that_the_template_changes_is_not_supervised():
    """Templates drop the thinking of earlier turns: then the target never wrote what is rendered there."""
    template = TEMPLATE.replace(
        "message['content'] + '<|im_end|>'",
        "(message['content'] if loop.last or message['role'] != 'assistant' else message['content'][:4])"
        " + '<|im_end|>'",
    )
    assert template != TEMPLATE
    shown = [dict(message) for message in TALK]
    shown[2]["content"] = "kilu"
    assert encoded(TALK, template) == reference(shown, supervised={4})


def test_template_whose_generation_prompt_is_not_in_the_conversation():
    template = TEMPLATE.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>' }}")
    assert template != TEMPLATE
    ids, mask = encoded(TALK, template)
    assert (ids, mask) == reference(TALK)  # from where the answers themselves begin


def test_template_that_refuses():
    with pytest.raises(TemplateRefusal, match="the chat template refuses it: no system please"):
        encoded(TALK, "{{ raise_exception('no system please') }}")


# ---- a shard


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetReference:
    """A folder with tokenizer and config.json; the weights are not needed to tokenise."""
    folder = tmp_path_factory.mktemp("target")
    make_tokenizer().save_pretrained(folder)
    tiny_config(len(TOKENIZER)).save_pretrained(folder)
    return TargetReference(str(folder))


ROWS = [
    Row(10, "p:11", TALK[1:3], None, "stop", 3),
    Row(11, "p:12", skipped="bad record: empty conversation"),
    Row(12, "p:13", [TALK[1], {"role": "assistant", "content": "kilu " * 40}], None, "stop", 90),
    Row(13, "p:14", TALK[:2]),
    Row(14, "p:15", TALK, None, "length", 3),
    Row(15, "p:16", [{"role": "user", "content": "kilu " * 40}, TALK[2]], None, "stop", 3),
]
LIMIT = 60


def shard(tmp_path: Path, target: TargetReference, rows: list[Row], overlong: str) -> tuple[Path, dict[str, Any]]:
    write_recorded_rows(tmp_path / "in.jsonl", rows)
    output = tmp_path / "tokens" / "rows_10-16.safetensors"
    tokenize_shard(
        tmp_path / "in.jsonl",
        output,
        target,
        {
            "max_length": LIMIT,
            "overlong": overlong,
            "truncation_side": "right",
            "train_on": "all_turns",
            "reasoning": "train",
            "template_options": {},
        },
    )
    return output, json.loads(output.with_suffix(".json").read_text())


def test_shard_skips_with_reasons(tmp_path: Path, target: TargetReference):
    output, facts = shard(tmp_path, target, ROWS, "skip")
    tokens = read_tokens(output)
    expected = [encoded(ROWS[0].messages), encoded(TALK, cut_off=True)]
    assert tokens.row_ids.tolist() == [10, 14]
    assert tokens.input_ids.tolist() == expected[0][0] + expected[1][0]
    assert tokens.loss_mask.tolist() == expected[0][1] + expected[1][1]
    assert tokens.offsets.tolist() == [0, len(expected[0][0]), len(expected[0][0]) + len(expected[1][0])]
    raw = map_arrays(output, ("input_ids", "loss_mask", "offsets", "row_ids"))
    assert [raw[n].dtype for n in raw] == [np.int32, np.uint8, np.int64, np.int64]
    reasons = {entry["row"]: entry["reason"] for entry in facts["skipped"]}
    assert sorted(reasons) == [11, 12, 13, 15]
    assert reasons[11] == "bad record: empty conversation"
    length = len(encoded(ROWS[2].messages)[0])
    assert reasons[12] == f"too long: {length} tokens, more than tokenization.max_length = {LIMIT}"
    assert "no supervised token" in reasons[13]
    assert (facts["rows"], facts["tokens"], facts["supervised_tokens"]) == (
        2, len(tokens.input_ids), int(tokens.loss_mask.sum())
    )  # fmt: skip
    assert facts["tokenizer_hash"] == tokenizer_hashes(TOKENIZER)["tokenizer_hash"]
    assert not (output.parent / ".staging").exists()


def test_shard_truncates(tmp_path: Path, target: TargetReference):
    output, facts = shard(tmp_path, target, ROWS, "truncate")
    tokens = read_tokens(output)
    assert tokens.row_ids.tolist() == [10, 12, 14]
    ids, mask = encoded(ROWS[2].messages)
    begin, end = tokens.offsets[1:3]
    assert (tokens.input_ids[begin:end].tolist(), tokens.loss_mask[begin:end].tolist()) == (ids[:LIMIT], mask[:LIMIT])
    reasons = {entry["row"]: entry["reason"] for entry in facts["skipped"]}
    assert f"no supervised token among the first {LIMIT}" in reasons[15]  # its answer lies behind the cut


def test_row_of_exactly_the_limit_is_kept(tmp_path: Path, target: TargetReference):
    content = "kilu"
    while len(encoded([TALK[1], {"role": "assistant", "content": content}])[0]) < LIMIT:
        content += "\u0001"  # a token each
    row = Row(10, "p:11", [TALK[1], {"role": "assistant", "content": content}])
    output, facts = shard(tmp_path, target, [row], "skip")
    assert read_tokens(output).lengths.tolist() == [LIMIT] and facts["skipped"] == []


def test_shard_without_a_usable_row(tmp_path: Path, target: TargetReference):
    output, facts = shard(tmp_path, target, [ROWS[1], ROWS[3]], "skip")
    tokens = read_tokens(output)
    assert (len(tokens), tokens.offsets.tolist(), len(tokens.input_ids)) == (0, [0], 0)
    assert (facts["rows"], len(facts["skipped"])) == (0, 2)


def test_same_conversations_same_bytes(tmp_path: Path, target: TargetReference):
    def both(folder: Path) -> tuple[bytes, bytes]:
        folder.mkdir()
        output, _ = shard(folder, target, ROWS, "skip")
        return output.read_bytes(), output.with_suffix(".json").read_bytes()

    assert both(tmp_path / "a") == both(tmp_path / "b")


@pytest.mark.parametrize("lacking", ["template", "tokenizer", "everything"])
def test_target_that_cannot_render(tmp_path: Path, lacking: str):
    folder = tmp_path / "target"
    folder.mkdir()
    words = "has no tokenizer"
    if lacking == "template":
        tokenizer = make_tokenizer()
        tokenizer.chat_template = None
        tokenizer.save_pretrained(folder)
        words = "has no chat template"
    if lacking != "everything":
        tiny_config(len(TOKENIZER)).save_pretrained(folder)
    with pytest.raises(EyasError, match=rf"^target\.path: .*{words}") as caught:
        shard(tmp_path, TargetReference(str(folder)), ROWS, "skip")
    assert str(folder) in str(caught.value)
    assert not (tmp_path / "tokens" / "rows_10-16.safetensors").exists()


def test_end_of_turn_ids_come_from_all_places(target: TargetReference, tmp_path: Path):
    assert end_of_turn_ids(target, TOKENIZER) == [END]
    config = tiny_config(len(TOKENIZER), eos_token_id=[7, 5])
    config.save_pretrained(tmp_path)
    assert end_of_turn_ids(TargetReference(str(tmp_path)), TOKENIZER) == sorted({END, 5, 7})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert end_of_turn_ids(TargetReference(str(tmp_path)), TOKENIZER) == sorted({END, 9})

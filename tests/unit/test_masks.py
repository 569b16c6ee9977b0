"""Ids and masks of many chat families, against references that join the pieces of each format by hand."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_families import FAMILIES, FREE, Encoded, Family, Message, plan, reference, without_thinking
from eyas.conversations import Row
from eyas.target.chat import ChatTemplate
from eyas.target.tokenizer import TargetReference, TemplateRefusal
from eyas.tokenization import read_tokens, tokenize_shard
from eyas.tokenization.mask import Encoder, UnusableRow
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recorded_rows import write_recorded_rows
from tiny import tiny_config

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look a word up",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]
EVERY = list(FAMILIES)
THINKING = [name for name, family in FAMILIES.items() if family.thinking]
CALLING = [name for name, family in FAMILIES.items() if family.calls]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str, thought: str | None = None) -> Message:
    return {"role": "assistant", "content": text} | ({"reasoning_content": thought} if thought else {})


def round_of_calls(
    family: Family, word: str = "kilu", content: str = "", thought: str | None = None, result: str = 'it\'s "so"'
) -> list[Message]:
    """A turn that calls as often as the family can, and the results."""
    calls = [
        {
            "id": family.call_id.format(k),
            "type": "function",
            "function": {"name": "look", "arguments": {"word": word, "count": k}},
        }
        for k in range(family.calls)
    ]
    results = [{"role": "tool", "content": result, "tool_call_id": call["id"], "name": "look"} for call in calls]
    return [answer(content, thought) | {"tool_calls": calls}, *results]


def encoded(family: Family, messages: list[Message], cut_off: bool = False, **ways: Any) -> list[Encoded]:
    tools = ways.pop("tools", None)
    before = copy.deepcopy((messages, tools))
    encoder = Encoder(family.tokenizer, family.end_ids, **ways)
    sequences = encoder.encode(messages, tools=tools, cut_off=cut_off)
    assert (messages, tools) == before, "the caller's messages were changed"
    for ids, mask in sequences:
        assert (ids.dtype, mask.dtype, ids.shape) == (np.int32, np.uint8, mask.shape)
        assert set(mask.tolist()) <= {0, 1} and mask.any()
    return [(ids.tolist(), mask.tolist()) for ids, mask in sequences]


def check(family: Family, messages: list[Message], **ways: Any) -> list[Encoded]:
    """Compare with the reference, and the supervised text with what the assistant wrote by it."""
    expected = [sequence for sequence in reference(family, messages, **ways) if 1 in sequence[1]]
    found = encoded(family, messages, **ways)
    decode = family.tokenizer.decode
    assert [decode(ids) for ids, _ in found] == [decode(ids) for ids, _ in expected]
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    settled = [
        [want if want != FREE else have for have, want in zip(mask, wanted, strict=True)]
        for (_, mask), (_, wanted) in zip(found, expected, strict=True)
    ]
    shown = [said(family, ids, mask) for ids, mask in found]
    assert shown == [said(family, ids, mask) for (ids, _), mask in zip(expected, settled, strict=True)]
    assert [mask for _, mask in found] == settled
    return found


def said(family: Family, ids: list[int], mask: list[int]) -> str:
    """The supervised text; turns joined by `|`."""
    text, run = [], []
    for token, marked in [*zip(ids, mask, strict=True), (0, 0)]:
        if marked:
            run.append(token)
        elif run:
            text.append(family.tokenizer.decode(run))
            run = []
    return "|".join(text)


# ---- the templates and the formats by hand say the same


def conversations(family: Family) -> Iterator[tuple[list[Message], Any]]:
    """Conversations in whose rendering the family's peculiarities show, with and without tools."""
    system = {"role": "system", "content": " be brief\n"}
    plain = [user(" kilu? "), answer("meno\n"), user("🦅"), answer(" naïve ")]
    yield plain, None
    yield [system, *plain], None
    yield [{"role": "system", "content": ""}, *plain], None
    if not family.opens:  # there, an empty answer stands behind another prompt and has nothing to find it by
        yield [user("what?"), answer("")], None
    if family.thinking:
        yield [user("a"), answer("b", "hm\n"), user("c"), answer("\nd", "\n so ")], None
        yield [user("a"), answer("b"), user("c"), answer("d", "hm")], None
    if family.calls:
        for tools in (None, TOOLS):
            yield [system, user("a"), *round_of_calls(family), answer("b"), user("c"), answer("d")], tools
            yield [user("a"), *round_of_calls(family), *round_of_calls(family, "é"), answer("b")], tools
            yield [user("a"), *round_of_calls(family)], tools
            if family.thinking:
                calls = round_of_calls(family, thought="look")
                yield [user("a"), *calls, answer("b", "hm"), user("c"), *calls, answer("d", "so")], tools
                yield [user("a"), answer("b"), user("c"), *calls, *round_of_calls(family)], tools
        if family.text_with_call:
            yield [user("a"), *round_of_calls(family, content="I look."), answer("b")], TOOLS


def options_of(family: Family) -> list[dict[str, Any]]:
    more: dict[str, list[dict[str, Any]]] = {
        "qwen3": [{"enable_thinking": False}],
        "kimi_k25": [{"thinking": False}],
        "llama3": [{"builtin_tools": ["look"]}, {"builtin_tools": ["other"]}],
        "harmony": [{"reasoning_effort": "high"}],
    }
    return [{}, *more.get(family.name, [])]


@pytest.mark.parametrize("name", EVERY)
def test_template_renders_the_format_by_hand(name: str) -> None:
    family = FAMILIES[name]
    for messages, tools in conversations(family):
        for options in options_of(family):
            if "builtin_tools" in options:
                messages = with_texts_only(messages)
            rendered = family.tokenizer.apply_chat_template(
                family.native(messages), tools=tools, tokenize=False, **options
            )
            kept = messages if family.thinking else without_thinking(messages)
            assert rendered == family.script(kept, tools, options).text
            # And control tokens are what the tokenizer makes of them.
            ids = reference(family, messages, tools=tools, options=options)[0][0]
            if family.thinking is None:
                assert ids == family.tokenizer(rendered, add_special_tokens=False)["input_ids"]


def with_texts_only(messages: list[Message]) -> list[Message]:
    """Built-in tools of Llama take texts as arguments."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = {"word": "kilu"}
    return messages


# ---- every conversation, every way


@pytest.mark.parametrize("train_on", ["all_turns", "last_turn"])
@pytest.mark.parametrize("reasoning", ["train", "mask", "strip"])
@pytest.mark.parametrize("name", EVERY)
def test_conversations(name: str, reasoning: str, train_on: str) -> None:
    family = FAMILIES[name]
    for messages, tools in conversations(family):
        for options in options_of(family):
            if "builtin_tools" in options:
                messages = with_texts_only(messages)
            check(family, messages, tools=tools, options=options, reasoning=reasoning, train_on=train_on)


def test_generation_tags_mean_what_transformers_takes_them_for() -> None:
    """The mask of transformers itself, also where a token reaches from the header into the answer."""
    family = FAMILIES["generation"]
    for text in ("kilu", "\n\nkilu", " \n", "", "🦅\n"):
        messages = [user("a"), answer(text), user("b"), answer(text)]
        whole = family.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert encoded(family, messages) == [(whole["input_ids"], whole["assistant_masks"])]


@pytest.mark.parametrize("name", EVERY)
def test_ids_are_the_tokenizers_own_for_the_whole_rendering(name: str) -> None:
    family = FAMILIES[name]
    messages = [{"role": "system", "content": "be brief"}, user("x \n"), answer("\n\n 🦅 y"), user("é"), answer("z")]
    text = family.tokenizer.apply_chat_template(messages, tokenize=False)
    [(ids, _)] = encoded(family, messages)
    assert ids == family.tokenizer(text, add_special_tokens=False)["input_ids"]


LAST = {
    "harmony": "<|channel|>final<|message|>",
    "qwen3": "<think>\n\n</think>\n\n",
    "kimi_k2_thinking": "<think></think>",
}


@pytest.mark.parametrize("name", EVERY)
def test_supervised_text_is_the_answer_and_its_end(name: str) -> None:
    """Literal expectations, beside the reference."""
    family = FAMILIES[name]
    messages = [user("who?"), answer("It is 🦅, naïve."), user("It is 🦅, naïve."), answer("kilu")]
    head = LAST.get(name, "</think>" if name == "kimi_k25" else "")
    end = {"gemma": "<end_of_turn>", "harmony": "<|return|>", "llama3": "<|eot_id|>"}.get(name)
    end = end or ("<|im_end|>" if name.startswith("kimi") else family.ends[0])
    earlier_head = "" if name == "qwen3" else head
    earlier_end = "<|end|>" if name == "harmony" else end
    [(ids, mask)] = check(family, messages)
    assert said(family, ids, mask) == f"{earlier_head}It is 🦅, naïve.{earlier_end}|{head}kilu{end}"


# ---- any text


def texts(family: Family, spaces: bool = True) -> st.SearchStrategy[str]:
    """Unicode, combining marks, line ends, outer white space, and the family's special tokens written out."""
    parts = st.one_of(
        st.sampled_from(
            ["é\u0301", "👩‍👩‍👧", "🦅", "\r\n", " \n", "\n\n", "a b", "assistant\n", "\u2028", "漢", *family.special]
        ),
        st.text(st.characters(codec="utf-8"), max_size=4),
    )
    text = st.lists(parts, max_size=4).map("".join)
    return text if spaces else text.map(lambda t: f"x{t}y")


@st.composite
def talks(draw: st.DrawFn, family: Family) -> tuple[list[Message], Any]:
    """A conversation with everything that the family knows."""
    # Where the prompt is not in the conversation, or behind thinking, a turn begins with what it says: with a
    # visible character here. And a history does not show where a turn without words ends, once its thinking is gone.
    visible = texts(family, spaces=False)
    said_text = visible if family.opens or family.name == "mistral" else texts(family)
    if family.thinking and not family.opens:
        said_text = st.tuples(st.sampled_from(["", " ", "\n", "\r\n"]), visible, texts(family)).map("".join)
    thoughts = st.one_of(st.none(), texts(family).map(lambda t: f"{t}.")) if family.thinking else st.none()
    messages = [{"role": "system", "content": draw(texts(family))}] if draw(st.booleans()) else []
    hidden = False
    for number in range(draw(st.integers(1, 3))):
        # Mistral takes questions of the same words for one: see test_mistral_asked_the_same_twice.
        messages.append(user(draw(texts(family)) + (str(number) if family.name == "mistral" else "")))
        for _ in range(draw(st.integers(0, 2)) if family.calls else 0):
            thought = draw(thoughts)
            hidden = hidden or thought is not None
            content = draw(st.just("") | (visible if hidden else said_text)) if family.text_with_call else ""
            word, result = draw(texts(family)), draw(texts(family))
            messages += round_of_calls(family, word, content, thought, result)
        thought = draw(thoughts)
        messages.append(answer(draw(visible if hidden or thought else said_text), thought))
    return messages, TOOLS if family.calls and draw(st.booleans()) else None


@pytest.mark.parametrize("name", EVERY)
def test_any_text_in_any_turn(name: str) -> None:
    family = FAMILIES[name]
    specials = "".join(family.special)

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(
        talk=talks(family),
        train_on=st.sampled_from(["all_turns", "last_turn"]),
        reasoning=st.sampled_from(["train", "mask", "strip"]),
    )
    @example(talk=([user(specials), answer(f"x{specials}y")], None), train_on="all_turns", reasoning="train")
    @example(talk=([user("\n"), answer("x", None)], None), train_on="last_turn", reasoning="strip")
    def holds(talk: tuple[list[Message], Any], train_on: str, reasoning: str) -> None:
        messages, tools = talk
        check(family, messages, tools=tools, train_on=train_on, reasoning=reasoning)

    holds()


@pytest.mark.parametrize("name", EVERY)
def test_special_tokens_in_a_text_are_no_control_tokens(name: str) -> None:
    family = FAMILIES[name]
    ids_of = family.tokenizer.convert_tokens_to_ids
    plain = [user("kilu"), answer("meno")]
    spelled = [user(f"kilu{''.join(family.special)}"), answer(f"meno {family.ends[0]} and more")]
    [(expected, _)] = encoded(family, plain)
    [(ids, mask)] = check(family, spelled)
    special = set(ids_of(list(family.special)))
    assert [token for token in ids if token in special] == [token for token in expected if token in special]
    rendered = family.tokenizer.apply_chat_template(spelled, tokenize=False)
    assert family.tokenizer.decode(ids) == rendered
    # What the answer spells does not end its turn.
    assert f"meno {family.ends[0]} and more" in said(family, ids, mask)


@pytest.mark.parametrize("name", EVERY)
def test_empty_answers_do_not_reach_into_the_next_turn(name: str) -> None:
    family = FAMILIES[name]
    for first in ("", " ", "\n\n"):
        [(ids, mask)] = encoded(family, [user("asked"), answer(first), user("SECRET"), answer("kilu")])
        assert "SECRET" in family.tokenizer.decode(ids)
        shown = said(family, ids, mask)
        assert "SECRET" not in shown and "user" not in shown
        assert "kilu" in shown and mask[-1] == (family.tokenizer.decode(ids[-1:]) != "\n")


# ---- thinking


@pytest.mark.parametrize("reasoning", ["train", "mask", "strip"])
@pytest.mark.parametrize("name", THINKING)
def test_inline_thinking_is_reasoning_content(name: str, reasoning: str) -> None:
    family = FAMILIES[name]
    given_apart = [user("a"), answer("b", "hm"), user("c"), answer("d", "so it is")]
    inline = [user("a"), answer("<think>\nhm\n</think>\n\nb"), user("c"), answer("<think>so it is</think>d")]
    assert encoded(family, inline, reasoning=reasoning) == encoded(family, given_apart, reasoning=reasoning)


@pytest.mark.parametrize("name", [name for name in EVERY if name not in THINKING])
def test_templates_without_thinking_get_none(name: str) -> None:
    family = FAMILIES[name]
    thought, plain = [user("a"), answer("b", "hm")], [user("a"), answer("b")]
    for reasoning in ("train", "mask", "strip"):
        assert encoded(family, thought, reasoning=reasoning) == encoded(family, plain)


def test_qwen3_one_sequence_for_each_turn_whose_thinking_is_dropped_later() -> None:
    family = FAMILIES["qwen3"]
    messages = [user("a"), answer("b", "hm"), user("c"), answer("d", "so")]
    found = check(family, messages)
    decoded = [family.tokenizer.decode(ids) for ids, _ in found]
    first = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    second = f"{first}b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert decoded == [
        f"{first}<think>\nhm\n</think>\n\nb<|im_end|>\n",
        f"{second}<think>\nso\n</think>\n\nd<|im_end|>\n",
    ]
    assert [said(family, *sequence) for sequence in found] == [
        "<think>\nhm\n</think>\n\nb<|im_end|>",
        "<think>\nso\n</think>\n\nd<|im_end|>",
    ]
    assert check(family, messages, train_on="last_turn") == found[1:]
    [masked] = check(family, messages, reasoning="mask")
    assert said(family, *masked) == "b<|im_end|>|d<|im_end|>"
    assert masked[0] == found[1][0]
    [stripped] = check(family, messages, reasoning="strip")
    assert said(family, *stripped) == "b<|im_end|>|<think>\n\n</think>\n\nd<|im_end|>"


def test_qwen3_thinking_before_tool_calls_stays_in_one_sequence() -> None:
    family = FAMILIES["qwen3"]
    messages = [user("a"), *round_of_calls(family, thought="look"), answer("b", "hm")]
    [sequence] = check(family, messages, tools=TOOLS)
    shown = said(family, *sequence)
    assert shown.startswith('<think>\nlook\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"word": "kilu"')
    assert shown.endswith("</tool_call><|im_end|>|<think>\nhm\n</think>\n\nb<|im_end|>")


def test_qwen3_prompt_that_closes_the_thinking() -> None:
    """The empty block is the prompt's then, not the target's."""
    family = FAMILIES["qwen3"]
    [sequence] = check(family, [user("a"), answer("b"), user("c"), answer("d")], options={"enable_thinking": False})
    assert said(family, *sequence) == "b<|im_end|>|d<|im_end|>"


def test_harmony_channels() -> None:
    family = FAMILIES["harmony"]
    messages = [user("a"), answer("b", "hm"), user("c"), answer("d", "so")]
    assert [said(family, *sequence) for sequence in check(family, messages)] == [
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{text}<|return|>"
        for thought, text in (("hm", "b"), ("so", "d"))
    ]
    calling = [user("a"), *round_of_calls(family, thought="look")]
    [sequence] = check(family, calling, tools=TOOLS)
    assert said(family, *sequence) == (
        "<|channel|>analysis<|message|>look<|end|><|start|>assistant to=functions.look<|channel|>commentary json"
        '<|message|>{"word": "kilu", "count": 0}<|call|>'
    )


def test_deepseek_r1_thinking_is_written_out_behind_its_prompt() -> None:
    """Its template shows no thinking in answers, but its prompt opens it: without it the target never wrote this."""
    family = FAMILIES["deepseek_r1"]
    found = check(family, [user("a"), answer("b", "hm"), user("c"), answer("d", "so")])
    assert [said(family, *s) for s in found] == [
        "hm\n</think>\n\nb<｜end▁of▁sentence｜>",
        "so\n</think>\n\nd<｜end▁of▁sentence｜>",
    ]
    assert family.tokenizer.decode(found[0][0]).startswith(
        "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜><think>\nhm\n"
    )


# ---- cut off


@pytest.mark.parametrize("reasoning", ["train", "mask", "strip"])
@pytest.mark.parametrize("name", EVERY)
def test_cut_off_answer_has_no_end_of_turn(name: str, reasoning: str) -> None:
    family = FAMILIES[name]
    thought = "hm" if family.thinking else None
    messages = [user("a"), answer("b", thought), user("c"), answer("It was kilu, me", thought)]
    found = check(family, messages, cut_off=True, reasoning=reasoning)
    whole = encoded(family, messages, reasoning=reasoning)
    assert len(found) == len(whole) and found[:-1] == whole[:-1]
    ids, mask = found[-1]
    assert ids == whole[-1][0][: len(ids)] and len(ids) < len(whole[-1][0])
    assert said(family, ids, mask).endswith("It was kilu, me") and mask[-1] == 1


@pytest.mark.parametrize("name", ["qwen3", "harmony", "deepseek_r1", "kimi_k25"])
def test_cut_off_within_the_thinking(name: str) -> None:
    """The sequence ends with the last token that the target wrote; it never closed its thinking."""
    family = FAMILIES[name]
    head = {"qwen3": "<think>\n", "harmony": "<|channel|>analysis<|message|>"}.get(name, "")
    [(ids, mask)] = encoded(family, [user("a"), answer("", "so it w")], cut_off=True)
    assert said(family, ids, mask) == f"{head}so it w" and mask[-1] == 1


@pytest.mark.parametrize("name", ["deepseek_r1", "kimi_k25"])
def test_cut_off_within_the_thinking_keeps_earlier_answers(name: str) -> None:
    messages = [user("a"), answer("b", "hm"), user("c"), answer("", "so it w")]
    family = FAMILIES[name]
    first, last = encoded(family, messages, cut_off=True)
    assert [first] == encoded(family, messages[:2])
    assert said(family, *last) == "so it w"
    [masked] = encoded(family, messages, cut_off=True, reasoning="mask")
    assert said(family, *masked).count("b") == 1 and "so it w" not in said(family, *masked)


@pytest.mark.parametrize(
    ("name", "end"), [("qwen3", "<|im_end|>"), ("harmony", "<|return|>"), ("kimi_k25", "<|im_end|>")]
)
def test_thinking_alone_closes_once(name: str, end: str) -> None:
    family = FAMILIES[name]
    [(ids, mask)] = encoded(family, [user("a"), answer("", "so it w")])
    assert said(family, ids, mask).count("</think>") == (name != "harmony") and said(family, ids, mask).endswith(end)
    [(ids, mask)] = encoded(family, [user("a"), answer("", "so it w")], reasoning="mask")
    assert said(family, ids, mask) == end


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3", "harmony", "kimi_k25"])
def test_masked_thinking_without_an_answer_is_unusable(name: str) -> None:
    with pytest.raises(UnusableRow, match="no supervised token"):
        encoded(FAMILIES[name], [user("a"), answer("", "so it w")], cut_off=True, reasoning="mask")


@pytest.mark.parametrize("thought", ["hm", "\nhm"])
def test_masked_thinking_ends_before_the_white_space_of_the_answer(thought: str) -> None:
    family = FAMILIES["qwen3"]
    [(ids, mask)] = encoded(family, [user("a"), answer("  kilu", thought)], reasoning="mask")
    assert said(family, ids, mask) == "  kilu<|im_end|>"


@pytest.mark.parametrize("asked", ["go on, please", "go on"])
def test_mistral_asked_the_same_twice(asked: str) -> None:
    """The template puts tools before each question with the words of the last one."""
    family = FAMILIES["mistral"]
    messages = [{"role": "system", "content": "be brief"}, user("go on"), answer("b"), user(asked), answer("d")]
    [sequence] = check(family, messages, tools=TOOLS)
    assert said(family, *sequence) == "b</s>|d</s>"


# ---- what cannot be used


@pytest.mark.parametrize("name", EVERY)
def test_nothing_to_supervise(name: str) -> None:
    with pytest.raises(UnusableRow, match="no supervised token"):
        encoded(FAMILIES[name], [user("a")])


REFUSED = {
    "gemma": ([user("a"), user("b"), answer("c")], "must alternate"),
    "llama3": (
        [user("a"), {**answer(""), "tool_calls": round_of_calls(FAMILIES["qwen3"])[0]["tool_calls"]}],
        "single tool-calls at once",
    ),
    "mistral": (
        [user("a"), {**answer(""), "tool_calls": round_of_calls(FAMILIES["kimi_k2"])[0]["tool_calls"]}],
        "length 9",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refusals_of_templates(name: str) -> None:
    messages, words = REFUSED[name]
    with pytest.raises(TemplateRefusal, match=f"the chat template refuses it: .*{words}"):
        encoded(FAMILIES[name], messages)


def test_calls_for_a_template_without_calls() -> None:
    """A template that leaves calls out would teach the target to answer nothing."""
    for name in ("smollm2", "gemma"):
        with pytest.raises((UnusableRow, TemplateRefusal)):
            encoded(FAMILIES[name], [user("a"), *round_of_calls(FAMILIES["qwen3"]), answer("b")], tools=TOOLS)


# ---- prompts


@pytest.mark.parametrize("name", EVERY)
def test_prompt_is_a_prefix_of_what_is_trained_on(name: str) -> None:
    """What the target is asked in-process, and what its answer is trained behind: the same ids."""
    family = FAMILIES[name]
    chat = ChatTemplate(family.tokenizer, {})
    history = [user(f"kilu {family.special[0]}")]
    prompt = chat.prompt_ids(history)
    [(ids, mask)] = encoded(family, [*history, answer("meno", "hm" if family.thinking else None)])
    assert ids[: len(prompt)] == prompt
    assert mask.index(1) == len(prompt)


# ---- a shard


def shard(
    tmp_path: Path, family: Family, rows: list[Row], **changes: Any
) -> tuple[dict[int, list[Encoded]], dict[int, str]]:
    """Sequences by row, and the reasons of the skipped rows."""
    folder = tmp_path / "target"
    if not folder.exists():
        family.tokenizer.save_pretrained(folder)
        tiny_config(len(family.tokenizer), eos_token_id=family.end_ids).save_pretrained(folder)
    write_recorded_rows(tmp_path / "in.jsonl", rows)
    output = tmp_path / "tokens" / f"rows_0-{len(rows)}.safetensors"
    values = {
        "max_length": 1000, "overlong": "skip", "truncation_side": "right", "train_on": "all_turns",
        "reasoning": "train", "template_options": {}, **changes,
    }  # fmt: skip
    tokenize_shard(tmp_path / "in.jsonl", output, TargetReference(str(folder)), values)
    tokens = read_tokens(output)
    found: dict[int, list[Encoded]] = {}
    for k, row in enumerate(tokens.row_ids.tolist()):
        a, b = tokens.offsets[k : k + 2]
        found.setdefault(row, []).append((tokens.input_ids[a:b].tolist(), tokens.loss_mask[a:b].tolist()))
    facts = json.loads(output.with_suffix(".json").read_text())
    return found, {entry["row"]: entry["reason"] for entry in facts["skipped"]}


LONG = [user("kilu " * 30), answer("meno " * 30)]
ASKED_LONG = [user("kilu " * 60), answer("meno")]
ANSWERED_TWICE = [user("a"), answer("b"), user("kilu " * 60)]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", EVERY)
def test_truncation(name: str, side: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    rows = [Row(i, "p", talk) for i, talk in enumerate([LONG, ASKED_LONG, ANSWERED_TWICE])]
    length = len(encoded(family, LONG)[0][0]) - 20
    found, reasons = shard(tmp_path, family, rows, overlong="truncate", truncation_side=side, max_length=length)
    expected, skipped = {}, set()
    for row in rows:
        [(ids, mask)] = reference(family, row.messages)
        if len(ids) > length:
            kept = slice(None, length) if side == "right" else slice(-length, None)
            ids, mask = ids[kept], mask[kept]
        if 1 in mask:
            expected[row.row] = [(ids, mask)]
        else:
            skipped.add(row.row)
    assert found == expected
    assert set(reasons) == skipped
    for reason in reasons.values():
        assert "no supervised token" in reason and str(length) in reason


def test_truncation_sides_differ_and_lose_what_they_should(tmp_path: Path) -> None:
    """The answer lies behind the right cut, or the first answer before the left one."""
    family = FAMILIES["qwen3"]
    rows = [Row(0, "p", [user("kilu " * 60), answer("meno")]), Row(1, "p", ANSWERED_TWICE)]
    (tmp_path / "r").mkdir()
    (tmp_path / "l").mkdir()
    right, lost_right = shard(tmp_path / "r", family, rows, overlong="truncate", max_length=40)
    left, lost_left = shard(tmp_path / "l", family, rows, overlong="truncate", max_length=40, truncation_side="left")
    assert (set(right), set(lost_right)) == ({1}, {0})
    assert (set(left), set(lost_left)) == ({0}, {1})
    assert said(family, *right[1][0]) == "b<|im_end|>"
    assert said(family, *left[0][0]) == "<think>\n\n</think>\n\nmeno<|im_end|>"
    assert [len(ids) for [(ids, _)] in (right[1], left[0])] == [40, 40]


def test_shard_keeps_every_sequence_of_a_row(tmp_path: Path) -> None:
    """Dropped thinking: a row has a sequence for each answer, under the same row number."""
    family = FAMILIES["qwen3"]
    messages = [user("a"), answer("b", "hm"), user("c"), answer("d", "so")]
    calls = [user("a"), *round_of_calls(family, thought="look"), answer("b", "hm")]
    rows = [Row(0, "p", messages), Row(1, "p", calls, tools=TOOLS), Row(2, "p", messages, finish="length")]
    found, reasons = shard(tmp_path, family, rows)
    assert reasons == {}
    assert found == {
        0: reference(family, messages),
        1: reference(family, calls, tools=TOOLS),
        2: reference(family, messages, cut_off=True),
    }
    assert list(map(len, found.values())) == [2, 1, 2]


def test_shard_takes_the_settings_of_the_target(tmp_path: Path) -> None:
    family = FAMILIES["qwen3"]
    messages = [user("a"), answer("b", "hm"), user("c"), answer("d")]
    ways = {"train_on": "last_turn", "reasoning": "mask"}
    found, _ = shard(tmp_path, family, [Row(0, "p", messages)], template_options={"enable_thinking": False}, **ways)
    assert found == {0: reference(family, messages, options={"enable_thinking": False}, **ways)}
    assert said(family, *found[0][0]) == "d<|im_end|>"


def test_reference_marks_are_settled_where_it_matters() -> None:
    """FREE is for the frames of calls only: no text of the assistant is left open."""
    for family in FAMILIES.values():
        for messages, tools in conversations(family):
            for reasoning in ("train", "mask", "strip"):
                for pieces, supervised in plan(family, messages, tools=tools, reasoning=reasoning):
                    free = [piece for piece in pieces if supervised(piece) == FREE]
                    assert all(piece.part in ("opening", "loose") for piece in free)
                    assert not any("kilu" in piece.text or "meno" in piece.text for piece in free)

"""Chat families, each told twice: a template (tests/templates) with a tokenizer, and the same format by hand.

The hand-written side yields the pieces of a conversation in order: what text they hold, whether the
template makes control tokens of them, and which turn of the assistant wrote them. Ids and masks come
from those pieces alone (`reference`): no rendering, no comparing of prefixes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]
Encoded = tuple[list[int], list[int]]
TEMPLATES = Path(__file__).parent / "templates"
QWEN_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function"
    " signatures within <tools></tools> XML tags:\n<tools>{}\n</tools>\n\nFor each function call, return a json object"
    " with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


def dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class Piece(NamedTuple):
    """A stretch of a conversation. `turn` is the index of the assistant message that wrote it, or None."""

    text: str
    control: bool
    turn: int | None
    # `head` (before content), `thought`, `body` (content, calls, end of turn); of the body: `opening` (the first
    # call up to what it says), or `loose` where the prompt that the target saw is not in the conversation.
    part: str


@dataclass
class Script:
    """The pieces of a conversation, in order."""

    special: tuple[str, ...]
    pieces: list[Piece] = field(default_factory=list)

    def frame(self, text: str, turn: int | None = None, part: str = "body") -> None:
        """What the template writes: the special tokens in it are control tokens."""
        for part_text in re.split(f"({'|'.join(map(re.escape, self.special))})", text):
            if part_text:
                self.pieces.append(Piece(part_text, part_text in self.special, turn, part))

    def said(self, text: str, turn: int | None = None, part: str = "body") -> None:
        """What someone said: never a control token."""
        if text:
            self.pieces.append(Piece(text, False, turn, part))

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


Options = dict[str, Any]
Writer = Callable[[Script, list[Message], list[dict[str, Any]] | None, Options], None]


@dataclass(frozen=True)
class Family:
    """`special`: added tokens with special=True, `added`: the others. `ends`: what ends the target's generation.

    `thinking`: the field or way in which the template takes thinking, None where it knows none.
    `calls`: the most tool calls of a turn, 0 without tools; `call_id`: how its ids look.
    """

    name: str
    write: Writer
    special: tuple[str, ...]
    ends: tuple[str, ...]
    added: tuple[str, ...] = ()
    bos: str | None = None
    thinking: str | None = None
    calls: int = 0
    call_id: str = "call_{}"
    text_with_call: bool = True  # may a turn hold content and calls?
    text_arguments: bool = False  # does the template take arguments as text only?
    opens: bool = False  # does the prompt open a thought that the template itself never shows in an answer?
    from_any_byte: bool = False  # {% generation %}: transformers marks a token that reaches into the span

    def script(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, options: Options | None = None
    ) -> Script:
        script = Script(self.special)
        self.write(script, messages, tools, options or {})
        return script

    def native(self, messages: list[Message]) -> list[Message]:
        """The messages as this template itself wants them."""
        result = []
        for message in messages:
            message = dict(message)
            thought = message.pop("reasoning_content", None)
            if thought and self.thinking == "inline":
                message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content']}"
            elif thought and self.thinking:
                message[self.thinking] = thought
            if self.text_arguments and "tool_calls" in message:
                message["tool_calls"] = [
                    call | {"function": call["function"] | {"arguments": dumps(call["function"]["arguments"])}}
                    for call in message["tool_calls"]
                ]
            result.append(message)
        return result

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return make_tokenizer(self.name)

    @property
    def end_ids(self) -> list[int]:
        return list(self.tokenizer.convert_tokens_to_ids(list(self.ends)))


# ---- the formats by hand


def thought_of(message: Message) -> str:
    return message.get("reasoning_content") or ""


def own_system(messages: list[Message]) -> tuple[str | None, int]:
    """Content of a system message at the start, if there is one, and where the others start."""
    return (messages[0]["content"], 1) if messages and messages[0]["role"] == "system" else (None, 0)


def chatml(script: Script, messages: list[Message], *_: Any, default: str | None = None) -> None:
    if default is not None and own_system(messages)[0] is None:
        script.frame(f"<|im_start|>system\n{default}<|im_end|>\n")
    for i, message in enumerate(messages):
        turn = i if message["role"] == "assistant" else None
        script.frame(f"<|im_start|>{message['role']}\n")
        script.said(message["content"], turn)
        script.frame("<|im_end|>", turn)
        script.frame("\n")


def smollm2(script: Script, messages: list[Message], *_: Any) -> None:
    chatml(script, messages, default="You are a helpful AI assistant named SmolLM, trained by Hugging Face")


def qwen_calls(script: Script, message: Message, turn: int, part: str = "opening") -> None:
    for i, call in enumerate(message.get("tool_calls", [])):
        script.said("\n" if i or message["content"] else "", turn)
        script.said('<tool_call>\n{"name": "', turn, "body" if i or message["content"] else part)
        script.said(f'{call["function"]["name"]}", "arguments": {dumps(call["function"]["arguments"])}}}', turn)
        script.said("\n</tool_call>", turn)


def qwen_result(script: Script, messages: list[Message], i: int) -> None:
    if i == 0 or messages[i - 1]["role"] != "tool":
        script.frame("<|im_start|>user")
    script.said(f"\n<tool_response>\n{messages[i]['content']}\n</tool_response>")
    if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
        script.frame("<|im_end|>\n")


def qwen25(script: Script, messages: list[Message], tools: list[dict[str, Any]] | None, options: Options) -> None:
    system, _ = own_system(messages)
    script.frame("<|im_start|>system\n")
    script.said("You are Qwen, created by Alibaba Cloud. You are a helpful assistant." if system is None else system)
    if tools:
        script.said("\n\n" + QWEN_TOOLS.format("".join("\n" + dumps(tool) for tool in tools)))
    script.frame("<|im_end|>\n")
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            qwen_result(script, messages, i)
        elif message["role"] != "system" or i:
            turn = i if message["role"] == "assistant" else None
            script.frame(f"<|im_start|>{message['role']}\n")
            script.said(message["content"], turn)
            if turn is not None:
                qwen_calls(script, message, turn)
            script.frame("<|im_end|>", turn)
            script.frame("\n")


def qwen3(script: Script, messages: list[Message], tools: list[dict[str, Any]] | None, options: Options) -> None:
    system, _ = own_system(messages)
    if tools or system is not None:
        script.frame("<|im_start|>system\n")
        script.said((system or "") + ("\n\n" if tools and system is not None else ""))
        if tools:
            script.said(QWEN_TOOLS.format("".join("\n" + dumps(tool) for tool in tools)))
        script.frame("<|im_end|>\n")
    questions = [
        i for i, m in enumerate(messages)
        if m["role"] == "user"
        and not (m["content"].startswith("<tool_response>") and m["content"].endswith("</tool_response>"))
    ]  # fmt: skip
    last_question = questions[-1] if questions else len(messages) - 1
    for i, message in enumerate(messages):
        content = message["content"]
        if message["role"] == "tool":
            qwen_result(script, messages, i)
        elif message["role"] != "assistant":
            if message["role"] != "system" or i:
                script.frame(f"<|im_start|>{message['role']}\n")
                script.said(content)
                script.frame("<|im_end|>\n")
        else:
            script.frame("<|im_start|>assistant\n")
            thought = thought_of(message).strip("\n")
            if i > last_question and (i + 1 == len(messages) or thought_of(message)):
                # Without thinking, the prompt itself ends with an empty block; else it opens none.
                opened = options.get("enable_thinking") is False
                script.said("<think>\n", None if opened else i, "head")
                script.said(thought, i, "thought")
                script.said("\n</think>\n\n", None if opened and not thought else i, "head")
                script.said(content.lstrip("\n"), i)
            else:
                script.said(content, i)
            # Without thinking, the prompt that the target saw ends with an empty block: it is not in a history.
            loose = i < last_question or options.get("enable_thinking") is False
            qwen_calls(script, message, i, "loose" if loose else "opening")
            script.frame("<|im_end|>", i)
            script.frame("\n")


def llama3(script: Script, messages: list[Message], tools: list[dict[str, Any]] | None, options: Options) -> None:
    system, first = own_system(messages)
    builtin = options.get("builtin_tools")
    script.frame("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n")
    if builtin is not None or tools is not None:
        script.said("Environment: ipython\n")
    if builtin is not None:
        script.said(f"Tools: {', '.join(builtin)}\n\n")
    script.said((system or "").strip())
    script.frame("<|eot_id|>")
    for i, message in enumerate(messages[first:], first):
        role = {"tool": "ipython"}.get(message["role"], message["role"])
        turn = i if role == "assistant" else None
        script.frame(f"<|start_header_id|>{role}<|end_header_id|>\n\n")
        if tools is not None and i == first:
            script.said(
                "Given the following functions, please respond with a JSON for a function call with its proper"
                ' arguments that best answers the given prompt.\n\nRespond in the format {"name": function name,'
                ' "parameters": dictionary of argument name and its value}. Do not use variables.\n\n'
            )
            script.said("".join(dumps(tool, 4) + "\n\n" for tool in tools))
        if role == "ipython":
            script.said(dumps(message["content"]))
        elif "tool_calls" in message:
            call = message["tool_calls"][0]["function"]
            if builtin and call["name"] in builtin:
                script.frame("<|python_tag|>", turn)
                values = ", ".join(f'{key}="{value}"' for key, value in call["arguments"].items())
                script.said(f"{call['name']}.call({values})", turn)
            else:
                script.said(f'{{"name": "{call["name"]}", "parameters": {dumps(call["arguments"])}}}', turn)
            script.frame("<|eom_id|>" if builtin is not None else "<|eot_id|>", turn)
            continue
        else:
            script.said(message["content"].strip(), turn)
        script.frame("<|eot_id|>", turn)


def gemma(script: Script, messages: list[Message], tools: list[dict[str, Any]] | None, options: Options) -> None:
    system, first = own_system(messages)
    script.frame("<bos>")
    for i, message in enumerate(messages[first:], first):
        turn = i if message["role"] == "assistant" else None
        script.frame(f"<start_of_turn>{'user' if turn is None else 'model'}\n")
        if i == first and system is not None:
            script.said(f"{system}\n\n")
        script.said(message["content"].strip(), turn)
        script.frame("<end_of_turn>", turn)
        script.frame("\n")


def mistral(script: Script, messages: list[Message], tools: list[dict[str, Any]] | None, options: Options) -> None:
    system, first = own_system(messages)
    # Questions are compared by what they say: an earlier one with the same words gets the tools, too.
    asked = [m["content"] for m in messages if m["role"] == "user"]
    script.frame("<s>")
    for i, message in enumerate(messages[first:], first):
        if message["role"] == "user":
            if tools is not None and message["content"] == asked[-1]:
                described = ", ".join(f'{{"type": "function", "function": {dumps(t["function"])}}}' for t in tools)
                script.frame(f"[AVAILABLE_TOOLS][{described}][/AVAILABLE_TOOLS]")
            script.frame("[INST]")
            if system is not None and i + 1 == len(messages):
                script.said(f"{system}\n\n")
            script.said(message["content"])
            script.frame("[/INST]")
        elif message["role"] == "tool":
            script.frame("[TOOL_RESULTS]")
            script.said(f'{{"content": {message["content"]}, "call_id": "{message["tool_call_id"]}"}}')
            script.frame("[/TOOL_RESULTS]")
        else:
            if "tool_calls" in message:
                # The prompt of an earlier question had the tools before that one, and the system prompt in it.
                moved = (tools is not None and any(m["role"] == "user" for m in messages[i:])) or (
                    system is not None and messages[i - 1]["role"] == "user"
                )
                script.frame("[TOOL_CALLS]", i, "loose" if moved else "body")
                calls = [f'{dumps(c["function"])[:-1]}, "id": "{c["id"]}"}}' for c in message["tool_calls"]]
                text = f"[{', '.join(calls)}]"
                script.said(text[:11], i, "loose" if moved else "body")  # up to the name
                script.said(text[11:], i)
            else:
                script.said(message["content"], i)
            script.frame("</s>", i)


def deepseek(script: Script, messages: list[Message], _: Any, options: Options, opens: bool = False) -> None:
    """`opens`: the prompt opens the thinking, and the template shows it before calls only, inline in the content.

    With the option `written_out`, the last answer is as the target wrote it.
    """
    script.frame("<｜begin▁of▁sentence｜>")
    script.said(next((m["content"] for m in reversed(messages) if m["role"] == "system"), ""))
    results = 0
    for i, message in enumerate(messages):
        if message["role"] == "user":
            results = 0
            script.frame("<｜User｜>")
            script.said(message["content"])
        elif message["role"] == "tool":
            script.frame("\n" if results else "<｜tool▁outputs▁begin｜>")
            script.frame("<｜tool▁output▁begin｜>")
            script.said(message["content"])
            script.frame("<｜tool▁output▁end｜>")
            results += 1
            if i + 1 == len(messages):
                script.frame("<｜tool▁outputs▁end｜>")
        elif message["role"] == "assistant":
            script.frame("<｜tool▁outputs▁end｜>" if results else "<｜Assistant｜>")
            thought, calls = thought_of(message), message.get("tool_calls", [])
            part = "loose" if opens and not results and not thought else "opening"
            written_out = options.get("written_out") and i + 1 == len(messages) and not results
            if thought and (calls or written_out):
                script.said("<think>\n", i if results else None, "head")
                script.said(thought, i, "thought")
                script.said("\n</think>\n\n", i, "head")
            elif thought:
                script.said("\n\n", i if results else None, "head")
            script.said(message["content"], i)
            for j, call in enumerate(calls):
                own = "body" if j or message["content"] else part
                script.frame("\n" if j else "<｜tool▁calls▁begin｜>", i, own)
                script.frame("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", i, own)
                script.said(f"{call['function']['name']}\n```json\n{dumps(call['function']['arguments'])}\n```", i)
                script.frame("<｜tool▁call▁end｜>", i)
            script.frame("<｜tool▁calls▁end｜>" if calls else "", i)
            script.frame("<｜end▁of▁sentence｜>", i)
            results = 0


def hidden_thinking(messages: list[Message], turn: int) -> bool:
    """Whether the prompt before a turn shows thinking (before a call) that the whole conversation does not show.

    In Kimi and Harmony it stays until an answer without calls follows.
    """
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and "tool_calls" not in m]
    return any(k >= turn for k in answers) and any(
        "tool_calls" in m and thought_of(m) and not any(j < k < turn for k in answers)
        for j, m in enumerate(messages[:turn])
    )


def kimi(
    script: Script, messages: list[Message], tools: list[dict[str, Any]] | None, options: Options, thinks: bool = False,
    opens: bool = False,
) -> None:  # fmt: skip
    """`thinks`: there is a block of thinking in every turn; `opens`: the prompt opens it.

    With the option `written_out`, the last answer and the prompt before it are as the target saw and wrote them.
    """
    written_out = options.get("written_out") and thought_of(messages[-1])
    given = messages[:-1] if written_out else messages
    answers = [i for i, m in enumerate(given) if m["role"] == "assistant" and "tool_calls" not in m]
    if tools:
        script.frame("<|im_system|>tool_declare<|im_middle|>")
        script.said(dumps(tools))
        script.frame("<|im_end|>")
    if own_system(messages)[0] is None:
        script.frame("<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>")
    for i, message in enumerate(messages):
        turn = i if message["role"] == "assistant" else None
        script.frame(f"<|im_{message['role'] if message['role'] in ('user', 'assistant') else 'system'}|>")
        script.said(message.get("name") or message["role"])
        script.frame("<|im_middle|>")
        hidden = turn is not None and thinks and hidden_thinking(given, i)
        if turn is not None and thinks:
            closed = opens and options.get("thinking") is False  # by the prompt itself
            kept = thought_of(message) if not any(k >= i for k in answers) else ""
            kept = "" if closed else kept
            script.said("<think>", None if opens else turn, "loose" if hidden else "head")
            script.said(kept, turn, "thought")
            script.said("</think>", None if closed else turn, "loose" if hidden and not kept else "head")
        if message["role"] == "tool":
            script.said(f"## Return of {message['tool_call_id']}\n")
        script.said(message["content"], turn)
        for j, call in enumerate(message.get("tool_calls", [])):
            part = "body" if j or message["content"] else "loose" if hidden else "opening"
            script.frame(("" if j else "<|tool_calls_section_begin|>") + "<|tool_call_begin|>", turn, part)
            script.said(call["id"], turn, part)
            script.frame("<|tool_call_argument_begin|>", turn, part)
            script.said(dumps(call["function"]["arguments"]), turn)
            script.frame("<|tool_call_end|>", turn)
        script.frame("<|tool_calls_section_end|>" if "tool_calls" in message else "", turn)
        script.frame("<|im_end|>", turn)


def harmony(script: Script, messages: list[Message], tools: list[dict[str, Any]] | None, options: Options) -> None:
    system, first = own_system(messages)
    script.frame("<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n")
    script.said(f"Knowledge cutoff: 2024-06\n\nReasoning: {options.get('reasoning_effort', 'medium')}\n\n")
    script.said("# Valid channels: analysis, commentary, final. Channel must be included for every message.")
    if tools:
        script.said("\nCalls to these tools must go to the commentary channel: 'functions'.")
    script.frame("<|end|>")
    if system or tools:
        script.frame("<|start|>developer<|message|>")
        script.said(f"# Instructions\n\n{system}\n\n" if system else "")
        if tools:
            script.said("# Tools\n\n## functions\n\nnamespace functions {\n\n")
            for function in (tool["function"] for tool in tools):
                fields = "".join(f"{k}: {v['type']},\n" for k, v in function["parameters"]["properties"].items())
                script.said(f"// {function['description']}\ntype {function['name']} = (_: {{\n{fields}}}) => any;\n\n")
            script.said("} // namespace functions")
        script.frame("<|end|>")
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and "tool_calls" not in m]
    called = ""
    for i, message in enumerate(messages[first:], first):
        if message["role"] == "user":
            script.frame("<|start|>user<|message|>")
            script.said(message["content"])
            script.frame("<|end|>")
        elif message["role"] == "tool":
            script.frame("<|start|>")
            script.said(f"functions.{called} to=assistant")
            script.frame("<|channel|>commentary<|message|>")
            script.said(dumps(message["content"]))
            script.frame("<|end|>")
        elif message["role"] == "assistant":
            calls, thought = message.get("tool_calls"), thought_of(message)
            # A call's analysis stays until an answer follows.
            shown = not any(k > i for k in answers) if calls else i + 1 == len(messages)
            hidden = hidden_thinking(messages, i)
            script.frame("<|start|>assistant")
            if thought and shown:
                script.frame("<|channel|>analysis<|message|>", i, "loose" if hidden else "head")
                script.said(thought, i, "thought")
                script.frame("<|end|><|start|>assistant", i, "head")
            if calls:
                called = calls[0]["function"]["name"]
                script.said(" to=functions.", i, "loose" if hidden else "opening")
                script.said(called, i)
                script.frame("<|channel|>commentary json<|message|>", i)
                script.said(dumps(calls[0]["function"]["arguments"]), i)
                script.frame("<|call|>", i)
            else:
                loose = hidden and not (thought and shown)
                script.frame("<|channel|>final<|message|>", i, "loose" if loose else "head")
                script.said(message["content"], i)
                script.frame("<|return|>" if i + 1 == len(messages) else "<|end|>", i)


def deepseek_r1(*arguments: Any) -> None:
    deepseek(*arguments, opens=True)


def kimi_k2_thinking(*arguments: Any) -> None:
    kimi(*arguments, thinks=True)


def kimi_k25(*arguments: Any) -> None:
    kimi(*arguments, thinks=True, opens=True)


# ---- the families

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML_ENDS = ("<|im_end|>", "<|endoftext|>")
CALL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
DEEPSEEK_ENDS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
DEEPSEEK_MARKS = (
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
KIMI = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")
KIMI_CALLS = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)  # fmt: skip
KIMI_WAYS: dict[str, Any] = dict(special=KIMI, ends=("[EOS]", "<|im_end|>"), calls=2, call_id="functions.look:{}")
FAMILIES = {
    family.name: family
    for family in (
        Family("smollm2", smollm2, CHATML, CHATML_ENDS),
        Family("generation", chatml, CHATML, CHATML_ENDS, from_any_byte=True),
        Family("qwen25", qwen25, CHATML, CHATML_ENDS, CALL_TAGS[:2], calls=2),
        Family("qwen3", qwen3, CHATML, CHATML_ENDS, ("<think>", "</think>", *CALL_TAGS), None, "reasoning_content", 2),
        Family(
            "llama3", llama3,
            ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
             "<|eom_id|>", "<|python_tag|>"),
            ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), bos="<|begin_of_text|>", calls=1, text_with_call=False,
        ),
        Family(
            "gemma", gemma, ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), ("<eos>", "<end_of_turn>"),
            bos="<bos>",
        ),
        Family(
            "mistral", mistral,
            ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
             "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
            ("</s>",), bos="<s>", calls=2, call_id="Ab{:07}", text_with_call=False,
        ),
        # The markers of V3's own tokenizer are no special tokens; as special ones they are tested with R1.
        Family(
            "deepseek_v3", deepseek, DEEPSEEK_ENDS, DEEPSEEK_ENDS[1:2], DEEPSEEK_MARKS, DEEPSEEK_ENDS[0], None, 2,
            text_arguments=True,
        ),
        Family(
            "deepseek_r1", deepseek_r1, DEEPSEEK_ENDS + DEEPSEEK_MARKS, DEEPSEEK_ENDS[1:2], ("<think>", "</think>"),
            DEEPSEEK_ENDS[0], "inline", 2, text_arguments=True, opens=True,
        ),
        Family("kimi_k2", kimi, added=KIMI_CALLS, **KIMI_WAYS),
        Family(
            "kimi_k2_thinking", kimi_k2_thinking, added=(*KIMI_CALLS, "<think>", "</think>"),
            thinking="reasoning_content", **KIMI_WAYS,
        ),
        Family(
            "kimi_k25", kimi_k25, added=(*KIMI_CALLS, "<think>", "</think>"), thinking="reasoning_content", opens=True,
            **KIMI_WAYS,
        ),
        Family(
            "harmony", harmony,
            ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
             "<|message|>", "<|call|>"),
            ("<|return|>", "<|endoftext|>", "<|call|>"), thinking="thinking", calls=1, text_with_call=False,
        ),
    )
}  # fmt: skip


# ---- tokenizers

CORPUS = [
    "user assistant system model tool functions analysis commentary final",
    "what follows bado ? kilu meno pari sotu, and so on.\n\nThen it ends.\n",
    "naïve café déjà vu 🦅🦅 👩‍👩‍👧 漢字 العربية",
    '{"name": "look", "arguments": {"word": "kilu", "count": 2}}\n\n\n  ',
    "<|im_start|>user\n <think>\n\n</think>\n\n\n\n",
]
# How Llama-3, Qwen and DeepSeek cut text into words: line breaks stick to the punctuation before them.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT_AS_GPT2 = ("smollm2", "generation", "gemma")


@cache
def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The family's tokenizer, byte-level BPE, with its chat template; made once."""
    family = FAMILIES[name]
    tokenizer = Tokenizer(models.BPE())
    if name in SPLIT_AS_GPT2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420 + len(family.special),
        special_tokens=list(family.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=family.bos,
        eos_token=family.ends[0],
        chat_template=(TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
    )


@cache
def plain_tokenizer(name: str) -> Tokenizer:
    """The family's tokenizer for what lies between control tokens: it does not know the special ones."""
    state = json.loads(make_tokenizer(name).backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["special"]]
    return Tokenizer.from_str(json.dumps(state))


# ---- ids and masks from the pieces

FREE = 2  # a token that may be supervised or not


def stretch_ids(family: Family, text: str, marks: list[int], strict: bool) -> Encoded:
    """Ids of a text without control tokens; `marks`: the mask of its bytes.

    A token that reaches from other text into a supervised one is not supervised (unless not `strict`: FREE).
    """
    plain = plain_tokenizer(family.name)
    ids, mask, position = [], [], 0
    for token in plain.encode(text, add_special_tokens=False).ids:
        written = str(plain.id_to_token(token))
        # A token of the alphabet has one character per byte, an added one is written as it is.
        length = len(written.encode()) if written in family.added else len(written)
        covered = marks[position : position + length]
        ids.append(token)
        first = covered[0] if strict or max(covered) == covered[0] else FREE
        mask.append(max(covered) if family.from_any_byte else first)
        position += length
    assert position == len(marks)
    return ids, mask


def encode_pieces(
    family: Family, pieces: Sequence[Piece], supervised: Callable[[Piece], int], strict: bool = True
) -> Encoded:
    ids: list[int] = []
    mask: list[int] = []
    text, marks = "", [0] * 0
    for piece in [*pieces, Piece("", True, None, "body")]:  # a last control piece closes the last stretch
        if not piece.control:
            text += piece.text
            marks += [supervised(piece)] * len(piece.text.encode())
            continue
        more = stretch_ids(family, text, marks, strict)
        ids, mask = ids + more[0], mask + more[1]
        text, marks = "", []
        if piece.text:
            ids.append(int(family.tokenizer.convert_tokens_to_ids(piece.text)))
            mask.append(supervised(piece))
    return ids, mask


def without_thinking(messages: list[Message]) -> list[Message]:
    return [{key: value for key, value in m.items() if key != "reasoning_content"} for m in messages]


def plan(
    family: Family, messages: list[Message], tools: Any = None, options: Options | None = None,
    train_on: str = "all_turns", reasoning: str = "train", cut_off: bool = False,
) -> list[tuple[list[Piece], Callable[[Piece], int]]]:  # fmt: skip
    """The sequences of a conversation: their pieces, and how each of those is masked (0, 1 or FREE)."""
    options = options or {}
    # Switched off by its option, Kimi's template knows no thinking at all.
    if family.thinking is None or reasoning == "strip" or options.get("thinking") is False:
        messages = without_thinking(messages)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    chosen = turns[-1:] if train_on == "last_turn" else turns
    shown = {piece.turn for piece in family.script(messages, tools, options).pieces if piece.part == "thought"}
    runs = [(messages, set(chosen))]
    if reasoning == "train" and any(thought_of(messages[i]) and i not in shown for i in turns):
        runs = [(messages[: i + 1], {i}) for i in chosen]
        options = options | ({"written_out": True} if family.opens else {})
    result = []
    for part, wanted in runs:

        def supervised(piece: Piece, wanted: set[int] = wanted) -> int:
            if piece.turn not in wanted or piece.turn is None:
                return 0
            if piece.part == "loose":
                return FREE
            if reasoning != "mask" or not thought_of(messages[piece.turn]):
                return 1
            return {"head": 0, "thought": 0, "opening": FREE}.get(piece.part, 1)

        pieces = family.script(part, tools, options).pieces
        if cut_off and part[-1] is messages[-1]:
            ends = [k for k, piece in enumerate(pieces) if piece.turn == len(messages) - 1 and piece.control]
            pieces = pieces[: ends[-1]]
        result.append((pieces, supervised))
    return result


def reference(family: Family, messages: list[Message], **ways: Any) -> list[Encoded]:
    """What Encoder must give: ids and mask (with FREE) of each sequence. `ways` as in `plan`."""
    # Behind a prompt, the target wrote whole tokens; thinking and answer may share one.
    strict = not family.opens and ways.get("reasoning") != "mask"
    return [encode_pieces(family, pieces, marks, strict) for pieces, marks in plan(family, messages, **ways)]

"""Prompt sets: the first user turns of rows and of files as benchmarks have them, without what was trained on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from eyas.conversations import Row
from eyas.conversations.formats import UnusableRecord, read_content
from eyas.decoding.prompt_sets import Conversations, PromptSet, file_questions, normalised, read_prompt_sets
from eyas.errors import EyasError
from eyas.target.chat import ChatTemplate
from recorded_rows import write_recorded_rows
from test_inspect import TEMPLATE, TOOLS, say
from tiny import make_tokenizer

ROOT = Path(__file__).parents[2]
EVERY = 3  # rows 2, 5, 8 are held out


def save_rows(folder: Path, rows: list[Row], shard_rows: int = 4) -> Conversations:
    folder.mkdir(parents=True)
    count = max(row.row for row in rows) + 1
    for start in range(0, count, shard_rows):
        end = min(start + shard_rows, count)
        write_recorded_rows(folder / f"rows_{start}-{end}.jsonl", [row for row in rows if start <= row.row < end])
    return Conversations(folder, count, shard_rows, EVERY)


def asked(row: int, *turns: str, **more: Any) -> Row:
    messages = [message for turn in turns for message in (say("user", turn), say("assistant", "ki"))]
    return Row(row, "s", messages, **more)


def save_prompts(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def read(conversations: Conversations, usable: set[int] | None = None, **sets: dict[str, Any]) -> dict[str, PromptSet]:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    filled = {name: {"path": None, "format": "auto", "prompts": 9} | entry for name, entry in sets.items()}
    return read_prompt_sets(filled, conversations, ChatTemplate(tokenizer), usable)


def expected_ids(messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    ids: list[int] = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    return ids


def labels(found: PromptSet) -> list[str]:
    return [prompt.label for prompt in found.prompts]


def test_held_out_prompts_are_the_templates_own(tmp_path: Path) -> None:
    history = [say("system", "be"), say("user", "ba do ?")]
    rows = [asked(0, "x"), asked(1, "y")]
    rows += [
        Row(2, "s", [*history, say("assistant", "ki"), say("user", "more"), say("assistant", "lu")]),
        asked(3, "z"),
    ]
    rows += [asked(4, "u"), Row(5, "s", [say("user", "ba"), say("assistant", "ki")], tools=TOOLS)]
    conversations = save_rows(tmp_path / "c", rows)
    found = read(conversations, held_out={})["held_out"]
    assert [(prompt.label, prompt.ids) for prompt in found.prompts] == [
        ("row 2", expected_ids(history)), ("row 5", expected_ids([say("user", "ba")], TOOLS)),
    ]  # fmt: skip
    assert (found.source, found.overlapping) == ("held-out rows of the run", 0)
    assert labels(read(conversations, held_out={"prompts": 1})["held_out"]) == ["row 2"]
    assert labels(read(conversations, {5, 99}, held_out={})["held_out"]) == ["row 5"]


def test_rows_without_a_prompt_are_left_out(tmp_path: Path) -> None:
    rows = {row: asked(row, f"t{row}") for row in range(18)}
    rows[2] = Row(2, "s", text="ready text")
    rows[5] = asked(5, "refuse me")
    rows[8] = Row(8, "s", [say("system", "x"), say("assistant", "ki")])
    rows[11] = asked(11, "no").skip("cut off")
    found = read(save_rows(tmp_path / "c", list(rows.values())), held_out={"prompts": 1})["held_out"]
    assert labels(found) == ["row 14"] and found.overlapping == 0


def test_prompts_of_training_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        asked(0, "The  Same\nQuestion?"), asked(1, "first turn", "second turn"), asked(2, "the same question?"),
        asked(3, "nothing"), asked(4, "never used").skip("cut off"), asked(5, "second TURN "), asked(6, "x"),
        asked(7, "z"), asked(8, "only held out"), asked(9, "y"), asked(10, "w"), asked(11, "only held out"),
    ]  # fmt: skip
    records = [
        {"prompt": "\uff46irst turn"}, {"prompt": "never used"}, {"prompt": "only held out"},
        {"prompt": "the same question"}, {"prompt": "X"}, {"prompt": "W"}, {"prompt": "new"},
    ]  # fmt: skip
    path = save_prompts(tmp_path / "p.jsonl", records)
    conversations = save_rows(tmp_path / "c", rows)
    found = read(conversations, held_out={}, file={"path": path}, short={"path": path, "prompts": 3})
    # Held-out rows are no training rows: asking what another of them asks is no overlap.
    assert (labels(found["held_out"]), found["held_out"].overlapping) == (["row 8", "row 11"], 2)
    assert (labels(found["file"]), found["file"].overlapping) == (["2", "3", "4", "7"], 3)
    assert (labels(found["short"]), found["short"].overlapping) == (["2", "3", "4"], 3)
    assert found["file"].source == path


def test_prompts_that_stand_in_ready_text_are_left_out(tmp_path: Path) -> None:
    """Ready text has its turns somewhere within: whole words count, and those of held-out rows do not."""
    rows = [
        Row(0, "s", text="<|user|>\nWhy is  the sky\nblue?<|end|>\n<|bot|>\nLight scatters."),
        Row(1, "s", text="nothing"), Row(2, "s", text="<|user|>only held out<|end|>"),
    ]  # fmt: skip
    asked_in_text = [
        "why is the sky blue?",
        "light",
        "is the sky",
        "cat",
        "hing",
        "thing",
        "ight scatters",
        "only held out",
    ]
    path = save_prompts(tmp_path / "p.jsonl", [{"prompt": text} for text in asked_in_text])
    found = read(save_rows(tmp_path / "c", rows), file={"path": path})["file"]
    assert (labels(found), found.overlapping) == (["4", "5", "6", "7", "8"], 3)


def test_a_set_may_come_to_nothing(tmp_path: Path) -> None:
    conversations = save_rows(tmp_path / "c", [asked(0, "a"), asked(1, "b"), asked(2, "A")])
    assert read(conversations, held_out={})["held_out"] == PromptSet("held-out rows of the run", [], 1)


@pytest.mark.parametrize(
    "text, expected",
    [("  A\tb\n\nC ", "a b c"), ("Straße", "strasse"), ("ﬁne １２", "fine 12"), ("a-b?", "a-b?"), ("", "")],
)
def test_normalised(text: str, expected: str) -> None:
    assert normalised(text) == expected


MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."], "reference": ["a", "b"]}
HUMAN_EVAL = {
    "task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "  pass", "test": "",
}  # fmt: skip
GSM8K = {"question": "How many?", "answer": "It is 2.\n#### 2"}


@pytest.mark.parametrize(
    "record, label, text",
    [(MT_BENCH, "81", "Write."), (HUMAN_EVAL, "HumanEval/0", "def f():\n"), (GSM8K, "2", "How many?"),
     ({"id": "x", "messages": [say("system", "s"), say("user", "u")]}, "x", "u"), ("plain", "2", "plain")],
)  # fmt: skip
@pytest.mark.parametrize("compressed", [False, True])
def test_records_of_benchmarks(tmp_path: Path, record: Any, label: str, text: str, compressed: bool) -> None:
    lines = f"{json.dumps({'prompt': 'first'})}\n{json.dumps(record)}\n".encode()
    path = tmp_path / ("p.jsonl.gz" if compressed else "p.jsonl")
    path.write_bytes(gzip.compress(lines) if compressed else lines)
    found = file_questions(str(path), "auto")[1]
    assert (found.label, found.text) == (label, text)
    assert [message["role"] for message in found.messages] in (["user"], ["system", "user"])


def test_answers_beside_questions_are_read_for_training() -> None:
    assert read_content(GSM8K).messages == [say("user", "How many?"), say("assistant", GSM8K["answer"])]
    assert read_content(MT_BENCH).messages == [say("user", "Write.")]
    assert read_content({"prompt": "a", "question": "b"}).messages == [say("user", "a")]


@pytest.mark.parametrize("turns", [[], "text", [1], [["a"]], [{"role": "user", "content": "a"}], [" "], {}])
def test_turns_that_are_none(turns: Any) -> None:
    with pytest.raises(UnusableRecord):
        read_content({"turns": turns})


@pytest.mark.parametrize(
    "content, data_format, said",
    [
        ('{"prompt": "a"}\n{"nothing": 1}\n', "auto", r"p.jsonl:2: no messages, .*; correct the record, or delete it"),
        ('{"prompt": "a"}\nnot JSON\n', "auto", r"p.jsonl:2: not JSON"),
        ('{"prompt": " "}\n', "auto", r"p.jsonl:1: turn 1: empty user message"),
        ('{"text": "a"}\n', "auto", r"p.jsonl:1: no user turn"),
        ('{"prompt": "a"}\n', "messages", r"p.jsonl:1: no `messages` in it; format is messages; correct"),
        ("", "auto", "p.jsonl: holds no prompts"),
        (None, "auto", r"p.jsonl does not exist"),
    ],
)
def test_unusable_files(tmp_path: Path, content: str | None, data_format: str, said: str) -> None:
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_text(content)
    conversations = save_rows(tmp_path / "c", [asked(0, "a")])
    with pytest.raises(EyasError, match=rf"^evaluation.prompt_sets.mine: .*{said}") as caught:
        read(conversations, mine={"path": str(path), "format": data_format})
    assert "data.prompts" not in str(caught.value)


def test_the_projects_own_prompts() -> None:
    questions = file_questions(str(ROOT / "config" / "prompts" / "instructions.jsonl"), "auto")
    assert len(questions) == len({normalised(question.text) for question in questions}) == 20
    assert all(len(question.messages) == 1 and question.label.startswith("eyas-") for question in questions)

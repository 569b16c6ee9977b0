"""`eyas chat`: answers are the target's own, what was drafted is shown, and bad input is one clear line."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from decoding_world import END, World, build_world
from eyas.cli import chat
from eyas.cli.main import main
from eyas.cli.text_stream import TextStream
from eyas.decoding.decode import decode
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tiny import answer, make_tokenizer, question


@pytest.fixture(scope="module")
def world(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tiny_target, tmp_path_factory.mktemp("world"))


def run(world: World, *arguments: str) -> int:
    return main(["chat", "--run", str(world.run), "--max-new-tokens", "40", *arguments])


def type_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


@pytest.mark.parametrize("size", [[], ["--topk", "3", "--draft-steps", "3", "--draft-tokens", "9"]])
def test_one_answer_as_json(world: World, capsys: pytest.CaptureFixture[str], size: list[str]) -> None:
    assert run(world, "--prompt", question(7), "--json", *size) == 0
    found = json.loads(capsys.readouterr().out)
    own = decode(world.target, None, world.prompts[1], [END], 40).ids
    assert found["ids"] == own and found["text"] == answer(7)
    assert found["tokens"] == len(own) == len(found["drafted"]) and found["finish"] == "stop"
    assert found["drafted_tokens"] == sum(found["drafted"]) > 0
    assert found["tokens_per_forward"] == (len(own) - 1) / found["target_forwards"] > 1.5


def test_a_pipe_holds_a_turn_a_line_of_one_conversation(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, f"{question(7)}\n\n{question(20)}\n".encode())
    prompts: list[str] = []
    render = chat.Talk.ask
    monkeypatch.setattr(chat.Talk, "ask", lambda self, *rest: prompts.append(str(self.messages)) or render(self, *rest))
    assert run(world) == 0
    out = capsys.readouterr().out
    assert answer(7) in out and out.count("tokens a pass") == 2 and "\x1b" not in out
    assert prompts[0] == "[]" and question(7) in prompts[1] and answer(7) in prompts[1]
    type_in(monkeypatch, question(7).encode())
    assert run(world, "--system", "be brief") == 0
    assert prompts[2] == str([{"role": "system", "content": "be brief"}])


def test_standard_input_as_one_turn(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, b"two\nlines \xff [bold] \x1b[31m")
    assert run(world, "--prompt", "-", "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "two\nlines � [bold] \x1b[31m"


def test_another_drafter_is_named_by_its_folder(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    for epoch in (0, 6):
        folder = world.run / "drafters" / "eagle3" / f"epoch_{epoch}"
        assert run(world, "--drafter-folder", str(folder), "--prompt", question(7), "--json") == 0
        said[epoch] = json.loads(capsys.readouterr().out)
    assert said[0]["ids"] == said[6]["ids"]
    assert said[0]["drafted_tokens"] < said[6]["drafted_tokens"]


def test_typed_turns_and_colours_on_a_terminal(world: World) -> None:
    """A real terminal: drafted text is green, /new begins anew, Ctrl-D ends."""
    terminal, own = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "eyas.cli.main", "chat", "--run", str(world.run), "--max-new-tokens", "40"]
    process = subprocess.Popen(command, stdin=own, stdout=own, stderr=own, env=environment, close_fds=True)
    os.close(own)
    seen = b""

    def until(*texts: bytes) -> None:
        """Read until the texts have come, one after another; what is typed before its prompt stands may be lost."""
        nonlocal seen
        seen = b""
        for text in texts:
            while text not in seen:
                seen += os.read(terminal, 4096)
            shown.append(seen[: seen.index(text)])
            seen = seen[seen.index(text) + len(text) :]

    shown: list[bytes] = []
    try:
        until(b"> ")
        os.write(terminal, f"{question(7)}\n".encode())
        until(b"tokens a pass", b"> ")
        assert b"\x1b[32m" in shown[1]
        os.write(terminal, b"/what\n")
        until(b"/new begins a new conversation", b"> ")
        os.write(terminal, b"/new\n")
        until(b"/new", b"> ")
        os.write(terminal, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(terminal)


def test_what_the_target_writes_is_text_and_nothing_else() -> None:
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, color_system="standard", highlight=False, markup=False, emoji=False
    )
    say = chat._piece_printer(console, coloured=True)
    say("[red]a[/] :smile: \x1b[2Jb\r", True)
    say("\u202ec\n ", False)
    assert file.getvalue() == "\x1b[32m[red]a[/] :smile: \\x1b[2Jb\\r\x1b[0m\\u202ec\n "


@given(text=st.text(max_size=30), marks=st.lists(st.booleans(), min_size=200, max_size=200))
def test_pieces_of_text_are_whole_characters(text: str, marks: list[bool]) -> None:
    tokenizer = TOKENIZER
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream, pieces = TextStream(tokenizer), []
    for token, mark in zip(ids, marks, strict=False):
        pieces.append(stream.add(token, mark))
    pieces.append(stream.rest())
    told = [piece for piece in pieces if piece]
    assert "".join(piece for piece, _ in told) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece, _ in told)


TOKENIZER = make_tokenizer()


def test_a_character_of_several_tokens_is_drafted_when_all_of_them_are() -> None:
    ids = TOKENIZER.encode("é", add_special_tokens=False)
    assert len(ids) == 2
    for marks in ([True, True], [True, False], [False, True]):
        stream = TextStream(TOKENIZER)
        assert stream.add(ids[0], marks[0]) is None
        assert stream.add(ids[1], marks[1]) == ("é", all(marks))
        assert stream.rest() is None
        assert stream.add(ids[0], True) is None and stream.rest() == ("\ufffd", True)


def test_an_answer_that_is_stopped_stays_in_the_conversation(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = chat.load(chat.ChatOptions(str(world.run), max_new_tokens=40))
    said: list[str] = []

    def say(text: str, drafted: bool) -> None:
        said.append(text)
        if len(said) == 6:
            raise KeyboardInterrupt

    answered = talk.ask(question(7), say)
    assert answered.finish == "interrupted" and answer(7).startswith("".join(said))
    assert talk.messages[-1] == {"role": "assistant", "content": answered.text}
    assert answered.text.startswith("".join(said)) and len(answered.decoded.ids) == len(answered.drafted)


BAD: list[tuple[list[str], str]] = [
    (["--drafter", "other"], "has no trained drafter 'other'; it has eagle3"),
    (["--drafter-folder", "/no/such"], "/no/such: no such folder"),
    (["--target", "/no/such"], "target.path: /no/such is no local folder"),
    (["--topk", "3"], "draft_tokens: must be given for topk 3"),
    (["--draft-steps", "0"], "at least 1 each"),
    (["--temperature", "-1"], "temperature: -1.0 is neither 0"),
    (["--max-new-tokens", "0"], "--max-new-tokens: 0 is less than 1"),
    (["--template-options", "[1]"], "--template-options: must be a JSON object"),
    (["--prompt", " "], "there is no text in it"),
    (["--prompt", "ba " * 600], "the target takes 512"),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=[" ".join(a)[:30] for a, _ in BAD])
def test_bad_input_is_one_line(
    world: World, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(world, *([] if "--prompt" in arguments else ["--prompt", "x"]), *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_runs_that_cannot_be_talked_to(world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def says(folder: Path) -> Any:
        assert main(["chat", "--run", str(folder), "--prompt", "x"]) == 2
        return capsys.readouterr().err

    assert "no run" in says(tmp_path / "none")
    (tmp_path / "prompts").mkdir()
    assert "manifest is missing; run snakemake" in says(tmp_path)
    (tmp_path / "hidden_states").mkdir()
    values = json.loads((world.run / chat.MANIFEST).read_text())
    (tmp_path / chat.MANIFEST).write_text(json.dumps(values))
    assert "has no trained drafter yet" in says(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "drafters" / name / "best").mkdir(parents=True)
    assert "has the drafters a, b; name one with --drafter" in says(tmp_path)
    (tmp_path / chat.MANIFEST).write_text(json.dumps(values | {"layers": None}))
    assert "damaged" in says(tmp_path)
    (tmp_path / chat.MANIFEST).write_text(json.dumps(values | {"format_version": 99}))
    assert "format version 99" in says(tmp_path)


def test_a_relative_target_is_found_from_the_runs_project(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    (project / "results").mkdir(parents=True)
    (project / "results" / "tiny").symlink_to(world.run)
    values = json.loads((world.run / chat.MANIFEST).read_text())
    moved = project / "results" / "moved"
    (moved / "prompts").mkdir(parents=True)
    (moved / "hidden_states").mkdir()
    (moved / "drafters").symlink_to(world.run / "drafters")
    (project / "resources").mkdir()
    (project / "resources" / "target").symlink_to(values["target"]["path"])
    values["target"]["path"] = "resources/target"
    (moved / chat.MANIFEST).write_text(json.dumps(values))
    monkeypatch.chdir(tmp_path)
    assert main(["chat", "--run", "project/results/moved", "--prompt", question(7), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == answer(7)

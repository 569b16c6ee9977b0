"""`eyas inspect`: what a row's tokens say and which are supervised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from eyas.cli.inspect import decode_pieces, printable
from eyas.cli.main import main
from eyas.conversations import Row
from eyas.shards import write_json
from eyas.target.tokenizer import TargetReference
from eyas.tokenization import tokenize_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_rows import write_recorded_rows
from tiny import make_tokenizer, tiny_config
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

# Thinking is rendered for the last answer alone, as Qwen 3 does.
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['content'] == 'refuse me' %}{{ raise_exception('I will not') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message.get('reasoning_content') and loop.last %}"
    "{{ '<think>\n' + message['reasoning_content'] + '\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def say(role: str, content: str, **more: str) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ROWS = [
    Row(0, "set", [say("user", "ba do ?"), say("assistant", "ki lu")], None, "stop", 3, "a.jsonl:1", "first"),
    Row(1, "set", [
        say("user", "one"), say("assistant", "1", reasoning_content="so"), say("user", "two"), say("assistant", "2"),
    ]),
    Row(2, "set", skipped="bad record: it is [bold]empty[/bold]\x1b[31m", place="a.jsonl:3", id=7),
    Row(3, "[red]x\x1b", [say("user", "[bold]\x1b[31m <|im_end|>"), say("assistant", "中文 é 👩‍💻\r\u202e")]),
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results with the run `tiny`: six rows, of which the first shard is tokenised and the second is not."""
    folder = tmp_path_factory.mktemp("inspect")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "target")
    tiny_config(len(tokenizer)).save_pretrained(folder / "target")
    run = folder / "results" / "tiny"
    for stage in ("prompts", "conversations", "tokens"):
        (run / stage).mkdir(parents=True)
    write_json(run / "prompts" / "index.json", {"rows": 6, "shard_rows": 4, "files": {}})
    write_recorded_rows(run / "conversations" / "rows_0-4.jsonl", ROWS)
    write_recorded_rows(run / "conversations" / "rows_4-6.jsonl", [Row(n, "set", ROWS[0].messages) for n in (4, 5)])
    tokenize_shard(
        run / "conversations" / "rows_0-4.jsonl", run / "tokens" / "rows_0-4.safetensors",
        TargetReference(str(folder / "target")), {
            "max_length": 200, "overlong": "skip", "truncation_side": "right", "train_on": "all_turns",
            "reasoning": "train", "template_options": {},
        },
    )  # fmt: skip
    return folder / "results"


@pytest.fixture
def inspect(results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command; returns what it printed."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def run(*arguments: str, code: int = 0) -> str:
        assert main(["inspect", *arguments, "--results", str(results)]) == code
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return printed.out if code == 0 else printed.err

    return run


PLAIN = "<|im_start|>user\nba do ?<|im_end|>\n<|im_start|>assistant\n⟦ki lu<|im_end|>⟧\n"


def test_supervised_stretches_are_marked_where_there_is_no_colour(inspect: Any, monkeypatch) -> None:
    header, _, body = inspect("tiny", "0").partition("\n")
    count = len(json.loads(inspect("tiny", "0", "--json"))[0]["tokens"])
    assert header == (
        f"row 0 | set | a.jsonl:1 | first | sequence 1 of 1 | {count} tokens | 3 supervised | finish stop"
    )
    assert body == PLAIN + "\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert inspect("tiny", "0").partition("\n")[2] == PLAIN + "\n"


def test_colours(inspect: Any, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, _, body = inspect("tiny", "0").partition("\n")
    assert body.startswith("\x1b[2;34m<|im_start|>\x1b[0muser\nba do ?\x1b[2;34m<|im_end|>\x1b[0m\n")
    assert "⟦" not in body
    said = body.partition("assistant\n")[2]
    assert said == "\x1b[32mki lu\x1b[0m\x1b[2;32m<|im_end|>\x1b[0m\n\n"


def test_json(inspect: Any) -> None:
    (entry,) = json.loads(inspect("tiny", "0", "--json"))
    tokens = entry.pop("tokens")
    assert entry == {
        "row": 0, "source": "set", "place": "a.jsonl:1", "id": "first", "finish": "stop", "sequence": 1, "sequences": 1,
        "text": PLAIN.replace("⟦", "").replace("⟧", ""), "supervised_text": "ki lu<|im_end|>",
    }  # fmt: skip
    assert "".join(token["text"] for token in tokens) == entry["text"]
    assert tokens[0] == {"id": 1, "text": "<|im_start|>", "supervised": False}
    assert [token["text"] for token in tokens if token["supervised"]] == ["ki", " lu", "<|im_end|>"]
    assert tokens[-2] == {"id": 2, "text": "<|im_end|>", "supervised": True}


def test_each_sequence_of_a_row(inspect: Any) -> None:
    first, second = json.loads(inspect("tiny", "1", "--json"))
    assert (first["sequence"], second["sequence"], first["sequences"], second["sequences"]) == (1, 2, 2, 2)
    assert first["supervised_text"] == "<think>\nso\n</think>\n\n1<|im_end|>"
    assert first["text"].startswith("<|im_start|>user\none<|im_end|>\n") and "two" not in first["text"]
    assert second["supervised_text"] == "2<|im_end|>" and "<think>" not in second["text"]
    parts = inspect("tiny", "1").split("\n\nrow 1 | ")
    assert len(parts) == 2 and "sequence 1 of 2" in parts[0] and "sequence 2 of 2" in parts[1]
    assert inspect("tiny", "1", "--raw") == f"{first['text']}\n{second['text']}\n"


def test_a_skipped_row_says_why(inspect: Any) -> None:
    reason = r"bad record: it is [bold]empty[/bold]\x1b[31m"
    assert inspect("tiny", "2") == f"row 2 | set | a.jsonl:3 | 7\nskipped: {reason}\n"
    assert json.loads(inspect("tiny", "2", "--json")) == [
        {
            "row": 2, "source": "set", "place": "a.jsonl:3", "id": 7, "finish": None,
            "skipped": "bad record: it is [bold]empty[/bold]\x1b[31m",
        }
    ]  # fmt: skip


@pytest.mark.parametrize("colour", [False, True])
def test_nothing_of_the_data_reaches_the_terminal_but_text(inspect: Any, monkeypatch, colour: bool) -> None:
    if colour:
        monkeypatch.setenv("FORCE_COLOR", "1")
    shown = inspect("tiny", "3")
    assert r"[red]x\x1b" in shown and r"[bold]\x1b[31m <|im_end|>" in shown and r"中文 é 👩‍💻\r\u202e" in shown
    assert "\x1b[31m" not in shown and "\r" not in shown and "\u202e" not in shown and "\ufffd" not in shown
    assert ("\x1b" in shown) == colour
    if colour:  # the text of a control token is no control token
        assert r"\x1b[31m <|im_end|>" + "\x1b[2;34m<|im_end|>" in shown
    else:
        assert r"⟦中文 é 👩‍💻\r\u202e<|im_end|>⟧" in shown
    text = (
        "<|im_start|>user\n[bold]\x1b[31m <|im_end|><|im_end|>\n<|im_start|>assistant\n中文 é 👩‍💻\r\u202e<|im_end|>\n"
    )
    assert inspect("tiny", "3", "--raw") == f"{text}\n"  # no terminal: as it is
    assert json.loads(inspect("tiny", "3", "--json"))[0]["text"] == text


def test_raw_text_is_escaped_for_a_terminal(inspect: Any, monkeypatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert "\x1b" not in inspect("tiny", "3", "--raw")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("nothing", "0"), "no run 'nothing'"), (("tiny", "6"), "has no row 6; its rows are 0 to 5"),
        (("tiny", "-1"), "has no row -1"), (("tiny", "4"), "rows_4-6.json: this tokens sidecar is missing"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_one_clear_error(inspect: Any, arguments: tuple[str, str], words: str) -> None:
    error = inspect(*arguments, code=2)
    assert error.startswith("error: ") and words in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("prompts/index.json", "{}", "index.json: damaged"),
        ("prompts/index.json", None, "index of the prompts is missing"),
        ("conversations/rows_0-4.jsonl", None, "rows_0-4.jsonl: missing; run snakemake"),
        ("conversations/rows_0-4.jsonl", "", "lacks row 0"),
        ("tokens/rows_0-4.json", "{}", "rows_0-4.json: damaged"),
        ("tokens/rows_0-4.json", '{"format_version": 1}', "format version 1, not"),
        ("tokens/rows_0-4.safetensors", None, "rows_0-4.safetensors"),
        ("tokens/rows_0-4.safetensors", "x" * 99, "rows_0-4.safetensors"),
    ],
)
def test_damaged_runs(inspect: Any, results: Path, name: str, content: str | None, words: str) -> None:
    path = results / "tiny" / name
    whole = path.read_bytes()
    try:
        path.unlink() if content is None else path.write_text(content)
        error = inspect("tiny", "0", code=2)
        assert words in error and len(error.splitlines()) == 1
    finally:
        path.write_bytes(whole)


def test_another_tokenizer_is_refused(inspect: Any, results: Path) -> None:
    path = results.parent / "target" / "tokenizer.json"
    whole = path.read_text(encoding="utf-8")
    try:
        path.write_text(whole.replace('"<|endoftext|>"', '"<|other|>"'), encoding="utf-8")
        assert "put that tokenizer back" in inspect("tiny", "0", code=2)
    finally:
        path.write_text(whole, encoding="utf-8")


def test_starts_without_torch() -> None:
    code = "import sys, eyas.cli.inspect; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- pieces


BYTE_LEVEL = make_tokenizer()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.text(max_size=12), st.data())
def test_pieces_keep_every_token_and_whole_characters(text: str, data: st.DataObject) -> None:
    ids = BYTE_LEVEL(text, add_special_tokens=False)["input_ids"]
    whole = decode_pieces(BYTE_LEVEL, ids, [1] * len(ids))
    assert "".join(piece.text for piece in whole) == text
    mask = data.draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
    begin = data.draw(st.integers(0, len(ids)))
    cut = decode_pieces(BYTE_LEVEL, ids[begin:], mask[begin:])
    assert [token for piece in cut for token in piece.ids] == ids[begin:]
    assert [piece.supervised for piece in cut for _ in piece.ids] == [bool(m) for m in mask[begin:]]
    assert "\ufffd" in text or not any("\ufffd" in piece.text for piece in cut)


def test_a_character_without_all_its_bytes_is_spelled() -> None:
    ids = BYTE_LEVEL("a中b", add_special_tokens=False)["input_ids"]
    assert len(ids) == 5

    def texts(mask: list[int], part: slice = slice(None)) -> list[str]:
        return [piece.text for piece in decode_pieces(BYTE_LEVEL, ids[part], mask[part])]

    assert texts([1] * 5) == ["a", "中", "b"]
    assert texts([1] * 5, slice(3)) == ["a", r"\xe4\xb8"]
    assert "".join(texts([1] * 5, slice(2, 5))) == r"\xb8\xadb"
    assert texts([0, 0, 1, 1, 1])[:2] == ["a", r"\xe4"]


def test_pieces_of_a_tokenizer_with_word_marks_and_byte_fallback() -> None:
    words = ["<unk>", "<s>", "▁", "▁hi", "▁you", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(
        models.BPE({word: k for k, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
    place = {word: k for k, word in enumerate(words)}
    names = ["<s>", "▁hi", "▁you", "<0xE4>", "<0xB8>", "<0xAD>", "▁you", "!", "▁hi"]
    mask = [0, 0, 0, 1, 1, 1, 1, 0, 0]
    pieces = decode_pieces(tokenizer, [place[name] for name in names], mask)
    assert [piece.text for piece in pieces] == ["<s>", " hi", " you", "中", " you", "!", " hi"]
    assert [len(piece.ids) for piece in pieces] == [1, 1, 1, 3, 1, 1, 1]
    assert [piece.control for piece in pieces] == [True] + [False] * 6
    cut = decode_pieces(tokenizer, [place[name] for name in names[:5]], mask[:5])
    assert cut[-1].text == r"\xe4\xb8"


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.text(st.characters(), max_size=8))
def test_printable_text_has_no_control_characters(text: str) -> None:
    shown = printable(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in shown)
    shown.encode("utf-8")  # no half of a surrogate pair
    plain = "".join(c for c in text if c.isprintable())
    assert printable(plain) == plain

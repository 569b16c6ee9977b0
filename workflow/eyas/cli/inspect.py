"""A row of a run as the drafter sees it: its tokens, and which of them are supervised."""

from __future__ import annotations

import itertools
import re
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from eyas.cli.verify import find_run
from eyas.conversations import Row, read_rows
from eyas.errors import EyasError
from eyas.shards import Shard, read_json, shards_of
from eyas.target.special import SpecialTokens
from eyas.target.tokenizer import TargetReference, load_tokenizer, tokenizer_hashes
from eyas.tokenization import read_tokens
from eyas.tokenization.shard import FORMAT_VERSION

_LOST = "\ufffd"  # what a decoder puts for the bytes of a character that is not whole
_OPEN, _CLOSE = "⟦", "⟧"
_JOINERS = "\u200c\u200d"  # parts of words and of emoji


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens that decode to whole characters: all supervised or none, all control tokens or none."""

    ids: tuple[int, ...]
    text: str
    supervised: bool
    control: bool


# ---- reading


def _shard_of(run: Path, row: int) -> Shard:
    index = run / "prompts" / "index.json"
    facts = read_json(index, "index of the prompts")
    try:
        rows, shards = int(facts["rows"]), shards_of(int(facts["rows"]), int(facts["shard_rows"]))
    except (KeyError, TypeError, ValueError):
        raise EyasError(f"{index}: damaged; delete it and run snakemake again") from None
    found = next((shard for shard in shards if row in shard), None)
    if found is None:
        raise EyasError(f"{run}: has no row {row}; its rows are 0 to {rows - 1}")
    return found


def _conversation(path: Path, number: int) -> Row:
    if not path.is_file():
        raise EyasError(f"{path}: missing; run snakemake to build it")
    found = next((row for row in read_rows(path) if row.row == number), None)
    if found is None:
        raise EyasError(f"{path}: lacks row {number}; delete it and run snakemake again")
    return found


def _tokenizer(sidecar: Path, facts: dict[str, Any]) -> Any:
    """The tokenizer that made a tokens shard."""
    reference = TargetReference(**facts["target"])
    tokenizer = load_tokenizer(reference)
    if (found := tokenizer_hashes(tokenizer)["tokenizer_hash"]) != facts["tokenizer_hash"]:
        raise EyasError(
            f"{sidecar}: made with a tokenizer of hash {facts['tokenizer_hash']}, {reference.path} has {found};"
            " put that tokenizer back, or run snakemake again"
        )
    return tokenizer


def inspect_row(run: str, number: int, results: Path = Path("results")) -> list[dict[str, Any]]:
    """What a row of a run (its name or folder) came to: an entry for each of its sequences.

    An entry has `row`, `source`, `place`, `id`, `finish`, `sequence` (from 1), `sequences` and `pieces`; the only
    entry of a row that was skipped has `skipped`, the reason, instead of the last three. Raises EyasError for
    a row or a run that is not there, a stage that is not built yet, and damaged files.
    """
    folder = find_run(run, results)
    shard = _shard_of(folder, number)
    row = _conversation(folder / "conversations" / f"{shard.name}.jsonl", number)
    sidecar = folder / "tokens" / f"{shard.name}.json"
    facts = read_json(sidecar, "tokens sidecar")
    about = {"row": number, "source": row.source, "place": row.place, "id": row.id, "finish": row.finish}
    try:
        if (version := facts["format_version"]) != FORMAT_VERSION:
            raise EyasError(f"{sidecar}: format version {version}, not {FORMAT_VERSION}; run snakemake again")
        reasons = {entry["row"]: entry["reason"] for entry in facts["skipped"]}
        if number in reasons:
            return [about | {"skipped": reasons[number]}]
        tokens = read_tokens(sidecar.with_suffix(".safetensors"))
        found = [k for k, other in enumerate(tokens.row_ids) if other == number]
        if not found:
            raise EyasError(f"{sidecar}: row {number} is neither used nor skipped; delete it and run snakemake again")
        tokenizer = _tokenizer(sidecar, facts)
    except (KeyError, TypeError, AttributeError) as exc:
        raise EyasError(f"{sidecar}: damaged ({exc!r}); delete it and run snakemake again") from None
    entries = []
    for sequence, k in enumerate(found, 1):
        part = slice(int(tokens.offsets[k]), int(tokens.offsets[k + 1]))
        pieces = decode_pieces(tokenizer, tokens.input_ids[part].tolist(), tokens.loss_mask[part].tolist())
        entries.append(about | {"sequence": sequence, "sequences": len(found), "pieces": pieces})
    return entries


# ---- from tokens to text


def decode_pieces(tokenizer: Any, ids: list[int], mask: list[int]) -> list[Piece]:
    """`ids` cut into pieces of text; the tokens of a character that is cut over several stay in one piece.

    A character's bytes that its neighbours lack (the sequence was truncated there) are spelled `\\xe4`.
    """
    special = SpecialTokens(tokenizer).ids
    pieces: list[Piece] = []
    kinds = [(bool(supervised), token in special) for token, supervised in zip(ids, mask, strict=True)]
    first = 0
    for kind, run in itertools.groupby(kinds):
        stop = first + len(list(run))
        behind = first - len(pieces[-1].ids) if pieces else first
        pieces += [Piece(tuple(part), text, *kind) for part, text in _whole(tokenizer, ids, behind, first, stop)]
        first = stop
    return pieces


def _whole(tokenizer: Any, ids: list[int], behind: int, first: int, stop: int) -> Iterator[tuple[list[int], str]]:
    """Tokens `first` to `stop` as few at a time as have whole text, and that text.

    What a decoder makes of tokens depends on what is before them (a word's leading space), so they are decoded
    together with the piece before, which for the first begins at `behind`.
    """

    def decode(begin: int, end: int) -> str:
        text: str = tokenizer.decode(ids[begin:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    start = first
    for end in range(first + 1, stop + 1):
        before = decode(behind, start)
        text = decode(behind, end)
        # Half a character before must not join with what follows.
        whole = text.startswith(before) and not before.endswith(_LOST)
        text = text[len(before) :] if whole else decode(start, end)
        if text.endswith(_LOST) and end < stop:
            continue
        if _LOST in text and (raw := _bytes(tokenizer.convert_ids_to_tokens(ids[start:end]))) is not None:
            text = raw.decode("utf-8", errors="backslashreplace")
        yield ids[start:end], text
        behind, start = start, end


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte (as GPT-2 does)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + k): b for k, b in enumerate(others)}


_BYTES = _byte_letters()


def _bytes(names: list[str]) -> bytes | None:
    """The bytes of byte-level or byte-fallback (`<0xE4>`) tokens; None where others are among them."""
    found = bytearray()
    for name in names:
        if match := re.fullmatch(r"<0x([0-9A-F]{2})>", name):
            found.append(int(match[1], 16))
        elif all(letter in _BYTES for letter in name):
            found += bytes(_BYTES[letter] for letter in name)
        else:
            return None
    return bytes(found)


def printable(text: str, kept: str = "\n\t") -> str:
    """Text with what a terminal would obey (control characters, changes of direction) as escapes like `\\x1b`."""
    return "".join(
        c if c in kept + _JOINERS or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else c.encode("unicode_escape").decode()
        for c in text
    )  # fmt: skip


# ---- showing


def as_json(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries with `tokens` (id, text, supervised), `text` and `supervised_text` in place of their pieces.

    The first token of a piece holds its text; the others' texts are empty.
    """
    found = []
    for entry in entries:
        values = {key: value for key, value in entry.items() if key != "pieces"}
        if "pieces" in entry:
            pieces: list[Piece] = entry["pieces"]
            values["tokens"] = [
                {"id": token, "text": "" if k else piece.text, "supervised": piece.supervised}
                for piece in pieces
                for k, token in enumerate(piece.ids)
            ]
            values["text"] = "".join(piece.text for piece in pieces)
            values["supervised_text"] = "".join(piece.text for piece in pieces if piece.supervised)
        found.append(values)
    return found


def _header(entry: dict[str, Any]) -> str:
    parts = [f"row {entry['row']}", entry["source"]]
    parts += [str(entry[key]) for key in ("place", "id") if entry[key] not in ("", None)]
    if "pieces" in entry:
        pieces: list[Piece] = entry["pieces"]
        parts.append(f"sequence {entry['sequence']} of {entry['sequences']}")
        parts.append(f"{sum(len(piece.ids) for piece in pieces)} tokens")
        parts.append(f"{sum(len(piece.ids) for piece in pieces if piece.supervised)} supervised")
    if entry["finish"] is not None:
        parts.append(f"finish {entry['finish']}")
    return " | ".join(printable(part, kept="") for part in parts)


def _style(piece: Piece) -> str:
    if piece.control:
        return "dim green" if piece.supervised else "dim blue"
    return "green" if piece.supervised else ""


def _mark(piece: Piece) -> str:
    return f"{_OPEN}{{}}{_CLOSE}" if piece.supervised else "{}"


def show(entries: list[dict[str, Any]], raw: bool = False) -> None:
    """Print the entries for people: supervised text is green, or between ⟦ and ⟧ where there is no colour.

    `raw`: the texts alone, without headers and marks; into a file or pipe as they are.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of another encoding, half a surrogate pair
    console = Console(highlight=False, markup=False, emoji=False)
    coloured = console.is_terminal and not console.no_color and console.color_system is not None
    for number, entry in enumerate(entries):
        if raw and "pieces" in entry:
            text = "".join(piece.text for piece in entry["pieces"])
            print(printable(text) if sys.stdout.isatty() else text)
            continue
        header, body = _header(entry), Text()
        if "pieces" not in entry:
            body.append(f"skipped: {printable(entry['skipped'], kept='')}")
        else:  # a stretch at once: colours between them would cut an emoji's characters apart
            for style, pieces in itertools.groupby(entry["pieces"], _style if coloured else _mark):
                text = "".join(printable(piece.text) for piece in pieces)
                body.append(text, style) if coloured else body.append(style.format(text))
        if coloured:
            console.print(Text(f"{chr(10) if number else ''}{header}", "bold"), body, sep="\n", soft_wrap=True)
        else:
            print(f"{chr(10) if number else ''}{header}\n{body.plain}")

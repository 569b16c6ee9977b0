"""The prompts that are decoded: held-out rows of the run and files, without those that the drafter was trained on."""

from __future__ import annotations

import itertools
import logging
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.conversations import Row, read_rows
from eyas.conversations.formats import UnusableRecord, detect, identity_of, read_content
from eyas.conversations.sources import Record, read_records
from eyas.errors import EyasError
from eyas.jobs import Progress
from eyas.shards import checked, is_held_out, shards_of
from eyas.target.chat import ChatTemplate
from eyas.target.tokenizer import TemplateRefusal

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """A conversation up to its first user turn; `label` says where it comes from."""

    label: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """What the user asks."""
        return str(self.messages[-1]["content"])


@dataclass(frozen=True)
class Prompt:
    """Token ids up to the open answer."""

    label: str
    ids: list[int]


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a set that are measured; `overlapping`: how many of the whole set training rows ask too."""

    source: str
    prompts: list[Prompt]
    overlapping: int


@dataclass(frozen=True)
class Conversations:
    """The conversations of a run: `folder` has a file a shard; every `held_out_every`-th row is held out."""

    folder: Path
    rows: int
    shard_rows: int
    held_out_every: int

    def read(self, held_out: bool) -> Iterator[Row]:
        """The usable rows that are held out, or those that are trained on, a shard in memory at a time."""
        for shard in shards_of(self.rows, self.shard_rows):
            wanted = {r for r in range(shard.start, shard.end) if is_held_out(r, self.held_out_every) == held_out}
            if wanted:
                file = self.folder / f"{shard.name}.jsonl"
                checked(file, "shard of conversations")
                found = read_rows(file)
                yield from (row for row in found if row.row in wanted and row.skipped is None)


def normalised(text: str) -> str:
    """The text as it is compared: compatibility forms unified (NFKC), without case, white space collapsed."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _question(label: str, messages: Sequence[dict[str, Any]], tools: Any = None) -> Question | None:
    """Up to the first user turn, with what is before it; None without one."""
    asked = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    return None if asked is None else Question(label, list(messages[: asked + 1]), tools)


def held_out_questions(conversations: Conversations, usable: set[int] | None) -> list[Question]:
    """The questions of the held-out rows, of those in `usable` if it is given. Ready text asks nothing."""
    rows = (row for row in conversations.read(held_out=True) if usable is None or row.row in usable)
    found = (_question(f"row {row.row}", row.messages, row.tools) for row in rows if row.text is None)
    return [question for question in found if question is not None]


def file_questions(path: str, data_format: str) -> list[Question]:
    """The questions of a file of prompts; raises EyasError for a record that holds none."""
    forced = data_format != "auto"
    records = list(read_records(path))
    expected = data_format if forced else detect(record.value for record in records)
    found = [_read_question(path, record, expected, forced) for record in records]
    if not found:
        raise EyasError(f"{path}: holds no prompts")
    return found


def _read_question(path: str, record: Record, expected: str | None, forced: bool) -> Question:
    try:
        if record.unreadable:
            raise UnusableRecord(record.unreadable)
        content = read_content(record.value, expected, forced)
        name = identity_of(record.value)[1]
        question = _question(f"{record.line}" if name is None else f"{name}", content.messages, content.tools)
        if question is None:
            raise UnusableRecord("no user turn")
        return question
    except UnusableRecord as exc:
        reason = str(exc).replace("data.format", "format")
        raise EyasError(f"{path}:{record.line}: {reason}; correct the record, or delete it") from None


def _stands_in(text: str, whole: str) -> bool:
    """Whether `text` is somewhere in `whole`, not as a part of longer words."""
    place = whole.find(text)
    while place >= 0:
        end = place + len(text)
        if not any(character.isalnum() for character in (whole[max(place - 1, 0) : place], whole[end : end + 1])):
            return True
        place = whole.find(text, place + 1)
    return False


def asked_in_training(questions: Sequence[Question], conversations: Conversations) -> set[str]:
    """The normalised texts of `questions` that are some user turn of a training row, or stand in its ready text.

    Ready text does not tell whose words are whose: there a text counts wherever it stands as whole words.
    """
    wanted = {normalised(question.text) for question in questions}
    found: set[str] = set()
    progress = Progress("Comparing prompts with the training rows", conversations.rows, "rows")
    for row in conversations.read(held_out=False):
        for message in row.messages:
            if message["role"] == "user" and (text := normalised(message["content"])) in wanted:
                found.add(text)
        if row.text is not None:
            whole = normalised(row.text)
            found |= {text for text in wanted - found if text and _stands_in(text, whole)}
        progress.advance(1)
    return found


def read_prompt_sets(
    sets: Mapping[str, Mapping[str, Any]],
    conversations: Conversations,
    chat: ChatTemplate,
    usable: set[int] | None = None,
) -> dict[str, PromptSet]:
    """Read the sets (`path`, `format`, `prompts` of each, as the configuration has them).

    The prompts of a set are its first ones that no training row asks and that the chat template renders. `usable`:
    the held-out rows that tokenisation left. Raises EyasError for a file that cannot be used.
    """
    questions: dict[str, list[Question]] = {}
    for name, settings in sets.items():
        if settings["path"] is None:
            questions[name] = held_out_questions(conversations, usable)
        else:
            try:
                questions[name] = file_questions(settings["path"], settings["format"])
            except EyasError as exc:
                reason = str(exc).removeprefix("data.prompts: ")
                raise EyasError(f"evaluation.prompt_sets.{name}: {reason}") from None
    trained = asked_in_training([question for entries in questions.values() for question in entries], conversations)
    found = {}
    for name, settings in sets.items():
        new = [question for question in questions[name] if normalised(question.text) not in trained]
        source = "held-out rows of the run" if settings["path"] is None else settings["path"]
        prompts = list(itertools.islice(_rendered(new, chat), settings["prompts"]))
        found[name] = PromptSet(source, prompts, len(questions[name]) - len(new))
        log.info(
            "Prompt set %s: %d of %d prompts (%s); %d more are asked in training rows as well, and are left out.",
            name, len(prompts), len(new), source, found[name].overlapping,
        )  # fmt: skip
        if not prompts:
            log.warning("Prompt set %s has no prompt that can be measured; its figures are null.", name)
    return found


def _rendered(questions: Sequence[Question], chat: ChatTemplate) -> Iterator[Prompt]:
    for question in questions:
        try:
            yield Prompt(question.label, chat.prompt_ids(question.messages, question.tools))
        except TemplateRefusal as exc:
            log.info("%s gives no prompt: %s.", question.label, exc)

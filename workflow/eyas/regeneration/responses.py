"""One shard of responses: every assistant turn is the target's own (or the data's, on request)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.conversations import Row, read_rows, write_rows
from eyas.jobs import Progress
from eyas.shards import Journal, checksum, describe_file, fingerprint, is_complete, write_json, write_lock
from eyas.shards.files import publish
from eyas.target.tokenizer import TargetReference, TemplateRefusal, end_of_turn_ids, load_tokenizer, prompt_ids
from eyas.versions import VERSIONS

log = logging.getLogger(__name__)

FORMAT_VERSION = VERSIONS["conversations"]


def user_turns(row: Row) -> int:
    return sum(m["role"] == "user" for m in row.messages)


def _history(row: Row, replies: Sequence[str]) -> list[dict[str, Any]]:
    """The conversation up to the next open assistant turn: user turns replayed, answers the target's."""
    history: list[dict[str, Any]] = []
    answers = iter(replies)
    for message in row.messages:
        if message["role"] == "assistant":
            continue
        if message["role"] == "user" and history and history[-1]["role"] == "user":
            answer = next(answers, None)
            if answer is None:
                break
            history.append({"role": "assistant", "content": answer})
        history.append(message)
    return history


def keep_responses(rows: Sequence[Row]) -> list[Row]:
    """The data's own answers; rows without one are skipped."""
    kept = []
    for row in rows:
        answered = row.skipped is None and any(m["role"] == "assistant" and m["content"].strip() for m in row.messages)
        if row.skipped is None and not answered:
            row = Row(row.row, row.source, skipped="no answer in the data (responses.engine: keep)")
        kept.append(row)
    return kept


class _Generation:
    """Decodes the rows of a shard, turn by turn and batch by batch, through a journal.

    Batches are fixed by the shard's rows and `batch_rows` alone, so a job that is killed
    and run again makes the very batches that are missing, and the same bytes.
    """

    def __init__(self, target: TargetReference, settings: dict[str, Any], gpus: int) -> None:
        from eyas.regeneration.generate import Sampling
        from eyas.target.model import load_target

        self.settings = settings
        self.tokenizer = load_tokenizer(target)
        self.end_ids = end_of_turn_ids(target, self.tokenizer)
        self.model = load_target(target, gpus)
        self.sampling = Sampling(
            settings["max_new_tokens"], settings["temperature"], settings["top_p"], settings["seed"]
        )

    def text_of(self, reply_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(reply_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text.rstrip("\ufffd")  # a character cut in two by the token limit

    def run(self, rows: Sequence[Row], batch_rows: int, journal: Journal, name: str) -> list[Row]:
        """Answer every row; finished batches are taken from the journal."""
        from eyas.regeneration.generate import generate

        done = {(r["row"], r["turn"]): r for r in journal.records}
        replies: dict[int, list[str]] = {row.row: [] for row in rows}
        skipped = {row.row: row.skipped for row in rows}
        last: dict[int, dict[str, Any]] = {}
        turns = sum(user_turns(row) for row in rows if row.skipped is None)
        progress = Progress(f"Responses {name}", turns, "turns", already=len(done))
        tokens = 0
        for turn in range(max((user_turns(row) for row in rows), default=0)):
            pending = []
            for row in rows:
                cut_off = row.row in last and last[row.row]["finish"] == "length"
                if skipped[row.row] is None and turn < user_turns(row) and not cut_off:
                    reason = None
                    try:
                        ids = prompt_ids(self.tokenizer, _history(row, replies[row.row]))
                        if len(ids) + 1 > self.settings["max_length"]:
                            reason = f"too long: the prompt of turn {turn + 1} has {len(ids)} tokens"
                    except TemplateRefusal as exc:
                        reason = str(exc)
                    if reason is None:
                        pending.append((row.row, ids))
                    else:
                        skipped[row.row] = reason
                        log.info("Row %d is skipped: %s.", row.row, reason)
                        progress.advance(user_turns(row) - turn)
            pending.sort(key=lambda item: (len(item[1]), item[0]))
            for start in range(0, len(pending), batch_rows):
                batch = pending[start : start + batch_rows]
                if not all((number, turn) in done for number, _ in batch):
                    counted = 0.0  # turns of this batch that its steps so far come to

                    def on_tokens(made: int) -> None:
                        nonlocal tokens, counted
                        tokens += made
                        share = made / self.settings["max_new_tokens"]
                        counted += share
                        progress.advance(share, f"{tokens / max(progress.seconds, 1e-9):,.0f} tok/s")

                    keys = [number * 1000 + turn for number, _ in batch]
                    made = generate(self.model, [ids for _, ids in batch], self.end_ids, self.sampling, keys, on_tokens)
                    records = [
                        {
                            "row": number,
                            "turn": turn,
                            "text": self.text_of(r.ids),
                            "finish": r.finish,
                            "tokens": len(r.ids),
                        }
                        for (number, _), r in zip(batch, made, strict=True)
                    ]
                    journal.append(*records)
                    done.update({(r["row"], r["turn"]): r for r in records})
                    progress.advance(len(batch) - counted, f"{tokens / max(progress.seconds, 1e-9):,.0f} tok/s")
                for number, _ in batch:
                    record = done[number, turn]
                    replies[number].append(record["text"])
                    last[number] = record
                    skipped[number] = self._unusable(record)
        log.info("%s.", progress.line())
        return [self._finished(row, replies[row.row], skipped[row.row], last.get(row.row)) for row in rows]

    def _unusable(self, record: dict[str, Any]) -> str | None:
        if record["finish"] == "length" and self.settings["truncated"] == "skip":
            return f"truncated: no end of turn within {record['tokens']} tokens (responses.truncated: skip)"
        if not record["text"].strip():
            return "empty: the target answered nothing"
        return None

    @staticmethod
    def _finished(row: Row, replies: list[str], skipped: str | None, last: dict[str, Any] | None) -> Row:
        if last is None:
            return Row(row.row, row.source, skipped=skipped or row.skipped)
        if skipped is not None:
            return Row(row.row, row.source, [], skipped, last["finish"], last["tokens"])
        # A kept answer that was cut off ends the conversation: the target never ended its turn.
        messages = _history(row, replies[:-1])
        messages.append({"role": "assistant", "content": replies[-1]})
        return Row(row.row, row.source, messages, None, last["finish"], last["tokens"])


def respond_shard(
    prompts: Path,
    output: Path,
    target: TargetReference,
    settings: dict[str, Any],
    batch_rows: int = 32,
    gpus: int = 0,
) -> None:
    """Write `output` (JSONL rows with answers) and its `.json` sidecar for one shard of prompts.

    `settings`: engine, max_new_tokens, temperature, top_p, truncated, seed, max_length.
    A killed job resumes at its first unfinished batch.
    """
    sidecar = output.with_suffix(".json")
    mark = fingerprint(
        version=FORMAT_VERSION, settings=settings, prompts=checksum(prompts),
        target=[target.path, target.revision, target.dtype],
    )  # fmt: skip
    with write_lock(output):
        if is_complete(sidecar, mark):
            log.info("%s was finished by another process in the meantime.", output)
            return
        rows = read_rows(prompts)
        staging = output.parent / ".staging" / output.stem
        with Journal(staging, fingerprint(job=mark, batch_rows=batch_rows)) as journal:
            if settings["engine"] == "keep":
                answered = keep_responses(rows)
            else:
                if journal.records:
                    log.info("Resuming %s: %d answers are there from before.", output.stem, len(journal.records))
                answered = _Generation(target, settings, gpus).run(rows, batch_rows, journal, output.stem)
        write_rows(staging / output.name, answered)
        usable = [row for row in answered if row.skipped is None]
        write_json(
            staging / sidecar.name,
            {
                "format_version": FORMAT_VERSION,
                "fingerprint": mark,
                "rows": len(usable),
                "reply_tokens": sum(row.reply_tokens or 0 for row in usable),
                "truncated": sum(row.finish == "length" for row in usable),
                "skipped": [{"row": row.row, "reason": row.skipped} for row in answered if row.skipped is not None],
                "files": {output.name: describe_file(staging / output.name)},
            },
        )
        publish({staging / output.name: output, staging / sidecar.name: sidecar}, staging)
        log.info("Wrote %s: %d answers, %d rows skipped.", output, len(usable), len(answered) - len(usable))

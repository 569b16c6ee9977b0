"""One shard of responses: every assistant turn is the target's own (or the data's, on request)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eyas.config.schema import EndpointOptions
from eyas.conversations import Row, read_rows, write_rows
from eyas.errors import EyasError
from eyas.jobs import Progress
from eyas.regeneration.replay import Replay, message_of_text
from eyas.shards import Journal, checked, describe_file, fingerprint, is_complete, write_lock, write_sealed
from eyas.shards.files import publish
from eyas.target.chat import ChatTemplate
from eyas.target.tokenizer import TargetReference, TemplateRefusal, end_of_turn_ids, load_tokenizer
from eyas.versions import VERSIONS

log = logging.getLogger(__name__)

FORMAT_VERSION = VERSIONS["conversations"]


def keep_responses(rows: Sequence[Row]) -> list[Row]:
    """The data's own answers; rows without one are skipped, ready text is taken as it is."""
    kept = []
    for row in rows:
        answered = row.text is not None or any(
            m["role"] == "assistant" and (m["content"].strip() or m.get("tool_calls")) for m in row.messages
        )
        if row.skipped is None and not answered:
            row = row.skip("no answer in the data (responses.engine: keep)")
        kept.append(row)
    return kept


def _answers(row: Row) -> int:
    """The most answers that a row can need: one for each user turn and each round of tool results."""
    roles = [m["role"] for m in row.messages if m["role"] != "assistant"]
    return sum(role == "user" or (role == "tool" and roles[i + 1 : i + 2] != ["tool"]) for i, role in enumerate(roles))


class _Generation:
    """Decodes the rows of a shard, turn by turn and batch by batch, through a journal.

    Batches are fixed by the shard's rows and `batch_rows` alone, so a job that is killed
    and run again makes the very batches that are missing, and the same bytes.
    """

    def __init__(self, target: TargetReference, settings: dict[str, Any], model: Any) -> None:
        from eyas.regeneration.generate import Sampling

        self.settings = settings
        self.tokenizer = load_tokenizer(target)
        self.chat = ChatTemplate(self.tokenizer, settings.get("template_options"))
        self.end_ids = end_of_turn_ids(target, self.tokenizer)
        self.model = model
        # To go on with an answer is the same as a later limit, in-process.
        parts = 1 + settings["max_continuations"] if settings["truncated"] == "continue" else 1
        self.sampling = Sampling(
            parts * settings["max_new_tokens"], settings["temperature"], settings["top_p"], settings["seed"]
        )

    def text_of(self, reply_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(reply_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text.rstrip("\ufffd")  # a character cut in two by the token limit

    def run(self, rows: Sequence[Row], batch_rows: int, journal: Journal, name: str) -> list[Row]:
        """Answer every row; finished batches are taken from the journal."""
        from eyas.regeneration.generate import generate

        done = {(r["row"], r["turn"]): r for r in journal.records}
        replays = {row.row: Replay(row) for row in rows}
        skipped = {row.row: row.skipped for row in rows}
        for row in rows:
            if row.text is not None:
                skipped[row.row] = "ready text has no turns to answer (responses.engine: keep takes it as it is)"
        last: dict[int, dict[str, Any]] = {}
        turns = sum(_answers(row) for row in rows if skipped[row.row] is None)
        progress = Progress(f"Responses {name}", turns, "turns", already=len(done))
        tokens = 0
        for turn in range(max((_answers(row) for row in rows), default=0)):
            pending = []
            for row in rows:
                replay = replays[row.row]
                if skipped[row.row] is None and replay.open:
                    reason = None
                    try:
                        ids = self.chat.prompt_ids(replay.messages, row.tools)
                        if len(ids) + 1 > self.settings["max_length"]:
                            reason = f"too long: the prompt of turn {turn + 1} has {len(ids)} tokens"
                    except TemplateRefusal as exc:
                        reason = str(exc)
                    if reason is None:
                        pending.append((row.row, ids))
                    else:
                        skipped[row.row] = reason
                        log.info("Row %d is skipped: %s.", row.row, reason)
                        progress.advance(_answers(row) - turn)
            pending.sort(key=lambda item: (len(item[1]), item[0]))
            for start in range(0, len(pending), batch_rows):
                batch = pending[start : start + batch_rows]
                if not all((number, turn) in done for number, _ in batch):
                    counted = 0.0  # turns of this batch that its steps so far come to

                    def on_tokens(made: int) -> None:
                        nonlocal tokens, counted
                        tokens += made
                        share = made / self.sampling.max_new_tokens
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
                    last[number] = record
                    skipped[number] = self._unusable(record)
                    # A kept answer that was cut off ends the conversation: the target never ended its turn.
                    replay = replays[number]
                    message = message_of_text(record["text"], bool(replay.row.tools))
                    replay.answer(message, ends=record["finish"] == "length" or skipped[number] is not None)
        log.info("%s.", progress.line())
        return [self._finished(replays[row.row], skipped[row.row], last.get(row.row)) for row in rows]

    def _unusable(self, record: dict[str, Any]) -> str | None:
        if record["finish"] == "length" and self.settings["truncated"] != "keep":
            how = self.settings["truncated"]
            return f"truncated: no end of turn within {record['tokens']} tokens (responses.truncated: {how})"
        if not record["text"].strip():
            return "empty: the target answered nothing"
        return None

    @staticmethod
    def _finished(replay: Replay, skipped: str | None, last: dict[str, Any] | None) -> Row:
        row = replay.row
        if skipped is not None:
            ended = {} if last is None else {"finish": last["finish"], "reply_tokens": last["tokens"]}
            return row.skip(skipped, **ended)
        if last is None:
            return row.skip("no user turn to answer")
        return Row(
            row.row, row.source, replay.messages, None, last["finish"], last["tokens"], row.place, row.id, row.tools
        )


def respond_shard(
    prompts: Path,
    output: Path,
    target: TargetReference,
    settings: dict[str, Any],
    batch_rows: int = 32,
    gpus: int = 0,
    endpoint: EndpointOptions | None = None,
    load: Callable[[], Any] | None = None,
) -> None:
    """Write `output` (JSONL rows with answers) and its `.json` sidecar for one shard of prompts.

    `settings`: engine, max_new_tokens, temperature, top_p, truncated, max_continuations, seed, max_length,
    template_options; for the engine `openai` also model and extra_body, and `endpoint` says how it is reached.
    `load` gives the target's model, when several shards share it.
    A killed job resumes at its first unfinished batch (in-process) or its unanswered turns (endpoint).
    """
    sidecar = output.with_suffix(".json")
    over_endpoint = settings["engine"] == "openai"
    given = checked(prompts, "shard of prompts", record=prompts.parent / "index.json")
    mark = fingerprint(
        version=FORMAT_VERSION, settings=settings, prompts=given,
        target=None if over_endpoint else [target.path, target.revision, target.dtype],
    )  # fmt: skip
    with write_lock(output):
        if is_complete(sidecar, mark):
            log.info("%s is finished already.", output)
            return
        rows = read_rows(prompts)
        staging = output.parent / ".staging" / output.stem
        more: dict[str, Any] = {}
        limits = None
        with Journal(staging, fingerprint(job=mark, batch_rows=None if over_endpoint else batch_rows)) as journal:
            if journal.records:
                log.info("Resuming %s: %d answers are there from before.", output.stem, len(journal.records))
            if settings["engine"] == "keep":
                answered = keep_responses(rows)
            elif over_endpoint:
                from eyas.regeneration.limits import SharedLimits
                from eyas.regeneration.openai import EndpointRun, used_by

                if endpoint is None:
                    raise EyasError("responses.endpoint: is missing; the engine openai needs urls and a model")
                limits = SharedLimits(output.parent, output.stem, endpoint, used_by(journal.records))
                run = EndpointRun(settings, endpoint, journal, limits, output.stem)
                try:
                    answered = run.run(rows)
                finally:
                    limits.close()
                more["paid_tokens"] = {"prompt": run.journalled.prompt, "answer": run.journalled.answer}
            else:
                from eyas.target.model import load_target

                model = load() if load else load_target(target, gpus)
                answered = _Generation(target, settings, model).run(rows, batch_rows, journal, output.stem)
        write_rows(staging / output.name, answered)
        usable = [row for row in answered if row.skipped is None]
        write_sealed(
            staging / sidecar.name,
            {
                "format_version": FORMAT_VERSION,
                "fingerprint": mark,
                "rows": len(usable),
                "reply_tokens": sum(row.reply_tokens or 0 for row in usable),
                "truncated": sum(row.finish == "length" for row in usable),
                "skipped": [{"row": row.row, "reason": row.skipped} for row in answered if row.skipped is not None],
                **more,
                "files": {output.name: describe_file(staging / output.name)},
            },
        )
        if limits:
            limits.finish({path.stem for path in prompts.parent.glob(f"rows_*{prompts.suffix}")})
        publish({staging / output.name: output, staging / sidecar.name: sidecar}, staging)
        log.info("Wrote %s: %d answers, %d rows skipped.", output, len(usable), len(answered) - len(usable))

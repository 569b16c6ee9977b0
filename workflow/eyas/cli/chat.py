"""`eyas chat`: talk to a run's target, and see what its drafter does."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from eyas.cli.inspect import printable
from eyas.cli.text_stream import TextStream
from eyas.cli.verify import find_run
from eyas.errors import EyasError
from eyas.shards import read_json
from eyas.target.tokenizer import TargetReference

if TYPE_CHECKING:
    from eyas.decoding.decode import Decoded
    from eyas.decoding.eagle import EagleProposer
    from eyas.decoding.sampling import Sampling
    from eyas.drafter.model import Drafter
    from eyas.extraction.manifest import Manifest
    from eyas.target.chat import ChatTemplate
    from eyas.target.model import TargetModel

MANIFEST = "hidden_states/data_config.json"
HELP = "/new begins a new conversation, /quit or Ctrl-D ends; Ctrl-C stops an answer."
Say = Callable[[str, bool], None]  # a piece of text, and whether it was drafted


@dataclass(frozen=True)
class ChatOptions:
    """What the command line says, see `eyas chat --help`."""

    run: str
    results: Path = Path("results")
    drafter: str | None = None
    drafter_folder: Path | None = None
    target: str | None = None
    trust_remote_code: bool = False
    gpu: int = 0
    draft_steps: int = 5
    topk: int = 1
    draft_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 0
    max_new_tokens: int = 512
    system: str | None = None
    template_options: str | None = None


@dataclass
class Answer:
    """An answer to the last of the messages."""

    text: str
    drafted: list[bool]
    decoded: Decoded
    finish: str  # stop, length, or interrupted

    def facts(self) -> dict[str, Any]:
        """Its figures, as they stand in the JSON form too."""
        made = self.decoded
        accepted = sum(made.accepted)
        return {
            "tokens": len(made.ids),
            "target_forwards": made.forwards,
            "drafted_tokens": accepted,
            # the first token is the prefill's
            "tokens_per_forward": (len(made.ids) - 1) / made.forwards if made.forwards else None,
            "acceptance_length": 1 + accepted / made.forwards if made.forwards else None,
            "seconds": made.seconds,
            "finish": self.finish,
        }


# ---- what a run consists of


def _read_manifest(run: Path) -> Manifest:
    """The run's manifest. Its shards may be gone by now: nothing here reads them."""
    from eyas.extraction.manifest import FORMAT_VERSION, Manifest

    values = read_json(run / MANIFEST, "manifest")
    try:
        if values["format_version"] != FORMAT_VERSION:
            raise EyasError(
                f"{run / MANIFEST}: format version {values['format_version']}, this Eyas reads {FORMAT_VERSION};"
                " delete it and run snakemake again"
            )
        TargetReference.from_json(json.dumps(values["target"]))
        [int(layer) for layer in values["layers"]]
    except (KeyError, TypeError, ValueError) as exc:
        raise EyasError(f"{run / MANIFEST}: damaged ({exc!r}); delete it and run snakemake again") from None
    return Manifest(run / MANIFEST, values)


def _find_target(run: Path, manifest: Manifest, options: ChatOptions) -> TargetReference:
    """The target as the manifest names it: where a path is relative, from here or from the run's project."""
    values = dict(manifest.values["target"]) | {"trust_remote_code": options.trust_remote_code}
    if options.target is not None:
        values |= {"path": options.target}
    elif not Path(values["path"]).exists():
        beside = run.resolve().parent.parent / values["path"]
        if beside.is_dir():
            values["path"] = str(beside)
    return TargetReference.from_json(json.dumps(values))


def _find_drafter(run: Path, options: ChatOptions) -> Path:
    if options.drafter_folder is not None:
        return options.drafter_folder
    folder = run / "drafters"
    names = sorted(path.name for path in folder.iterdir() if (path / "best").is_dir()) if folder.is_dir() else []
    if options.drafter is None and len(names) == 1:
        return folder / names[0] / "best"
    if options.drafter in names:
        return folder / str(options.drafter) / "best"
    if not names:
        raise EyasError(f"{run}: has no trained drafter yet; run snakemake, or name one with --drafter-folder")
    if options.drafter is None:
        raise EyasError(f"{run}: has the drafters {', '.join(names)}; name one with --drafter")
    raise EyasError(f"{run}: has no trained drafter {options.drafter!r}; it has {', '.join(names)}")


def _load_drafter(folder: Path, target: TargetModel) -> Drafter:
    from eyas.drafter.published import load_any_drafter

    if not folder.is_dir():
        raise EyasError(f"{folder}: no such folder; name one with a drafter's config.json and model.safetensors")
    return load_any_drafter(folder, target).to(target.device).eval()


@dataclass
class Talk:
    """A conversation with a loaded target and its drafter."""

    target: TargetModel
    proposer: EagleProposer
    chat: ChatTemplate
    end_ids: list[int]
    sampling: Sampling
    max_new_tokens: int
    names: str  # of target and drafter, for people
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def begin_anew(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, question: str, say: Say | None = None) -> Answer:
        """Answer the user's next turn; `say` hears its text as it comes. Raises EyasError, and forgets the turn."""
        from eyas.decoding.decode import Decoded, Round, decode
        from eyas.target.refusal import TemplateRefusal

        # what was no UTF-8 on the command line or in a pipe is no text for a tokenizer either
        question = question.encode("utf-8", "replace").decode("utf-8")
        self.messages.append({"role": "user", "content": question})
        try:
            prompt = self.chat.prompt_ids(self.messages)
            limit = self._limit(len(prompt))
        except (EyasError, TemplateRefusal) as exc:
            self.messages.pop()
            raise EyasError(f"this turn cannot be answered: {exc}") from None
        stream = TextStream(self.chat.tokenizer)
        drafted: list[bool] = []
        rounds: list[Round] = []
        began = time.perf_counter()

        def hear(tokens: list[int], accepted: int) -> None:
            if drafted:  # the first token is the prefill's
                rounds.append(Round(len(tokens), accepted, self.proposer.size.steps))
            for place, token in enumerate(tokens):
                drafted.append(place < accepted)
                if token in self.end_ids:
                    stopped.append(token)
                    continue
                piece = stream.add(token, drafted[-1])
                if piece and say:
                    say(*piece)

        stopped: list[int] = []
        try:
            made = decode(self.target, self.proposer, prompt, self.end_ids, limit, self.sampling, hear)
            finish = "stop" if made.ids[-1] in self.end_ids else "length"
        except KeyboardInterrupt:
            made = Decoded([*stream.ids, *stopped], rounds, time.perf_counter() - began)
            finish = "interrupted"
        piece = stream.rest()
        if piece and say:
            say(*piece)
        text = self.chat.tokenizer.decode(made.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self.messages.append({"role": "assistant", "content": text})
        return Answer(text, drafted, made, finish)

    def _limit(self, prompt: int) -> int:
        room = getattr(self.target.config, "max_position_embeddings", None) or sys.maxsize
        if prompt >= room:
            raise EyasError(f"the conversation has {prompt} tokens, the target takes {room}; begin a new one (/new)")
        return min(self.max_new_tokens, room - prompt)


def load(options: ChatOptions) -> Talk:
    """Load target and drafter; raises EyasError for whatever is missing or does not fit."""
    if options.max_new_tokens < 1:
        raise EyasError(f"--max-new-tokens: {options.max_new_tokens} is less than 1")
    try:
        template_options = json.loads(options.template_options or "{}")
        if not isinstance(template_options, dict):
            raise ValueError("no object")
    except ValueError as exc:
        raise EyasError(
            f'--template-options: must be a JSON object such as {{"enable_thinking": false}} ({exc})'
        ) from None
    run = find_run(options.run, options.results)
    manifest = _read_manifest(run)
    folder = _find_drafter(run, options)
    reference = _find_target(run, manifest, options)

    from eyas.decoding.eagle import EagleProposer
    from eyas.decoding.sampling import Sampling
    from eyas.decoding.tree import TreeSize
    from eyas.decoding.tree_pass import require_trees
    from eyas.extraction.manifest import require, require_target
    from eyas.target.chat import ChatTemplate
    from eyas.target.model import load_target, target_identity
    from eyas.target.tokenizer import end_of_turn_ids, load_tokenizer, tokenizer_hashes

    sampling = Sampling(options.temperature, options.seed)
    size = TreeSize.of(options.draft_steps, options.topk, options.draft_tokens)
    tokenizer = load_tokenizer(reference)
    require_target(manifest, target_identity(reference))
    require(manifest, **tokenizer_hashes(tokenizer))
    target = load_target(reference, options.gpu)
    drafter = _load_drafter(folder, target)
    if size.topk > 1:
        require_trees(target)
    talk = Talk(
        target,
        EagleProposer(drafter, drafter.shape.layers, options.draft_steps, options.topk, options.draft_tokens),
        ChatTemplate(tokenizer, template_options),
        end_of_turn_ids(reference, tokenizer),
        sampling,
        options.max_new_tokens,
        f"{reference.path} with {folder}",
        options.system,
    )
    talk.begin_anew()
    return talk


# ---- talking


def _describe(answer: Answer, steps: int, end_ids: list[int]) -> str:
    from eyas.decoding.loops import is_looping

    facts = answer.facts()
    if not facts["target_forwards"]:
        return f"{facts['tokens']} token, from the prompt's own pass"
    line = (
        f"{facts['tokens']} tokens in {facts['target_forwards']} target passes:"
        f" {facts['tokens_per_forward']:.2f} tokens a pass, {facts['drafted_tokens']} of them drafted"
        f" ({facts['acceptance_length'] - 1:.2f} of {steps} steps accepted); {facts['seconds']:.1f} s"
    )
    notes = {"length": "cut off by --max-new-tokens", "interrupted": "stopped"}
    if answer.finish in notes:
        line += f"; {notes[answer.finish]}"
    if is_looping(answer.decoded.ids, end_ids):
        line += "; fallen into a loop, which is easy to draft"
    return line


def _questions(console: Console) -> Iterator[str]:
    """The user's turns: lines that are typed, or that come through a pipe."""
    if sys.stdin is None:
        return
    if not sys.stdin.isatty():
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    try:
        import readline  # noqa: F401  # lets input() edit lines and recall earlier ones
    except ImportError:
        pass
    while True:
        try:
            line = input("> ").strip()  # readline shows the prompt itself, and so knows where the line begins
        except EOFError:
            console.print()
            return
        if line:
            yield line


def _piece_printer(console: Console, coloured: bool) -> Say:
    style = "underline" if console.no_color else "green"

    def say(text: str, drafted: bool) -> None:
        if coloured:
            console.print(Text(printable(text), style if drafted else ""), end="", soft_wrap=True)
        else:
            console.file.write(printable(text) if console.is_terminal else text)
        console.file.flush()

    return say


def run_chat(options: ChatOptions, prompt: str | None = None, as_json: bool = False) -> int:
    """Talk until the user's turns end; `prompt` is the only one, `-` for all of standard input. Exit code 0.

    Raises EyasError where nothing can be answered at all; a turn that cannot is reported, and the next is asked for.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal of another encoding
    console = Console(highlight=False, markup=False, emoji=False)
    if prompt == "-":
        prompt = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
    if prompt is not None and not prompt.strip():
        raise EyasError("--prompt: there is no text in it")
    talk = load(options)
    interactive = prompt is None and sys.stdin is not None and sys.stdin.isatty() and not as_json
    coloured = console.is_terminal and console.color_system is not None
    if interactive:
        drafted = Text("drafted", "underline" if console.no_color else "green") if coloured else Text("drafted")
        console.print(printable(talk.names, kept=""))
        console.print(
            Text.assemble("What the drafter wrote and the target accepted is shown as ", drafted, f". {HELP}")
        )
    code = 0
    for question in [prompt] if prompt is not None else _questions(console):
        if interactive and question.startswith("/"):
            if question in ("/quit", "/exit"):
                break
            if question == "/new":
                talk.begin_anew()
            else:
                console.print(HELP)
            continue
        try:
            answer = talk.ask(question, None if as_json else _piece_printer(console, coloured))
        except EyasError as exc:
            if prompt is not None:
                raise
            print(f"error: {exc}", file=sys.stderr)
            code = 2
            continue
        if as_json:
            values = {"prompt": question, "text": answer.text, **answer.facts()}
            values |= {"ids": answer.decoded.ids, "drafted": answer.drafted}
            print(json.dumps(values), flush=True)
            continue
        line = f"[{_describe(answer, talk.proposer.size.steps, talk.end_ids)}]"
        console.print(Text(f"\n{line}\n", "dim" if coloured else ""), soft_wrap=True)
    return 0 if interactive else code

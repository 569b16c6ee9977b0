"""The `eyas` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas import __version__
from eyas.cli.plan import add_options
from eyas.errors import EyasError


def _doctor(args: argparse.Namespace) -> int:
    from eyas.cli.doctor import examine, show

    facts = examine(Path(args.results))
    print(json.dumps(facts, indent=1)) if args.json else show(facts)
    return 0 if facts["ready"] else 1


def _verify(args: argparse.Namespace) -> int:
    from eyas.cli.verify import show, verify_run

    result = verify_run(args.run, Path(args.results))
    print(json.dumps(result, indent=1)) if args.json else show(result)
    return 1 if result["problems"] else 0


def _inspect(args: argparse.Namespace) -> int:
    from eyas.cli.inspect import as_json, inspect_row, show

    entries = inspect_row(args.run, args.row, Path(args.results))
    print(json.dumps(as_json(entries), indent=1)) if args.json else show(entries, args.raw)
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    from eyas.cli.evaluate import OVERRIDES, evaluate_folder, logging_to_stderr, show

    changes = {key: getattr(args, key) for key in OVERRIDES}
    with logging_to_stderr():
        result = evaluate_folder(
            args.run, args.drafter_folder, Path(args.results), args.configfile, changes, args.decoding_only,
            args.threads, args.gpu,
        )  # fmt: skip
    print(json.dumps(result, indent=1)) if args.json else show(result)
    return 0


def _plan(args: argparse.Namespace) -> int:
    from eyas.cli.plan import describe_forecast, plan_for
    from eyas.extraction.space import describe

    found = plan_for(args)
    if args.json:
        forecast = found.forecast.as_json() if found.forecast else None
        print(json.dumps(found.space.as_json() | {"forecast": forecast}, indent=1))
    else:
        print(*describe(found.space), *(describe_forecast(found.forecast) if found.forecast else []), sep="\n")
    return 0 if found.space.fits else 1


def _status(args: argparse.Namespace) -> int:
    from eyas.cli.status import show, watch
    from eyas.status import collect, find_status_run

    run = find_status_run(args.run, Path(args.results))
    if args.watch is not None:
        return watch(run, args.watch, args.json)
    return show(collect(run), args.json)


def _report(args: argparse.Namespace) -> int:
    from eyas.cli.report import build_page, show

    return show(*build_page(args.configfile), open_it=not args.no_open)


def _chat(args: argparse.Namespace) -> int:
    from eyas.cli.chat import ChatOptions, run_chat

    values = {name: getattr(args, name) for name in ChatOptions.__dataclass_fields__}
    return run_chat(ChatOptions(**values), args.prompt, args.json)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 86_400:
        raise ValueError(text)
    return value


def _at_least(least: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if (value := int(text)) < least:
            raise ValueError(text)
        return value

    whole.__name__ = f"whole number of at least {least}"  # argparse's word for it
    return whole


def _add_evaluate(commands: Any) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="measure a drafter folder on a run",
        description="Acceptance of any EAGLE-3 drafter (a checkpoint or an export of Eyas, or a published head), from"
        " the hidden states of the run's held-out rows and in decoding the run's prompt sets, beside plain decoding and"
        " prompt lookup. Nothing is written. Exit code 0, or 2 when the drafter or the run cannot be used.",
    )
    evaluate.add_argument("--run", required=True, help="name of the run, or its folder")
    evaluate.add_argument(
        "--drafter-folder", type=Path, required=True, help="folder with the drafter's config.json and safetensors"
    )
    evaluate.add_argument("--results", default="results", help="folder of the runs (default: results)")
    evaluate.add_argument("--configfile", help="the configuration (default: the settings that the run recorded)")
    evaluate.add_argument(
        "--decoding-only", action="store_true", help="leave the hidden states out; the drafter may read other layers"
    )
    for name, meaning in (
        ("draft-steps", "steps of drafting in a round"), ("topk", "branches of a drafted token; 1 is a chain"),
        ("draft-tokens", "tokens checked in a round, the root included"), ("max-new-tokens", "tokens a prompt"),
        ("prompts", "prompts of each set"),
    ):  # fmt: skip
        evaluate.add_argument(f"--{name}", type=_at_least(1), metavar="N", help=f"{meaning} (default: as configured)")
    evaluate.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: as configured)")
    evaluate.add_argument("--threads", type=_at_least(1), default=2, metavar="N", help="CPU threads (default: 2)")
    evaluate.add_argument("--gpu", type=_at_least(0), default=0, metavar="N", help="GPUs (default: 0, the CPU)")
    evaluate.add_argument("--json", action="store_true", help="print what evaluation.json would hold")
    evaluate.set_defaults(work=_evaluate)


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="write a finished run's report.html and open it",
        description="Brings report.html up to date with snakemake and opens it in the desktop's browser; its path is"
        " printed. Of a run that is not finished nothing is built: an older page is opened, with a word on what is"
        " missing. Exit code 0, or 2 when there is no page to show.",
    )
    report.add_argument("--configfile", help="the run's configuration (default: config/config.yaml)")
    report.add_argument("--no-open", action="store_true", help="print the path alone")
    report.set_defaults(work=_report)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eyas",
        description="Looks after Eyas runs. The runs themselves are started with snakemake: `snakemake --cores all`.",
    )
    parser.add_argument("--version", action="version", version=f"eyas {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser(
        "doctor",
        help="what this machine has and lacks",
        description="Versions, devices, disk, shared memory, and what is missing for which engine."
        " Exit code 0 when the transformers engine can run, 1 when not.",
    )
    doctor.add_argument("--results", default="results", help="folder of the runs (default: results)")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(work=_doctor)

    plan = commands.add_parser(
        "plan",
        help="what a run's hidden states take on the disk, and what the run takes on a cluster",
        description="Rows, tokens, bytes of the hidden states, what is left to write and what is free. Exact as soon as"
        " the rows are tokenized, and before the first state is computed. Where extraction has GPUs, or an option of"
        " the forecast is given: time and bytes of each stage, what bounds it, and what to change first."
        " Exit code 0 when it fits, 1 when it does not, 2 when the configuration cannot be used.",
    )
    plan.add_argument("run", nargs="?", help="name or folder of a run that was started (default: the configuration's)")
    plan.add_argument(
        "--configfile", "--config", help="the configuration (default: the run's own record, or config/config.yaml)"
    )
    plan.add_argument("--results", help="folder of the runs (default: as the configuration says)")
    plan.add_argument("--json", action="store_true", help="print JSON")
    add_options(plan)
    plan.set_defaults(work=_plan)

    status = commands.add_parser(
        "status",
        help="what a run is doing, and whether it still is",
        description="Stages, shards, rows inside unfinished shards, tokens and their speed, time left, bytes,"
        " heartbeats of the jobs, last errors, and a verdict: not started, running, stalled, failed or complete."
        " Exit code 0, or 1 when the run is stalled or has failed.",
    )
    status.add_argument("run", nargs="?", help="name of the run, or its folder (default: the one started last)")
    status.add_argument("--results", default="results", help="folder of the runs (default: results)")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.add_argument(
        "--watch", nargs="?", type=_seconds, const=2.0, metavar="SECONDS",
        help="show it again every so many seconds (default: 2) until it is complete or has failed",
    )  # fmt: skip
    status.set_defaults(work=_status)

    verify = commands.add_parser(
        "verify",
        help="check every checksum and every count of a run",
        description="Reads every file of a run again: checksums, row and token counts, and that they fit each other."
        " Exit code 0 when all is well, 1 when something is missing or damaged, 2 when there is no such run.",
    )
    verify.add_argument("run", help="name of the run, or its folder")
    verify.add_argument("--results", default="results", help="folder of the runs (default: results)")
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(work=_verify)

    inspect = commands.add_parser(
        "inspect",
        help="show what the drafter learns from a row",
        description="Prints a row's tokens as text, as the target's chat template made them. What is supervised is"
        " green, or stands between ⟦ and ⟧ where there is no colour. A row that was skipped: why."
        " Exit code 0, or 2 when there is no such run or row, or its tokens are not built yet.",
    )
    inspect.add_argument("run", help="name of the run, or its folder")
    inspect.add_argument("row", type=int, help="number of the row, from 0")
    inspect.add_argument("--results", default="results", help="folder of the runs (default: results)")
    form = inspect.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, token by token")
    form.add_argument("--raw", action="store_true", help="print the text alone, without header and marks")
    inspect.set_defaults(work=_inspect)
    _add_evaluate(commands)
    _add_report(commands)
    _add_chat(commands)
    return parser


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser(
        "chat",
        help="talk to a run's target, and see what its drafter does",
        description="Answers with the target, which the drafter runs ahead of: drafted and accepted text is green, and"
        " after each answer stands how many tokens came of a target pass. Greedy answers are the target's own. Without"
        " --prompt, each line that is typed or comes through a pipe is a turn of one conversation."
        " Exit code 0, or 2 when something is missing or a turn could not be answered.",
    )
    chat.add_argument("--run", required=True, help="name of the run, or its folder")
    chat.add_argument("--results", type=Path, default=Path("results"), help="folder of the runs (default: results)")
    chat.add_argument("--drafter", help="name of the drafter, where the run has several")
    chat.add_argument("--drafter-folder", type=Path, metavar="FOLDER", help="another drafter: of Eyas, or published")
    chat.add_argument(
        "--target", metavar="FOLDER", help="where the target is now, if not where the run's manifest says"
    )
    chat.add_argument(
        "--trust-remote-code", action="store_true", help="let the target's own Python files run; off unless given"
    )
    chat.add_argument("--gpu", type=_at_least(0), default=0, metavar="N", help="GPUs (default: 0, the CPU)")
    chat.add_argument(
        "--draft-steps", type=int, default=5, metavar="N", help="drafter steps a target pass (default: 5)"
    )
    chat.add_argument("--topk", type=int, default=1, metavar="N", help="branches a step; 1, the default, is a chain")
    chat.add_argument(
        "--draft-tokens", type=int, metavar="N",
        help="size of the verified tree, the root included (default for a chain: draft steps + 1)",
    )  # fmt: skip
    chat.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    chat.add_argument("--seed", type=int, default=0, metavar="N", help="for a temperature above 0 (default: 0)")
    chat.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="of an answer (default: 512)")
    chat.add_argument("--system", metavar="TEXT", help="a system message")
    chat.add_argument("--template-options", metavar="JSON", help="variables of the target's chat template")
    chat.add_argument("--prompt", metavar="TEXT", help="answer this and end; - takes all of standard input as one turn")
    chat.add_argument("--json", action="store_true", help="print a JSON object for each answer")
    chat.set_defaults(work=_chat)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.work(args)
    except EyasError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())

"""The evaluation on SGLang servers: one with the exported drafter and one without, the same prompts, the same table."""

from __future__ import annotations

import itertools
import logging
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.config.sglang import sglang_problem
from eyas.decoding import loops
from eyas.decoding.measure import DEFINITIONS, PLAIN, Output, figures, first_difference
from eyas.decoding.ngram import NgramProposer, replayed
from eyas.decoding.prompt_sets import Prompt, PromptSet
from eyas.decoding.run_data import RunData, RunFiles, epoch_of, log_set
from eyas.decoding.server_client import SECTION, Answer, DecodingClient
from eyas.drafter.checkpoint import load_drafter
from eyas.errors import EyasError
from eyas.jobs import Progress
from eyas.jobs.server_client import Failed, Refused, Unreachable, read_key
from eyas.jobs.servers import OwnServer, RunningServer, Terms
from eyas.shards import write_lock, write_sealed
from eyas.target.tokenizer import TargetReference, text_config

log = logging.getLogger(__name__)

Keeper = OwnServer[DecodingClient] | RunningServer[DecodingClient]

_KEPT = "an evaluation is written at its end and begins anew"
_PROBE_TOKENS = 8
_TRIES = 3
_NOT_MEASURED = (
    "speedup, lossless and the baselines none and ngram are not measured: the server with the drafter ran already, and"
    " evaluation.sglang.plain_url names none without it"
)

SERVER_DEFINITIONS = DEFINITIONS | {
    "decoding": (
        f"{DEFINITIONS['decoding']}."
        " On a server, rounds are as SGLang counts them, without what the last one accepted behind the output's end"
        " (it does not tell which one that was: one of those that accepted the most is taken); lossless compares with a"
        " server without the drafter; acceptance_by_step is null where a server tells only sums, and in trees all"
        " draft_steps steps count as on offer"
    ),
    "speedup": (
        "speedup: wall-clock time of a request per output token, on a server without the drafter / on one with it; same"
        " prompts, same arguments, prefill included in both, as many requests at once (concurrency)."
        " tokens_per_second: output tokens of all requests by the wall-clock time of the set"
    ),
    "baselines": (
        "baselines: none is a server without a drafter, one token a target forward; ngram is prompt lookup, which"
        " drafts what followed the same tokens earlier in prompt and output: counted over the greedy outputs of the"
        " server without a drafter, not decoded, so that it has no times; the drafter before its training (untrained)"
        " is not measured on servers"
    ),
}


@dataclass(frozen=True)
class Commands:
    """The servers to start, as their command lines and logs; None where running ones are used."""

    plain: list[str]
    drafting: list[str]
    plain_log: Path
    drafting_log: Path


@dataclass(frozen=True)
class Answers:
    """What a server made of a prompt set: the answers by prompt, and the seconds from the first to the last."""

    answers: list[Answer]
    seconds: float


class Servers:
    """The server with the drafter and, if there is one, that without; one at a time where they are our own."""

    def __init__(self, settings: Mapping[str, Any], options: Mapping[str, Any], commands: Commands | None) -> None:
        """`settings`: of the evaluation; `options`: config.evaluation.sglang, whole."""
        self._settings, self._options, self._commands = settings, options, commands

    @property
    def has_plain(self) -> bool:
        return self._commands is not None or self._options["plain_url"] is not None

    def measure(
        self, drafting: bool, prompt_sets: Mapping[str, PromptSet], end_ids: Sequence[int]
    ) -> dict[str, Answers]:
        """Have one of the servers answer all prompts; raises EyasError."""
        first = next(prompt for prompt_set in prompt_sets.values() for prompt in prompt_set.prompts)
        which = "with the drafter" if drafting else "without a drafter"

        def probe(client: DecodingClient) -> None:
            self._probe(client, first, drafting)

        with ExitStack() as stack:
            keeper = stack.enter_context(closing(self._keeper(stack, drafting, probe)))
            keeper.start()
            return {
                name: self._answers(keeper, prompt_set.prompts, end_ids, f"Decoding {name} {which}")
                for name, prompt_set in prompt_sets.items()
            }

    def _keeper(self, stack: ExitStack, drafting: bool, probe: Any) -> Keeper:
        options = self._options
        if self._commands is None:
            name = "url" if drafting else "plain_url"
            client = self._connect(options[name], read_key(options["api_key_env"], SECTION))
            return RunningServer(client, options["outage_minutes"], probe, Terms(SECTION, f"{SECTION}.{name}", _KEPT))
        command = self._commands.drafting if drafting else self._commands.plain
        log_file = self._commands.drafting_log if drafting else self._commands.plain_log
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eyas-server-")))
        return OwnServer(
            command, options["environment"], private, log_file, options["start_minutes"], 0, self._connect, probe,
            Terms(SECTION, f"{SECTION}.url", _KEPT),
        )  # fmt: skip

    def _connect(self, url: str, key: str | None) -> DecodingClient:
        return DecodingClient(url, key, self._options["timeout_seconds"])

    def _probe(self, client: DecodingClient, prompt: Prompt, drafting: bool) -> None:
        """A first answer, which compiles and warms up; the server must draft if it should, and only then."""
        if drafting:
            client.require_speculation(self._settings)
        try:
            answer = client.generate(prompt.ids, _PROBE_TOKENS, 0.0, 0, [], ignore_end=True)
        except (Unreachable, Refused, Failed) as exc:
            raise EyasError(f"{SECTION}: {client.url} does not answer a first prompt: {exc}") from None
        if drafting and not answer.rounds:
            raise EyasError(
                f"{SECTION}.url: {client.url} decodes without a drafter (its answer has no spec_verify_ct); start it"
                " with --speculative-algorithm EAGLE3 and --speculative-draft-model-path (the model card in"
                " export/sglang shows the command)"
            )
        if not drafting and answer.rounds:
            raise EyasError(f"{SECTION}.plain_url: {client.url} decodes with a drafter; name a server without one")

    def _answers(self, keeper: Keeper, prompts: Sequence[Prompt], end_ids: Sequence[int], name: str) -> Answers:
        progress, lock, stopped = Progress(name, len(prompts), "answers"), threading.Lock(), threading.Event()

        def ask(number: int, prompt: Prompt) -> Answer | None:
            if stopped.is_set():
                return None
            try:
                answer = self._answer(keeper, number, prompt, end_ids)
            except BaseException:
                stopped.set()
                raise
            with lock:
                progress.advance(1)
            return answer

        began = time.perf_counter()
        pool = ThreadPoolExecutor(self._options["concurrency"])
        try:
            found = list(pool.map(ask, itertools.count(), prompts))
        except BaseException:
            stopped.set()
            keeper.interrupt()  # ends our own server, and the requests with it
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        seconds = time.perf_counter() - began
        log.info("%s.", progress.line())
        return Answers([answer for answer in found if answer is not None], seconds)

    def _answer(self, keeper: Keeper, number: int, prompt: Prompt, end_ids: Sequence[int]) -> Answer:
        settings = self._settings
        tried = 0
        while True:
            tried += 1
            try:
                return keeper.client.generate(
                    prompt.ids, settings["max_new_tokens"], settings["temperature"], settings["seed"] + number, end_ids
                )
            except Refused as exc:
                raise EyasError(f"{SECTION}: {keeper.client.url} refuses {prompt.label}: {exc}") from None
            except (Unreachable, Failed) as exc:
                keeper.check()
                if tried == _TRIES:
                    raise EyasError(
                        f"{SECTION}: {keeper.client.url} gave no answer to {prompt.label} in {_TRIES} tries: {exc}"
                    ) from None
                log.warning("%s: %s; asking again.", prompt.label, exc)


def _outputs(
    found: Answers, plain: Answers | None, steps: int, end_ids: Sequence[int], temperature: float
) -> list[Output]:
    outputs = []
    for number, answer in enumerate(found.answers):
        decoded, by_step = answer.decoded(steps)
        place = None
        if plain is not None and temperature == 0:
            place = first_difference(answer.ids, plain.answers[number].ids)
        outputs.append(Output(decoded, loops.is_looping(answer.ids, end_ids), place, by_step))
    return outputs


def _throughput(found: Answers) -> float | None:
    tokens = sum(len(answer.ids) for answer in found.answers)
    return tokens / found.seconds if tokens and found.seconds else None


def measured_set(
    prompt_set: PromptSet, drafting: Answers, plain: Answers | None, settings: Mapping[str, Any],
    end_ids: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    """The entry of a prompt set in evaluation.json. `settings`: draft_steps and temperature."""
    labels = [prompt.label for prompt in prompt_set.prompts]
    temperature = settings["temperature"]
    base = [] if plain is None else _outputs(plain, None, 0, end_ids, temperature)
    outputs = _outputs(drafting, plain, settings["draft_steps"], end_ids, temperature)
    for label, output in zip(labels, outputs, strict=True):
        if output.difference is not None:
            log.warning("%s: the output differs from plain greedy decoding at token %d.", label, output.difference)
    none = ngram = None
    if plain is not None:
        none = figures(base, base, labels, 0, temperature) | {"tokens_per_second": _throughput(plain)}
        if temperature == 0:  # what prompt lookup drafts for a sampled output is accepted by chance
            proposer = NgramProposer(settings["draft_steps"])
            looked_up = [
                Output(replayed(proposer, prompt.ids, output.decoded.ids), output.looping)
                for prompt, output in zip(prompt_set.prompts, base, strict=True)
            ]
            ngram = figures(looked_up, [], labels, settings["draft_steps"], temperature)
    return {
        "prompts": len(labels),
        "source": prompt_set.source,
        "overlapping_prompts": prompt_set.overlapping,
        **figures(outputs, base, labels, settings["draft_steps"], temperature),
        "tokens_per_second": _throughput(drafting),
        "baselines": {PLAIN: none, "ngram": ngram, "untrained": None},
    }


def evaluate_on_server(
    run: RunFiles, reference: TargetReference, trained: Path, untrained: Path, settings: Mapping[str, Any],
    options: Mapping[str, Any], commands: Commands | None, output: Path, gpus: int = 0,
) -> None:  # fmt: skip
    """Measure the exported drafter on servers; the target is not loaded here. Writes `output` as JSON.

    `trained`, `untrained`: checkpoint folders, for the figures from the held-out rows' states. `options`:
    config.evaluation.sglang. Raises EyasError.
    """
    with write_lock(output), torch.inference_mode():
        data = RunData(run, reference, settings)
        target = text_config(reference)
        layers = list(data.manifest.layers)
        if problem := sglang_problem(str(target.model_type), int(target.num_hidden_layers), layers, "evaluation"):
            raise EyasError(problem)
        from_states, usable = _from_states(data, trained, untrained, gpus)
        prompt_sets = data.prompt_sets(usable)
        servers = Servers(settings, options, commands)
        asked = {name: prompt_set for name, prompt_set in prompt_sets.items() if prompt_set.prompts}
        drafting = servers.measure(True, asked, data.end_ids) if asked else {}
        plain = servers.measure(False, asked, data.end_ids) if asked and servers.has_plain else {}
        nothing = Answers([], 0.0)
        measured = {}
        for name, prompt_set in prompt_sets.items():
            without = plain.get(name, nothing) if servers.has_plain else None
            measured[name] = measured_set(
                prompt_set, drafting.get(name, nothing), without, settings, data.end_ids
            )  # fmt: skip
            log_set(name, measured[name])
        definitions = dict(SERVER_DEFINITIONS)
        if not servers.has_plain:
            definitions["baselines"] = f"{definitions['baselines']}. {_NOT_MEASURED}"
            log.warning("%s.", _NOT_MEASURED)
        contents = data.contents(
            "sglang", epoch_of(trained), usable, from_states, measured, definitions,
            concurrency=options["concurrency"],
        )  # fmt: skip
        write_sealed(output, contents)


def _from_states(data: RunData, trained: Path, untrained: Path, gpus: int) -> tuple[dict[str, Any], set[int]]:
    """The figures from the held-out rows' states; what they take of a GPU is free again afterwards."""
    cuda = bool(gpus) and torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    drafters = {"trained": load_drafter(trained), "untrained": load_drafter(untrained)}
    found = data.from_states({which: drafter.to(device).eval() for which, drafter in drafters.items()})
    if cuda:
        del drafters
        torch.cuda.empty_cache()
    return found

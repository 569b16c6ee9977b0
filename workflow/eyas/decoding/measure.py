"""Decoding prompts in several ways, side by side, and what it comes to."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.decoding import acceptance, loops
from eyas.decoding.acceptance import StepAcceptance
from eyas.decoding.decode import Decoded, decode
from eyas.decoding.prompt_sets import Prompt, PromptSet
from eyas.decoding.proposers import Proposer
from eyas.decoding.sampling import Sampling
from eyas.jobs import Progress
from eyas.target.model import TargetModel

log = logging.getLogger(__name__)

PLAIN = "none"  # the way that all others are compared with
_WARM_UP_TOKENS = 4

DEFINITIONS = {
    "decoding": (
        f"{acceptance.DEFINITION}."
        " tokens: those that target forwards after the prefill put out (the prefill's own first one left aside);"
        " tokens_per_forward: tokens / target_forwards, which a last round cut short by the end of the output makes"
        " smaller than acceptance_length."
        " lossless: every output equals the target's own greedy output, token for token; null for temperature > 0."
        " overlapping_prompts: prompts of the set that equal a user turn of a training row, or stand in one of ready"
        " text (after NFKC, without case, white space collapsed); they are not measured"
    ),
    "looping": (
        f"looping_share: share of the outputs that have fallen into a loop; {loops.DEFINITION}."
        " without_looping: the figures over the other prompts"
    ),
    "speedup": (
        "speedup: wall-clock of plain decoding per output token / the same with drafting; same code, same prompts,"
        " prefill included in both; each prompt is decoded in all ways, one after another. Lossless outputs are equally"
        " long, so that it is the ratio of the times."
        " tokens_per_second: output tokens by that wall-clock time"
    ),
    "baselines": (
        "baselines: none is plain decoding, one token a target forward; ngram is prompt lookup, which drafts what"
        " followed the same tokens earlier in prompt and output; untrained is the drafter before its training (epoch 0)"
    ),
}


@dataclass(frozen=True)
class Output:
    """What a prompt came to in one way of decoding.

    `difference`: first token that is not plain decoding's. `by_step` False: the rounds' sums are known alone, not how
    many tokens each accepted.
    """

    decoded: Decoded
    looping: bool
    difference: int | None = None
    by_step: bool = True


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token where two outputs differ, or None."""
    for index in range(max(len(a), len(b))):
        if a[index : index + 1] != b[index : index + 1]:
            return index
    return None


def decode_all(
    target: TargetModel,
    ways: Mapping[str, Proposer | None],
    prompts: Sequence[Prompt],
    end_ids: Collection[int],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    name: str,
) -> dict[str, list[Output]]:
    """The outputs of each of `ways`, by prompt. `ways` begins with `none`, plain decoding.

    A prompt is decoded in all ways before the next one, so that a machine that gets slower or faster does so
    for all of them; each way is warmed up once first.
    """
    outputs: dict[str, list[Output]] = {way: [] for way in ways}
    progress = Progress(f"Decoding {name}", len(prompts) * len(ways), "answers")
    for proposer in ways.values() if prompts else ():
        decode(target, proposer, prompts[0].ids, list(end_ids), _WARM_UP_TOKENS, Sampling(temperature, seed))
    for number, prompt in enumerate(prompts):
        for way, proposer in ways.items():
            sampling = Sampling(temperature, seed + number)
            made = decode(target, proposer, prompt.ids, list(end_ids), max_new_tokens, sampling)
            plain = outputs[PLAIN][number].decoded if way != PLAIN else made
            place = first_difference(made.ids, plain.ids) if temperature == 0 else None
            if place is not None:
                log.warning(
                    "%s, %s: the output differs from plain greedy decoding at token %d.", prompt.label, way, place
                )
            outputs[way].append(Output(made, loops.is_looping(made.ids, end_ids), place))
            progress.advance(1, _note(outputs))
    log.info("%s.", progress.line(_note(outputs)))
    return outputs


def _note(outputs: Mapping[str, Sequence[Output]]) -> str:
    parts = []
    for way, entries in outputs.items():
        if way != PLAIN and (length := _steps(entries, 0).length) is not None:
            parts.append(f"{way} {length:.2f}")
    return "acceptance length " + ", ".join(parts) if parts else ""


def _steps(outputs: Sequence[Output], steps: int) -> StepAcceptance:
    """Acceptance of all rounds; only the length is counted for `steps` 0."""
    found = StepAcceptance(max([steps, *(r.depth for output in outputs for r in output.decoded.rounds)]))
    for output in outputs:
        found.add(output.decoded.rounds)
    return found


def _speed(outputs: Sequence[Output]) -> float | None:
    """Output tokens a second."""
    seconds = sum(output.decoded.seconds for output in outputs)
    return sum(len(output.decoded.ids) for output in outputs) / seconds if seconds else None


def _rates(outputs: Sequence[Output], plain: Sequence[Output], steps: int) -> dict[str, Any]:
    """The figures that are also told without looping outputs. `plain`: those of the same prompts, or none."""
    found = _steps(outputs, steps)
    tokens = sum(len(output.decoded.ids) - 1 for output in outputs)
    forwards = sum(output.decoded.forwards for output in outputs)
    own, other = _speed(outputs), _speed(plain)
    return {
        "acceptance_length": found.length,
        "acceptance_by_step": found.by_step if all(output.by_step for output in outputs) else None,
        "tokens_per_forward": tokens / forwards if forwards else None,
        "speedup": own / other if own and other else None,
    }


def figures(
    outputs: Sequence[Output], plain: Sequence[Output], labels: Sequence[str], steps: int, temperature: float
) -> dict[str, Any]:
    """The figures of one way of decoding a prompt set; `steps`: draft steps of a round, 0 for plain decoding.

    `plain`: the outputs of plain decoding, of the same prompts; none where there was none, which leaves what is
    compared with it null. So are times where an output's seconds are 0: it was not decoded for this.
    """
    straight = [index for index, output in enumerate(outputs) if not output.looping]
    differences = [
        {"prompt": label, "token": output.difference}
        for label, output in zip(labels, outputs, strict=True)
        if output.difference is not None
    ]
    rates = _rates(outputs, plain, steps)
    return {
        "acceptance_length": rates["acceptance_length"],
        "acceptance_by_step": rates["acceptance_by_step"],
        "tokens_per_forward": rates["tokens_per_forward"],
        "tokens": sum(len(output.decoded.ids) - 1 for output in outputs),
        "target_forwards": sum(output.decoded.forwards for output in outputs),
        "seconds": sum(output.decoded.seconds for output in outputs) or None,
        "tokens_per_second": _speed(outputs),
        "speedup": rates["speedup"],
        "lossless": not differences if temperature == 0 and outputs and plain else None,
        "differences": differences,
        "looping_share": 1 - len(straight) / len(outputs) if outputs else None,
        "without_looping": {"prompts": len(straight)}
        | _rates([outputs[index] for index in straight], [plain[index] for index in straight if plain], steps),
    }


def measure_set(
    target: TargetModel,
    ways: Mapping[str, Proposer | None],
    prompt_set: PromptSet,
    end_ids: Collection[int],
    settings: Mapping[str, Any],
    name: str,
) -> dict[str, Any]:
    """The entry of a prompt set in evaluation.json: the figures of `ways["trained"]`, and the others as baselines.

    `settings`: draft_steps, max_new_tokens, temperature, seed. Baselines that are not among `ways` are null.
    """
    prompts, temperature = prompt_set.prompts, settings["temperature"]
    outputs = decode_all(
        target, ways, prompts, end_ids, settings["max_new_tokens"], temperature, settings["seed"], name
    )  # fmt: skip
    labels = [prompt.label for prompt in prompts]
    found = {
        way: figures(entries, outputs[PLAIN], labels, 0 if way == PLAIN else settings["draft_steps"], temperature)
        for way, entries in outputs.items()
    }
    return {
        "prompts": len(prompts),
        "source": prompt_set.source,
        "overlapping_prompts": prompt_set.overlapping,
        **found.pop("trained"),
        "baselines": {way: found.get(way) for way in ("none", "ngram", "untrained")},
    }

"""Command lines of the SGLang servers that jobs start, but for port and key: the job adds its own, on loopback."""

from __future__ import annotations

from eyas.config import Config
from eyas.config.schema import Target
from eyas.config.sglang import Server


def launch(target: Target, options: Server, gpu: int) -> list[str]:
    """A server of `target`, on `gpu` GPUs where the options say nothing of tensor parallelism."""
    command = [options.python, "-m", "sglang.launch_server", "--model-path", target.path]
    if target.revision:
        command += ["--revision", target.revision]
    if target.trust_remote_code:
        command += ["--trust-remote-code"]
    command += ["--dtype", target.dtype, "--tp", str(options.tp or max(gpu, 1))]
    for name, value in (
        ("--quantization", options.quantization),
        ("--mem-fraction-static", options.mem_fraction),
        ("--chunked-prefill-size", options.chunked_prefill),
    ):
        if value is not None:
            command += [name, str(value)]
    return command


def capture_command(config: Config) -> list[str]:
    """The server that an extraction job starts."""
    options = config.extraction.sglang
    command = launch(config.target, options, config.extraction.gpu)
    # Native capture, without its draft model; whole prompts only; the plugin takes the states from there.
    command += ["--speculative-algorithm", "EAGLE3", "--enable-return-aux-hidden-states", "--disable-radix-cache"]
    return [*command, "--skip-server-warmup", *options.extra_args]


def decoding_command(config: Config, drafter: str | None) -> list[str]:
    """The server that an evaluation starts: with the drafter in the folder `drafter`, or without one."""
    evaluation = config.evaluation
    options = evaluation.sglang
    command = launch(config.target, options, evaluation.gpu)
    if drafter is not None:
        command += [
            "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", drafter,
            "--speculative-num-steps", str(evaluation.draft_steps), "--speculative-eagle-topk", str(evaluation.topk),
            "--speculative-num-draft-tokens", str(evaluation.verified_tokens),
        ]  # fmt: skip
        if options.quantization is not None:  # the drafter would be taken for quantized like the target
            command += ["--speculative-draft-model-quantization", "unquant"]
    # Every prompt is computed whole, with the drafter and without.
    return [*command, "--disable-radix-cache", "--skip-server-warmup", *options.extra_args]

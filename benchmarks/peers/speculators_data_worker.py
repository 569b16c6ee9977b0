"""speculators 0.9.0's conversations to ids and loss masks; protocol: see `benchmarks/data.py`.

It has no in-process path of its own: it asks a vLLM server to render every assistant turn twice (the prompt, and
the conversation up to the turn's end) and takes the difference for the mask, one row a turn. Here its own
preprocessing runs as it is, on batches of 1,000 as its `datasets.map` gives it, and only the HTTP request is
replaced by what the server does: transformers' `apply_chat_template` in this process. Both that and the conversion
to Arrow, which is left out, are in its favour.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from speculators.data_generation import preprocessing
from transformers import AutoTokenizer

BATCH = 1000


def render_here(tokenizer: Any) -> Any:
    """Stands in for its request to vLLM's `/render`."""

    def render_conversation(
        endpoint: str, messages: list[dict[str, Any]], *, add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None, truncate_prompt_tokens: int | None = None,
        truncation_side: str | None = None,
    ) -> list[int]:  # fmt: skip
        ids: list[int] = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
        )
        return ids[:truncate_prompt_tokens]

    return render_conversation


def one_pass(conversations: list[list[dict[str, str]]], max_length: int) -> list[dict[str, list[Any]]]:
    return [
        preprocessing._preprocess_batch(
            {"conversations": conversations[start : start + BATCH]}, False, "in-process", max_length
        )
        for start in range(0, len(conversations), BATCH)
    ]


def last_rows(batches: list[dict[str, list[Any]]], turns: int) -> str:
    """Digest of the ids of every conversation's last row, which holds the whole of it."""
    digest = hashlib.sha256()
    for batch in batches:
        for ids in batch["input_ids"][turns - 1 :: turns]:
            digest.update(ids.numpy().astype(np.int32).tobytes())
    return digest.hexdigest()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # the peer may print: only answers go to the driver
    os.dup2(2, 1)
    with open(sys.argv[1], encoding="utf-8") as file:
        work = json.load(file)
    torch.set_num_threads(1)
    with open(work["conversations"], encoding="utf-8") as file:
        conversations = json.load(file)
    preprocessing.render_conversation = render_here(AutoTokenizer.from_pretrained(work["tokenizer"]))
    one_pass(conversations[: work["warm_up"]], work["max_length"])
    ready = {"ready": True, "version": version("speculators"), "tokenizers": version("tokenizers")}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        if line.strip() != "run":
            break
        cpu, wall = time.process_time(), time.perf_counter()
        batches = one_pass(conversations, work["max_length"])
        result = {
            "cpu_s": time.process_time() - cpu,
            "wall_s": time.perf_counter() - wall,
            "tokens": sum(sum(batch["seq_len"]) for batch in batches),
            "supervised": int(sum(mask.sum() for batch in batches for mask in batch["loss_mask"])),
            "digest": last_rows(batches, work["turns"]),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()

"""Data before training: conversations to ids and masks, token counts, the vocabulary map.

Speeds are tokens per CPU-second with one thread. Eyas, the bare tokenizer on the texts that the chat template made,
and speculators' preprocessing (a process of its own) take turns, A B C A B C; the figures are medians of the rounds.
`ratio_to_speculators` is its CPU time over Eyas's for the same conversations: above 1, Eyas is the faster one.

    python benchmarks/data.py            10,000 conversations, 10^8 tokens to count
    python benchmarks/data.py --quick    1,000 conversations, 10^7 tokens
    python benchmarks/data.py --json     the last line of the output is JSON
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

# One thread: read by tokenizers when it is first used, and passed on to the peer.
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}

import data_text
import numpy as np
from eyas.tokenization import TokenShard
from eyas.tokenization.mask import Encoded, Encoder
from eyas.vocabulary import build_map
from eyas.vocabulary.counting import count_groups
from rich.console import Console
from rich.table import Table
from train_step import HERE, Contestant, peer_pythons

PEER = "speculators"
WARM_UP = 100  # conversations before the first round; the peer does the same by itself
TURNS = 2  # the assistant's, in each conversation
BATCH = 250  # conversations after which the next one in this process has its turn: noise hits all of them
VOCAB, DRAFT_VOCAB = 163_840, 32_000
HELD_OUT_EVERY = 50


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process, and what the work gave."""
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def start_peer(folder: Path, tokenizer: Path, conversations: list[data_text.Conversation]) -> Contestant | None:
    """speculators in its own environment; None where it cannot be had."""
    python = peer_pythons([PEER]).get(PEER)
    if python is None:
        return None
    rows, workload = folder / "conversations.json", folder / "work.json"
    rows.write_text(json.dumps(conversations), encoding="utf-8")
    work = {
        "tokenizer": str(tokenizer),
        "conversations": str(rows),
        "max_length": 1 << 20,
        "turns": TURNS,
        "warm_up": WARM_UP,
    }
    workload.write_text(json.dumps(work | {"keep_freed_memory": False}), encoding="utf-8")
    return Contestant.start(PEER, python, HERE / "peers" / "speculators_data_worker.py", workload)


def check_same(first: int, found: list[list[Encoded]], texts_ids: list[list[int]]) -> None:
    """Stop when Eyas and the bare tokenizer did not do the same work on the conversations from `first` on."""
    for number, (sequences, ids) in enumerate(zip(found, texts_ids, strict=True), first):
        if len(sequences) != 1 or sequences[0][0].tolist() != ids or not 0 < sequences[0][1].sum() < len(ids):
            raise SystemExit(f"error: conversation {number}: Eyas's ids are not those of the bare tokenizer")


def tokenization(count: int, rounds: int, peers: bool) -> dict[str, Any]:
    """CPU seconds of each way (`seconds`), its tokens, and the peer's version."""
    from transformers import AutoTokenizer

    folder = data_text.tokenizer_folder()
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    end_ids = [tokenizer.eos_token_id]
    conversations = data_text.conversations(count)
    texts = [str(tokenizer.apply_chat_template(c, tokenize=False)) for c in conversations]
    encoder = Encoder(tokenizer, end_ids)

    def eyas(part: slice) -> list[list[Encoded]]:
        # As the tokens rule does it: rows are rendered in blocks before they are encoded.
        return [encoder.tokens_of(laid) for laid in [encoder.lay_out(messages) for messages in conversations[part]]]

    def bare(part: slice) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(texts[part], add_special_tokens=False)["input_ids"]
        return ids

    def backend(part: slice) -> None:
        tokenizer.backend_tokenizer.encode_batch(texts[part], add_special_tokens=False)

    ways: dict[str, Callable[[slice], Any]] = {"eyas": eyas, "tokenizer": bare, "encode_batch": backend}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way(slice(WARM_UP))
    digest, tokens = hashlib.sha256(), 0
    with tempfile.TemporaryDirectory() as temporary:
        peer = start_peer(Path(temporary), folder, conversations) if peers else None
        for turn in range(rounds):
            encoder = Encoder(tokenizer, end_ids)  # a new one: it learns the template anew, as for every shard
            for values in seconds.values():
                values.append(0.0)
            for start in range(0, count, BATCH):
                kept = {}
                for name, way in ways.items():
                    taken, kept[name] = cpu_seconds(partial(way, slice(start, start + BATCH)))
                    seconds[name][-1] += taken
                if not turn:
                    check_same(start, kept["eyas"], kept["tokenizer"])
                    digest.update(b"".join(ids.tobytes() for ((ids, _),) in kept["eyas"]))
                    tokens += sum(map(len, kept["tokenizer"]))
            if peer:
                peer.run()
            print(f"round {turn + 1} of {rounds} is done", file=sys.stderr)
        if peer:
            peer.stop()
    found: dict[str, Any] = {"tokens": dict.fromkeys(ways, tokens), "seconds": seconds, "peer": None}
    if peer and any(p["digest"] != digest.hexdigest() for p in peer.passes):
        print(f"{PEER} makes other ids of the same conversations; it is left out.", file=sys.stderr)
    elif peer:
        found["tokens"][PEER] = peer.passes[0]["tokens"]
        seconds[PEER] = [p["cpu_s"] for p in peer.passes]
        found["peer"] = peer.about["version"]
    return found


def counting(tokens: int, passes: int = 3) -> float:
    """Tokens per CPU-second of counting a shard, held-out rows apart; the first pass (compiling) aside."""
    shard = TokenShard(**data_text.token_arrays(tokens, VOCAB))
    held_out = (shard.row_ids % HELD_OUT_EVERY == HELD_OUT_EVERY - 1).astype(np.int64)
    seconds = []
    for _ in range(passes + 1):
        counts = np.zeros((2, VOCAB), dtype=np.int64)
        seconds.append(cpu_seconds(partial(count_groups, shard, held_out, counts))[0])
    expected = np.bincount(shard.input_ids[shard.loss_mask != 0], minlength=VOCAB)
    if not np.array_equal(counts.sum(axis=0), expected):
        raise SystemExit("error: the counts are not numpy's")
    return tokens / statistics.median(seconds[1:])


def mapping(passes: int = 5) -> float:
    """CPU seconds of the map from VOCAB to DRAFT_VOCAB entries: the best of the passes."""
    counts = np.bincount(data_text.token_arrays(10**6, VOCAB)["input_ids"], minlength=VOCAB)
    return min(cpu_seconds(lambda: build_map(counts, DRAFT_VOCAB, [0, VOCAB - 1]))[0] for _ in range(passes))


def show(found: dict[str, Any], count: int, console: Console) -> None:
    table = Table(title=f"{count:,} conversations, {found['tokens']['eyas']:,} tokens", title_justify="left")
    for column in ("", "CPU s", "conversations / CPU-s", "tokens / CPU-s", "passes, CPU s"):
        table.add_column(column, justify="right" if column else "left")
    for name, seconds in found["seconds"].items():
        middle = statistics.median(seconds)
        label = f"{name} {found['peer']}" if name == PEER else name
        each = " ".join(f"{s:.2f}" for s in seconds)
        table.add_row(label, f"{middle:.2f}", f"{count / middle:,.0f}", f"{found['tokens'][name] / middle:,.0f}", each)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1,000 conversations and 10^7 tokens")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of the tokenisation (default: 3)")
    parser.add_argument("--no-peer", action="store_true", help="without speculators")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    console = Console(width=140)
    count = 1_000 if args.quick else 10_000
    found = tokenization(count, args.rounds, not args.no_peer)
    show(found, count, console)
    middle = {name: statistics.median(seconds) for name, seconds in found["seconds"].items()}
    counted, map_seconds = counting(10**7 if args.quick else 10**8), mapping()
    console.print(
        f"Counting: {counted:,.0f} tokens a CPU-second. Vocabulary map {VOCAB:,} to {DRAFT_VOCAB:,}:"
        f" {map_seconds * 1000:.1f} ms."
    )
    result: dict[str, Any] = {
        "tokens_per_cpu_s": round(found["tokens"]["eyas"] / middle["eyas"]),
        "share_of_bare_tokenizer": round(middle["tokenizer"] / middle["eyas"], 3),
        # the same conversations in their time over ours: above 1, Eyas is faster
        "ratio_to_speculators": round(middle[PEER] / middle["eyas"], 3) if PEER in middle else None,
        "count_tokens_per_s": round(counted),
        "map_seconds": round(map_seconds, 5),
        "cpu_seconds": {name: round(seconds, 3) for name, seconds in middle.items()},
        "tokens": found["tokens"],
        "versions": {name: version(name) for name in ("tokenizers", "transformers", "numba", "numpy")},
        "peers": {PEER: found["peer"]} if found["peer"] else {},
    }
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()

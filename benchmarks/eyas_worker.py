"""One training step of Eyas, as the benchmark's driver calls it: see `train_step.py` for the protocol."""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import numpy as np
import torch
from eyas import __version__
from eyas.drafter.dataset import Batch
from eyas.drafter.model import Drafter
from eyas.drafter.packing import best_fit
from eyas.drafter.shape import DrafterShape
from eyas.drafter.step import DrafterLoss, make_optimizer, trained
from eyas.jobs import keep_freed_memory

MAX_TOKENS = 2048
ADAMW = {"weight_decay": 0.0, "beta1": 0.9, "beta2": 0.95}


def make_drafter(work: dict[str, Any], generator: torch.Generator) -> Drafter:
    """A drafter of these sizes with random weights, and a draft vocabulary of random ids."""
    shape = DrafterShape(
        work["vocab"], work["draft_vocab"], work["hidden"], work["hidden"], work["intermediate"], work["heads"],
        work["kv_heads"], work["head_dim"], 1e-5, 10000.0, 8192, (0, 1, 2),
    )  # fmt: skip
    ids = torch.randperm(work["vocab"], generator=generator)[: work["draft_vocab"]].sort().values
    t2d = torch.zeros(work["vocab"], dtype=torch.bool)
    t2d[ids] = True
    drafter = Drafter(shape, ids - torch.arange(len(ids)), t2d)
    for parameter in drafter.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    return drafter


def make_batches(work: dict[str, Any], drafter: Drafter, generator: torch.Generator) -> list[Batch]:
    """Random states for the rows, packed. Every supervised position counts: the target's choice can be drafted."""
    rows, ids = work["rows"], drafter.target_ids
    lengths = np.array([row["length"] for row in rows])
    batches = []
    for chosen in best_fit(range(len(rows)), lengths, MAX_TOKENS):
        sizes = [rows[i]["length"] for i in chosen]
        ends = np.cumsum(sizes).tolist()
        positions = torch.cat([torch.arange(n) for n in sizes])
        total = len(positions)
        batches.append(
            Batch(
                aux=torch.randn(total, 3 * work["hidden"], generator=generator),
                last=torch.randn(total, work["hidden"], generator=generator),
                tokens=torch.randint(work["vocab"], (total,), generator=generator),
                target_token=ids[torch.randint(len(ids), (total,), generator=generator)],
                mask=torch.cat([torch.arange(n) >= rows[i]["prompt"] for i, n in zip(chosen, sizes, strict=True)]),
                positions=positions,
                spans=list(zip([0, *ends[:-1]], ends, strict=True)),
                row_ids=list(chosen),
            )
        )
    return batches


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        work = json.load(file)
    keep_freed_memory()  # as the training job does
    torch.set_num_threads(work["threads"])
    generator = torch.Generator().manual_seed(work["seed"])
    drafter = make_drafter(work, generator)
    head = torch.randn(work["draft_vocab"], work["hidden"], generator=generator) * 0.02
    loss_module = DrafterLoss(drafter, head, drafter.draft_ids, work["ttt_steps"], work["loss_decay"], torch.float32)
    batches = make_batches(work, drafter, generator)
    parameters = trained(loss_module)
    optimizer = make_optimizer(parameters, ADAMW)
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    supervised = sum(int(batch.mask.sum()) for batch in batches)
    print(
        json.dumps({"ready": True, "version": __version__, "variant": f"packed into {MAX_TOKENS} tokens"}), flush=True
    )
    for line in sys.stdin:
        if line.strip() != "run":
            break
        cpu, wall, losses = time.process_time(), time.perf_counter(), []
        for batch in batches:
            loss, _, _ = loss_module(batch, None)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))
        result = {
            "cpu_s": time.process_time() - cpu,
            "wall_s": time.perf_counter() - wall,
            "tokens": sum(row["length"] for row in work["rows"]),
            "supervised": supervised,
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "loss": sum(losses) / len(losses),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

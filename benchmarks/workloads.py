"""What the training-step benchmarks run on: sizes of the drafter, and rows by length and prompt share."""

from __future__ import annotations

from typing import Any

import numpy as np

# One Llama layer over [embedding ; state], as in the peers' figures: 378 MFLOP a token and 7 TTT steps.
SIZES: dict[str, Any] = {
    "hidden": 512, "intermediate": 1792, "heads": 8, "kv_heads": 8, "head_dim": 64, "vocab": 32000,
    "draft_vocab": 8000, "ttt_steps": 7, "loss_decay": 0.8, "seed": 0, "threads": 1,
}  # fmt: skip
# A quarter of that, for a look in two minutes.
QUICK_SIZES = SIZES | {
    "hidden": 256, "intermediate": 896, "heads": 4, "kv_heads": 4, "draft_vocab": 4000, "ttt_steps": 5
}  # fmt: skip


def _rows(lengths: np.ndarray, prompt_share: float) -> list[dict[str, int]]:
    return [{"length": int(n), "prompt": int(round(prompt_share * int(n)))} for n in lengths]


def full_mask(length: int) -> list[dict[str, int]]:
    """One row, every position supervised."""
    return _rows(np.array([length]), 0.0)


def _mix(rows: int, mean: float, spread: float, longest: int, prompt_share: float) -> list[dict[str, int]]:
    """Lognormal lengths with this mean before the cut at `longest`; the leading share of each is prompt."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(np.log(mean) - spread**2 / 2, spread, rows)
    return _rows(np.clip(lengths, 32, longest).astype(int), prompt_share)


def chat_mix(sample: int | None) -> list[dict[str, int]]:
    """200 rows, lognormal lengths of mean 600, 2048 at most, 35% unsupervised; or every n-th of them by length."""
    return _every_nth(_mix(200, 600.0, 0.7, 2048, 0.35), sample)


def long_prompt_mix(sample: int | None) -> list[dict[str, int]]:
    """40 rows, mean 3000, 4096 tokens at most, 80% unsupervised; or every n-th of them by length."""
    return _every_nth(_mix(40, 3000.0, 0.4, 4096, 0.8), sample)


def _every_nth(rows: list[dict[str, int]], sample: int | None) -> list[dict[str, int]]:
    """`sample` rows spread evenly over the lengths: the mix in small."""
    rows = sorted(rows, key=lambda row: row["length"])
    if sample is None or sample >= len(rows):
        return rows
    places = (np.arange(sample) + 0.5) * len(rows) / sample
    return [rows[int(place)] for place in places]


def dense_flops(sizes: dict[str, Any]) -> dict[str, float]:
    """FLOPs a token of the matrix products, forward and backward: `asked` for by the arithmetic, `done` by Eyas.

    Attention's own products are not among them (they depend on the length). Eyas does less
    than is asked for: the embedding's half of q, k and v is taken once per token, not once a step.
    """
    h, inner, steps = sizes["hidden"], sizes["intermediate"], sizes["ttt_steps"]
    q, kv = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    projections, output, mlp, head = 2 * h * (q + 2 * kv), q * h, 3 * h * inner, h * sizes["draft_vocab"]
    once = 2 * 3 * h * h + head  # fc (no gradient of its input), the teacher (forward only)
    asked = 3 * steps * (projections + output + mlp + head) + once
    half = projections / 2
    # the embedding's half has no gradient of its input either: it is frozen
    done = 3 * steps * (half + output + mlp + head) + 2 * half + once
    return {"asked": 2.0 * asked, "done": 2.0 * done}

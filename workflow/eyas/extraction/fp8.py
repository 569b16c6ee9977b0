"""Hidden states in eight bits: each state vector is float8_e4m3fn times one float32 scale."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 448.0  # of float8_e4m3fn
# No value times a scale is more than bfloat16 holds.
_LARGEST_SCALE = torch.finfo(torch.bfloat16).max / _LARGEST
# Values at once: what is between the passes stays in the processor's cache.
_VALUES = 1 << 18


def quantise(states: Tensor, vectors: int) -> tuple[Tensor, Tensor]:
    """Eight bits and scales of finite states on the CPU, [T, vectors·H]: uint8 [T, vectors·H], float32 [T, vectors].

    A vector's largest magnitude becomes 448, the largest that float8_e4m3fn has, so a value is off by at most
    2^-4 of itself or 2^-10 of the scale, whichever is more. Vectors of zeros have the scale 1.
    """
    tokens, width = states.shape
    flat = states.reshape(tokens * vectors, width // vectors)
    largest = flat.abs().amax(1).double() / _LARGEST
    scales = largest.float()
    # Rounded up: a quotient above 448 would be NaN in some versions of torch, or cut off where scales are denormal.
    scales = torch.where(scales.double() < largest, torch.nextafter(scales, torch.tensor(torch.inf)), scales)
    scales = torch.where(largest == 0, 1.0, scales.clamp_max(_LARGEST_SCALE))
    bits = torch.empty(flat.shape, dtype=torch.float8_e4m3fn)
    for part, scale, values in _parts(bits, scales, flat):
        part.copy_(values.float() / scale)
    return bits.view(torch.uint8).view(states.shape), scales.view(tokens, vectors)


def dequantise(bits: Tensor, scales: Tensor) -> Tensor:
    """States bfloat16 [T, n·H] from their bits uint8 [T, n·H] and scales float32 [T, n] (or [T], with n = 1).

    The two bit patterns that are NaN, which `quantise` never gives, are not told apart from numbers.
    """
    flat = bits.reshape(scales.numel(), -1)
    states = torch.empty(flat.shape, dtype=torch.bfloat16)
    # Shifted into a float16, exponent and fraction (denormal ones too) give the value over 256. That is exact, and
    # five times as fast as torch's own cast.
    for part, scale, values in _parts(states, scales.reshape(-1) * 256, flat.view(torch.int8)):
        halves = values.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)
        part.copy_(halves.float().mul_(scale))
    return states.view(bits.shape)


def _parts(out: Tensor, scales: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Some vectors of each at a time; a scale for each vector, as a column."""
    count = max(_VALUES // max(values.shape[1], 1), 1)
    return list(zip(out.split(count), scales[:, None].split(count), values.split(count), strict=True))

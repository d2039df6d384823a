"""State -> value, bit-exact: three fixed integer hashes of a 16-bit state.

All arithmetic is uint32 and wraps. 3inst and mcg read the two halves of the hash as fp16 and add
them with one rounding; mul1 sums the four bytes and maps the sum by one fp16 fma. In fp32 the sum
(and the multiply and add of mul1) followed by one narrowing give the same bits for all 65,536
states. The sha256 of each table is a test.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from exl3kit.format.spec import (
    MCG_MULTIPLIER,
    MUL1_MULTIPLIER,
    NUM_STATES,
    Codebook,
    check_codebook,
)

_LCG_MULTIPLIER, _LCG_ADDEND = 89226354, 64248484  # 3inst
# Keep sign, the top mantissa bits and part of the exponent of each half, then centre the exponent.
_HALVES_AND, _HALVES_XOR = 0x8FFF8FFF, 0x3B603B60
# mul1: value = (1024 + byte sum) * scale + shift, the fp16 bit patterns 0x1EEE and 0xC931.
_MUL1_SCALE, _MUL1_SHIFT = np.float32(0.00676727294921875), np.float32(-10.3828125)


def _sum_of_halves(hashed: np.ndarray) -> np.ndarray:
    masked = (hashed & np.uint32(_HALVES_AND)) ^ np.uint32(_HALVES_XOR)
    halves = masked.view(np.float16).reshape(-1, 2).astype(np.float32)
    return (halves[:, 0] + halves[:, 1]).astype(np.float16)


def _affine_byte_sum(hashed: np.ndarray) -> np.ndarray:
    total = hashed.view(np.uint8).reshape(-1, 4).sum(axis=1).astype(np.float32)
    return ((total + np.float32(1024)) * _MUL1_SCALE + _MUL1_SHIFT).astype(np.float16)


_CPU = torch.device("cpu")


def codebook_values(codebook: str, device: torch.device = _CPU) -> torch.Tensor:
    """Value of every state on `device`: float16 (65536,), index = state. Shared, not to be written.

    Raises FormatError for a name that is no codebook's.
    """
    return _values(check_codebook(codebook), device)


@cache
def _values(codebook: Codebook, device: torch.device) -> torch.Tensor:
    if device != _CPU:
        return _values(codebook, _CPU).to(device)
    states = np.arange(NUM_STATES, dtype=np.uint32)
    if codebook is Codebook.THREE_INST:
        values = _sum_of_halves(states * np.uint32(_LCG_MULTIPLIER) + np.uint32(_LCG_ADDEND))
    elif codebook is Codebook.MCG:
        values = _sum_of_halves(states * np.uint32(MCG_MULTIPLIER))
    else:
        values = _affine_byte_sum(states * np.uint32(MUL1_MULTIPLIER))
    return torch.from_numpy(values)

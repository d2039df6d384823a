"""Packed signs, as exllamav3's first versions store vectors: `su` and `sv` for suh and svh."""

from __future__ import annotations

import torch

from exl3kit.errors import FormatError

PACKED = {"suh": "su", "svh": "sv"}
WORD_BITS = 16
_SUFFIXES = tuple(f".{field}" for field in PACKED.values())


def is_packed(name: str) -> bool:
    """True for the name of packed signs, which stand for a vector 16 times as long."""
    return name.endswith(_SUFFIXES)


def unpack_signs(words: torch.Tensor, name: str) -> torch.Tensor:
    """Signs int16 (n/16,) to float16 (n,): bit i of word j is element 16 j + i, a set bit is -1."""
    if words.dtype != torch.int16 or words.dim() != 1:
        raise FormatError(
            f"{name}: expected torch.int16 with 1 dimension, got {words.dtype} {tuple(words.shape)}"
        )
    bits = (words[:, None].to(torch.int32) >> torch.arange(WORD_BITS, dtype=torch.int32)) & 1
    return (1 - 2 * bits).reshape(-1).to(torch.float16)

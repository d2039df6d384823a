"""Row tables: embeddings in a simpler trellis, one ring a group of 256 channels (exllamav3 1.6.5).

A row of `trellis`, int16 (rows, G (1 + 16 K)), holds G groups: one fp16 scale, then 16 K words with
the ring of 256 symbols of K bits, least significant bit first. A state is the symbol and its
predecessors, state(i) = sum over m of symbol(i - m) << (m K), 16 bits; its value is mul1's.

    group = signs[g] * H256(value * scale)        H256 in Sylvester order, scale 1/16

Told apart from a linear's trellis by its two dimensions; there is no suh and no svh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from exl3kit.errors import FormatError
from exl3kit.format.codebook import codebook_values
from exl3kit.format.hadamard import hadamard
from exl3kit.format.spec import INTEGER_BITS, STATE_BITS, TILE, Codebook

GROUP = 256
NGRAM_WIDTH = 160  # of the n-gram tables, whose rows are one ring of 160 symbols


@dataclass(frozen=True)
class RowTable:
    """A quantised embedding: trellis int16 (rows, G (1 + 16 K)), signs float16 (G, 256).

    Raises FormatError, with `name` in front of the field, for anything else.
    """

    trellis: torch.Tensor
    signs: torch.Tensor
    name: str = ""

    def __post_init__(self) -> None:
        """Check dtypes, shapes and the rate."""
        if self.signs.dtype != torch.float16 or tuple(self.signs.shape[1:]) != (GROUP,):
            raise FormatError(
                f"{self.name}.signs: expected torch.float16 (groups, {GROUP}), "
                f"got {self.signs.dtype} {tuple(self.signs.shape)}"
            )
        if self.trellis.dtype != torch.int16 or self.trellis.dim() != 2:
            raise FormatError(
                f"{self.name}.trellis: expected torch.int16 with 2 dimensions, "
                f"got {self.trellis.dtype} {tuple(self.trellis.shape)}"
            )
        row_table_bits(self.trellis.shape[1], len(self.signs), self.name)

    @property
    def bits(self) -> int:
        """K, bits per symbol."""
        return row_table_bits(self.trellis.shape[1], len(self.signs), self.name)

    def dequantize(self, rows: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """Rows of the embedding, float32 (len(rows), 256 G); crop to the model's hidden size."""
        words = self.trellis[rows].reshape(-1, 1 + TILE * self.bits)
        scale = words[:, 0].contiguous().view(torch.float16).float()
        values = codebook_values(Codebook.MUL1)[_states(words[:, 1:], self.bits)].float()
        groups = _hadamard_256(values * scale[:, None])
        return (groups.reshape(-1, *self.signs.shape) * self.signs.float()).flatten(1)


def row_table_bits(width: int, groups: int, name: str) -> int:
    """K of rows that are `width` words wide; FormatError if no rate has that width."""
    widths = {groups * (1 + TILE * bits): bits for bits in INTEGER_BITS}
    if groups < 1 or width not in widths:
        raise FormatError(
            f"{name}.trellis: rows of {groups} groups must be one of {sorted(widths)} words wide, "
            f"got {width}"
        )
    return widths[width]


def _hadamard_256(x: torch.Tensor) -> torch.Tensor:
    """Rows of 256 by the transform of 256: that of 128 on both halves, then sum and difference."""
    low, high = hadamard(x).chunk(2, dim=1)
    return torch.cat((low + high, low - high), dim=1) / math.sqrt(2)


def _states(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int16 (n, 16 K), a ring a row -> states int64 (n, 256)."""
    stream = np.ascontiguousarray(words.numpy()).astype("<i2").view(np.uint8)
    ring = np.unpackbits(stream, axis=1, bitorder="little").reshape(-1, GROUP, bits)
    symbols = (ring.astype(np.int64) << np.arange(bits)).sum(axis=2)
    states = np.zeros_like(symbols)
    for m in range(-(-STATE_BITS // bits)):
        states |= np.roll(symbols, m, axis=1) << (m * bits)
    return torch.from_numpy(states & ((1 << STATE_BITS) - 1))

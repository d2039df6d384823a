"""Constants of the format and the rates it allows.

One linear (k in-features, n out-features) is k/16 x n/16 tiles. A tile is a closed ring of 256*K
bits; weight t of the tile is a function of the 16 ring bits that end where its own bits end.
docs/format.md explains the layout with a worked example.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache

import numpy as np

from exl3kit.errors import FormatError

TILE = 16
TILE_SIZE = TILE * TILE
HADAMARD_BLOCK = 128
STATE_BITS = 16
NUM_STATES = 1 << STATE_BITS

# 32-bit multipliers of the two marked codebooks; the markers store the same bits as a signed int.
MCG_MULTIPLIER = 0xCBAC1FED
MUL1_MULTIPLIER = 0x83DCD12D

# Deviation of the 3inst codebook; exllamav3 normalises weights to it whatever the codebook.
GAUSS_SCALE = 1.24371088

INTEGER_BITS = (1, 2, 3, 4, 5, 6, 7, 8)
HALF_BITS = (1.5, 2.5, 3.5)
SUPPORTED_BITS: tuple[int | float, ...] = tuple(sorted(INTEGER_BITS + HALF_BITS))


class Codebook(StrEnum):
    """How a 16-bit state becomes a value; the marker tensor of a linear has the same name."""

    THREE_INST = "3inst"
    MCG = "mcg"
    MUL1 = "mul1"


def marker_value(codebook: str) -> int | None:
    """Value of the marker tensor as a signed 32-bit int; None for 3inst, which has no marker."""
    name = check_codebook(codebook)
    unsigned = {Codebook.MCG: MCG_MULTIPLIER, Codebook.MUL1: MUL1_MULTIPLIER}.get(name)
    return None if unsigned is None else unsigned - (1 << 32)


def check_codebook(codebook: str) -> Codebook:
    """The `Codebook` of a name; an unknown name is a FormatError that lists the known ones."""
    try:
        return Codebook(codebook)
    except ValueError:
        raise FormatError(
            f"codebook: expected one of {', '.join(Codebook)}, got {codebook!r}"
        ) from None


def rates_of(codebook: str) -> tuple[int | float, ...]:
    """The rates that exist with a codebook, ascending: half rates with mul1 only."""
    return SUPPORTED_BITS if check_codebook(codebook) is Codebook.MUL1 else INTEGER_BITS


def check_bits(bits: int | float, codebook: str) -> int | float:
    """`bits` as int where it is whole; FormatError for a rate the format lacks.

    Half rates exist with mul1 only (exllamav3 >= 1.6).
    """
    if isinstance(bits, bool) or bits not in SUPPORTED_BITS:
        raise FormatError(f"bits: expected one of {SUPPORTED_BITS}, got {bits!r}")
    if bits in HALF_BITS:
        if check_codebook(codebook) is not Codebook.MUL1:
            raise FormatError(
                f"bits: {bits} exists with codebook mul1 only, got {codebook}; "
                f"use {int(bits)} or {int(bits) + 1}"
            )
        return float(bits)
    return int(bits)


def words_per_tile(bits: int | float) -> int:
    """int16 words of one tile: 16 * bits."""
    return int(TILE * bits)


def bits_from_words(words: int) -> int | float:
    """Rate of a tile of `words` int16 words; FormatError for a width the format lacks."""
    bits = words / TILE
    if bits not in SUPPORTED_BITS:
        widths = [words_per_tile(b) for b in SUPPORTED_BITS]
        raise FormatError(f"trellis last dimension: expected one of {widths}, got {words}")
    return int(bits) if bits == int(bits) else bits


@cache
def fresh_bits(bits: int | float) -> np.ndarray:
    """D(t), the ring bits that position t adds: int64 (256,), read-only.

    Whole rates add K everywhere; K = A + 1/2 adds A at even t and A + 1 at odd t.
    """
    ends = (np.arange(1, TILE_SIZE + 1) * int(2 * bits)) >> 1
    fresh = np.diff(ends, prepend=0)
    fresh.setflags(write=False)
    return fresh


@cache
def window_ends(bits: int | float) -> np.ndarray:
    """S(t) = D(0) + ... + D(t), where window t ends in the ring: int64 (256,), read-only."""
    ends = np.cumsum(fresh_bits(bits))
    ends.setflags(write=False)
    return ends

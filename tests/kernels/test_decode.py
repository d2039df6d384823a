"""The decoders inside the products give the bits of the format, tier by tier."""

from __future__ import annotations

import ctypes
from functools import cache

import pytest
import torch

from exl3kit.format.codebook import codebook_values
from exl3kit.format.spec import NUM_STATES, SUPPORTED_BITS, TILE_SIZE, Codebook, words_per_tile
from exl3kit.format.trellis import pack, unpack
from exl3kit.kernels.launch import codebook_code, pointer, require_library
from exl3kit.testing.compare import assert_bitwise_equal
from tests.golden import COMBINATIONS

STRIP_TILES = 8


def decode_strip(
    tiles: torch.Tensor, bits: int | float, codebook: Codebook, isa: int
) -> torch.Tensor:
    """Values of eight packed tiles in stream order, (8, 256), from the decoder of a tier."""
    values = torch.full((STRIP_TILES, TILE_SIZE), torch.nan)
    numbers = (isa, int(2 * bits), codebook_code(codebook))
    tier, double_bits, code = map(ctypes.c_int64, numbers)
    address, out = ctypes.c_void_p(pointer(tiles)), ctypes.c_void_p(pointer(values))
    require_library().exl3_decode_strip(tier, address, double_bits, code, out)
    return values


@pytest.mark.parametrize(("bits", "codebook"), COMBINATIONS)
def test_random_rings(bits: int | float, codebook: Codebook, isa: int) -> None:
    random = torch.Generator().manual_seed(int(2 * bits))
    shape = (STRIP_TILES, words_per_tile(bits))
    for _ in range(4):
        tiles = torch.randint(-(1 << 15), 1 << 15, shape, generator=random, dtype=torch.int16)
        expected = codebook_values(codebook)[unpack(tiles)].float()
        assert_bitwise_equal(decode_strip(tiles, bits, codebook, isa), expected)


@cache
def rings_of_every_state() -> torch.Tensor:
    """Chained 8-bit states (n, 256) among which all 65536 occur, n a multiple of a strip.

    A state is two neighbouring bytes, so the rings are cut, one byte overlapping, from a sequence
    that has every pair: the Lyndon words of one and two letters in order (de Bruijn).
    """
    letters = [x for i in range(256) for x in (i, *(y for j in range(i + 1, 256) for y in (i, j)))]
    starts = range(0, len(letters), TILE_SIZE - 1)
    letters += letters[: STRIP_TILES * TILE_SIZE]
    rings = torch.tensor([letters[start : start + TILE_SIZE] for start in starts])
    rings = torch.cat((rings, rings[: -len(rings) % STRIP_TILES]))
    return rings.roll(1, dims=1) * 256 + rings


@pytest.mark.parametrize("codebook", Codebook)
def test_every_state(codebook: Codebook, isa: int) -> None:
    states = rings_of_every_state()
    assert len(states.unique()) == NUM_STATES
    values = codebook_values(codebook).float()
    for strip in states.split(STRIP_TILES):
        assert_bitwise_equal(decode_strip(pack(strip, 8), 8, codebook, isa), values[strip])


def test_every_rate_is_covered() -> None:
    assert {bits for bits, _ in COMBINATIONS} == set(SUPPORTED_BITS)

"""Packed rings <-> states.

A tile's ring is the low D(t) bits of state(t) for t = 0..255, most significant first. Ring bit b
sits in 32-bit word b >> 5 at bit 31 - (b & 31), words little endian; so 16-bit group g of the ring
is int16 word g ^ 1. state(t) is the 16 ring bits that end at S(t), indices modulo the ring length:
any bit pattern is a valid tile, and states read from a ring always chain, also from t = 255 to 0.
"""

from __future__ import annotations

import numpy as np
import torch

from exl3kit.errors import FormatError
from exl3kit.format.spec import (
    STATE_BITS,
    TILE_SIZE,
    bits_from_words,
    fresh_bits,
    window_ends,
    words_per_tile,
)

_TILES_AT_ONCE = 1 << 16  # bounds the memory of unpacked bits: 0.5 GB at 8 bits


def _ring_bits_to_words(ring: np.ndarray) -> np.ndarray:
    """(N, 16 K * 16) bits, 0 or 1 in ring order -> (N, 16 K) int16."""
    groups = np.packbits(np.ascontiguousarray(ring), axis=-1).view(">u2").astype("<u2")
    swapped = groups.reshape(len(ring), -1, 2)[..., ::-1]
    return np.ascontiguousarray(swapped).reshape(len(ring), -1).view(np.int16)


def pack(states: torch.Tensor, bits: int | float) -> torch.Tensor:
    """States (..., 256) of an integer dtype -> int16 words (..., 16 * bits).

    Only the low D(t) bits of each state are stored: `unpack` returns the same states exactly when
    they chain (see `chains`). Raises FormatError if the last dimension is not 256.
    """
    if states.shape[-1] != TILE_SIZE:
        raise FormatError(f"states last dimension: expected {TILE_SIZE}, got {states.shape[-1]}")
    flat = states.reshape(-1, TILE_SIZE).to(torch.int32)
    parts = [_pack_tiles(part, bits) for part in flat.split(_TILES_AT_ONCE)]
    words = torch.cat(parts) if parts else flat.new_empty(0, dtype=torch.int16)
    return words.reshape(*states.shape[:-1], words_per_tile(bits))


def _pack_tiles(states: torch.Tensor, bits: int | float) -> torch.Tensor:
    """(N, 256) int32 -> (N, 16 K) int16."""
    # Bit i of the ring belongs to position owner[i], as its bit shift[i].
    owner = np.repeat(np.arange(TILE_SIZE), fresh_bits(bits))
    shift = window_ends(bits)[owner] - 1 - np.arange(len(owner))
    if states.device.type == "cpu":
        ring = ((states.numpy()[:, owner] >> shift) & 1).astype(np.uint8)
        return torch.from_numpy(_ring_bits_to_words(ring))
    place = {"device": states.device, "dtype": torch.int32}
    ring = states[:, torch.tensor(owner, device=states.device)] >> torch.tensor(shift, **place) & 1
    groups = ring.view(len(states), -1, 2, 16).flip(2) << torch.arange(15, -1, -1, **place)
    return groups.sum(dim=3, dtype=torch.int32).to(torch.int16).view(len(states), -1)


def unpack(words: torch.Tensor, bits: int | float | None = None) -> torch.Tensor:
    """int16 words (..., 16 * bits) -> states int32 (..., 256), each 0..65535.

    `bits`, where given, must agree with the width; a width the format lacks is a FormatError.
    """
    found = bits_from_words(words.shape[-1])
    if bits is not None and found != bits:
        raise FormatError(f"words last dimension: {words.shape[-1]} means {found} bits, got {bits}")
    if words.dtype != torch.int16:
        raise FormatError(f"words dtype: expected torch.int16, got {words.dtype}")
    flat = words.reshape(-1, words.shape[-1]).contiguous()
    begin = (window_ends(found) - STATE_BITS) % (STATE_BITS * flat.shape[1])
    windows = _windows if words.device.type == "cpu" else windows_on_device
    return windows(flat, begin).reshape(*words.shape[:-1], TILE_SIZE)


def _windows(words: torch.Tensor, begin: np.ndarray) -> torch.Tensor:
    """The 16 ring bits from each place of `begin` (256,) on, of rings int16 (m, w): int32."""
    dwords = words.numpy().view("<u4").astype(np.uint64)
    index, offset = begin >> 5, begin & 31
    pair = (dwords[:, index] << np.uint64(32)) | dwords[:, (index + 1) % dwords.shape[1]]
    states = (pair >> (48 - offset).astype(np.uint64)) & np.uint64(0xFFFF)
    return torch.from_numpy(states.astype(np.int32))


def windows_on_device(words: torch.Tensor, begin: np.ndarray) -> torch.Tensor:
    """The same in torch, on the device of `words`; on a CPU it takes over twice the time."""
    halves = words.to(torch.int64) & 0xFFFF
    dwords = halves[:, 1::2] << 16 | halves[:, 0::2]
    places = torch.from_numpy(begin.astype(np.int64)).to(words.device)
    index, offset = places >> 5, places & 31
    pair = (dwords[:, index] << 32) | dwords[:, (index + 1) % dwords.shape[1]]
    return (pair >> (48 - offset) & 0xFFFF).to(torch.int32)


def chains(states: torch.Tensor, bits: int | float) -> torch.Tensor:
    """bool (...): do the states (..., 256) follow from one another all around the ring?"""
    low = torch.from_numpy((1 << fresh_bits(bits)) - 1)
    shift = torch.from_numpy(fresh_bits(bits).copy())
    now = states.to(torch.int64)
    before = now.roll(1, dims=-1)
    expected = ((before << shift) & 0xFFFF) | (now & low)
    return (now == expected).all(dim=-1)

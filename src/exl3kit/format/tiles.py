"""Order of the 256 weights inside a tile: that of the B operand of `mma.m16n8k16`.

Stream position t = 8 * lane + j holds row 2*(lane & 3) + (j & 1) + 8*((j >> 1) & 1) and column
(lane >> 2) + 8*(j >> 2): lane l of a warp finds its eight weights in eight neighbouring windows.
Rows are in-features, columns out-features.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from exl3kit.errors import FormatError
from exl3kit.format.spec import TILE, TILE_SIZE


def _tile_order() -> tuple[np.ndarray, np.ndarray]:
    t = np.arange(TILE_SIZE)
    lane, j = t >> 3, t & 7
    rows = 2 * (lane & 3) + (j & 1) + 8 * ((j >> 1) & 1)
    columns = (lane >> 2) + 8 * (j >> 2)
    return rows, columns


TILE_ROWS, TILE_COLS = _tile_order()
_STREAM_TO_FLAT = TILE_ROWS * TILE + TILE_COLS
_FLAT_TO_STREAM = np.argsort(_STREAM_TO_FLAT)


@cache
def _orders(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each stream position lies in a row-major tile, and the inverse."""
    return (
        torch.from_numpy(_STREAM_TO_FLAT).to(device),
        torch.from_numpy(_FLAT_TO_STREAM).to(device),
    )


def to_tiles(matrix: torch.Tensor) -> torch.Tensor:
    """(k, n) of any dtype -> (k/16, n/16, 256), each tile in stream order.

    Raises FormatError unless both sides are multiples of 16.
    """
    k, n = matrix.shape
    if k % TILE or n % TILE:
        raise FormatError(f"matrix: expected sides that are multiples of {TILE}, got ({k}, {n})")
    blocks = matrix.reshape(k // TILE, TILE, n // TILE, TILE).permute(0, 2, 1, 3)
    return blocks.reshape(k // TILE, n // TILE, TILE_SIZE)[..., _orders(matrix.device)[0]]


def from_tiles(tiles: torch.Tensor) -> torch.Tensor:
    """(k/16, n/16, 256) in stream order -> (k, n); the inverse of `to_tiles`."""
    rows, columns, _ = tiles.shape
    blocks = tiles[..., _orders(tiles.device)[1]].reshape(rows, columns, TILE, TILE)
    return blocks.permute(0, 2, 1, 3).reshape(rows * TILE, columns * TILE)

"""LDLQ: quantise blocks of 16 rows from the last to the first, feeding errors back.

    target_i = W_i + sum over j > i of L[j, i]' (W_j - Q_j),     Q_i = decode(encode(target_i))

All tiles of block i of all matrices go to the encoder in one call: one 256 x 128 matrix has only 8
tiles a block, too few to keep threads busy.
"""

from __future__ import annotations

import torch

from exl3kit.format.codebook import codebook_values
from exl3kit.format.spec import TILE, TILE_SIZE, check_codebook
from exl3kit.format.tiles import from_tiles, to_tiles
from exl3kit.quantize.viterbi import encode


def ldlq(
    inner: torch.Tensor,
    lower: torch.Tensor,
    bits: int | float,
    codebook: str,
    feedback: torch.Tensor | None = None,
) -> torch.Tensor:
    """States int32 (b, k/16, n/16, 256) of b matrices with error feedback.

    inner     float64 (b, k, n), regularised and in the codebook's scale
    lower     float64 (b, k, k), from `ldl.feedback_factor`
    feedback  float64 (b, k, n), what errors are taken from in place of the encoder's own output:
              with the output of another quantiser this compares block by block without drift
    """
    count, k, n = inner.shape
    errors = torch.zeros_like(inner) if feedback is None else inner - feedback
    blocks = []
    for begin in range(k - TILE, -1, -TILE):
        rows, below = slice(begin, begin + TILE), slice(begin + TILE, k)
        target = inner[:, rows] + lower[:, below, rows].transpose(1, 2) @ errors[:, below]
        states = encode_matrix(target.reshape(count * TILE, n), bits, codebook)
        if feedback is None:
            decoded = decode_matrix(states, codebook).view(count, TILE, n)
            errors[:, rows] = inner[:, rows] - decoded
        blocks.append(states)
    return torch.stack(blocks[::-1], dim=1)


def encode_matrix(matrix: torch.Tensor, bits: int | float, codebook: str) -> torch.Tensor:
    """(k, n) of any float dtype -> states int32 (k/16, n/16, 256), every tile on its own."""
    tiles = to_tiles(matrix)
    return encode(tiles.reshape(-1, TILE_SIZE).float(), bits, codebook).view(tiles.shape)


def decode_matrix(states: torch.Tensor, codebook: str) -> torch.Tensor:
    """States (k/16, n/16, 256) -> their values, float64 (k, n)."""
    return from_tiles(codebook_values(check_codebook(codebook))[states.long()].double())

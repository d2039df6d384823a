"""LDLQ: quantise blocks of 16 rows from the last to the first, feeding errors back.

    target_i = W_i + sum over j > i of L[j, i]' (W_j - Q_j),     Q_i = decode(encode(target_i))

All tiles of block i of all matrices go to the encoder in one call: one 256 x 128 matrix has only 8
tiles a block, too few to keep threads or a GPU busy. Blocks are taken in spans of 128 rows: what
lies below a span is fed back in one product, which on a GPU is an eighth of the memory traffic.
Nothing in the loop waits for the device.
"""

from __future__ import annotations

import torch

from exl3kit.format.codebook import codebook_values
from exl3kit.format.spec import TILE, TILE_SIZE
from exl3kit.format.tiles import from_tiles, to_tiles
from exl3kit.kernels.row_block import CudaRowBlocks, RowBlocks
from exl3kit.quantize.viterbi import Encoder, encode

_SPAN = 8 * TILE


def ldlq(
    inner: torch.Tensor,
    lower: torch.Tensor,
    bits: int | float,
    codebook: str,
    feedback: torch.Tensor | None = None,
) -> torch.Tensor:
    """States int32 (b, k/16, n/16, 256) of b matrices with error feedback, on their device.

    inner     float64 (b, k, n), regularised and in the codebook's scale
    lower     float64 (b, k, k), from `ldl.feedback_factor`
    feedback  float64 (b, k, n), what errors are taken from in place of the encoder's own output:
              with the output of another quantiser this compares block by block without drift
    """
    count, k, n = inner.shape
    is_cuda = inner.device.type == "cuda"
    blocks = (CudaRowBlocks if is_cuda else RowBlocks)(n, codebook, inner.device)
    encoder = Encoder(bits, codebook, inner.device)
    inner = inner.contiguous()
    errors = torch.zeros_like(inner) if feedback is None else inner - feedback
    shape = k // TILE, count * (n // TILE), TILE_SIZE
    states = torch.empty(shape, dtype=torch.int32, device=inner.device)
    for end in range(k, 0, -_SPAN):
        begin = max(0, end - _SPAN)
        base = _fed_back(inner[:, begin:end], lower, errors, begin, end)
        for row in range(end - TILE, begin - 1, -TILE):
            own = base[:, row - begin : row - begin + TILE]
            target = _fed_back(own, lower, errors[:, :end], row, row + TILE)
            chosen = states[row // TILE]
            encoder.encode_into(blocks.tiles(target), chosen)
            if feedback is None:
                blocks.take_errors(chosen, inner, errors, row)
    encoder.check()
    return states.view(k // TILE, count, n // TILE, TILE_SIZE).transpose(0, 1)


def _fed_back(
    rows: torch.Tensor, lower: torch.Tensor, errors: torch.Tensor, begin: int, end: int
) -> torch.Tensor:
    """rows + L[end:, begin:end]' errors[end:] for rows = begin..end of b matrices."""
    factor = lower[:, end : errors.shape[1], begin:end]
    return torch.baddbmm(rows, factor.mT, errors[:, end:])


def encode_matrix(matrix: torch.Tensor, bits: int | float, codebook: str) -> torch.Tensor:
    """(k, n) of any float dtype -> states int32 (k/16, n/16, 256), every tile on its own."""
    tiles = to_tiles(matrix)
    return encode(tiles.reshape(-1, TILE_SIZE).float(), bits, codebook).view(tiles.shape)


def decode_matrix(states: torch.Tensor, codebook: str) -> torch.Tensor:
    """States (k/16, n/16, 256) -> their values, float64 (k, n)."""
    return from_tiles(codebook_values(codebook, states.device)[states.long()].double())

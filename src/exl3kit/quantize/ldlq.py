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
    encoder = Encoder(bits, codebook, inner.device)
    values = codebook_values(codebook, inner.device).double()
    order, inverse = _row_orders(n, inner.device)
    errors = torch.zeros_like(inner) if feedback is None else inner - feedback
    states = torch.empty(count, k // TILE, n // TILE * TILE_SIZE, dtype=torch.int32)
    states = states.to(inner.device)
    for end in range(k, 0, -_SPAN):
        span = max(0, end - _SPAN)
        base = _fed_back(inner, lower, errors, slice(span, end), slice(end, k))
        for begin in range(end - TILE, span - 1, -TILE):
            rows, below = slice(begin, begin + TILE), slice(begin + TILE, end)
            within = slice(begin - span, begin - span + TILE)
            target = base[:, within] + lower[:, below, rows].mT @ errors[:, below]
            tiles = target.reshape(count, -1)[:, order].float()
            chosen = encoder(tiles.view(-1, TILE_SIZE)).view(count, -1)
            states[:, begin // TILE] = chosen
            if feedback is None:
                decoded = values.index_select(0, chosen.view(-1)).view(count, -1)
                torch.sub(
                    inner[:, rows],
                    decoded[:, inverse].view(count, TILE, n),
                    out=errors[:, rows],
                )
    encoder.check()
    return states.view(count, k // TILE, n // TILE, TILE_SIZE)


def _fed_back(
    inner: torch.Tensor, lower: torch.Tensor, errors: torch.Tensor, rows: slice, below: slice
) -> torch.Tensor:
    """inner + L[below, rows]' errors[below], (b, rows, n)."""
    return torch.baddbmm(inner[:, rows], lower[:, below, rows].mT, errors[:, below])


def _row_orders(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat places in a (16, n) row block of the n/16 tiles in stream order, and the inverse."""
    places = torch.arange(TILE * n, device=device).view(TILE, n)
    order = to_tiles(places).reshape(-1)
    return order, order.argsort()


def encode_matrix(matrix: torch.Tensor, bits: int | float, codebook: str) -> torch.Tensor:
    """(k, n) of any float dtype -> states int32 (k/16, n/16, 256), every tile on its own."""
    tiles = to_tiles(matrix)
    return encode(tiles.reshape(-1, TILE_SIZE).float(), bits, codebook).view(tiles.shape)


def decode_matrix(states: torch.Tensor, codebook: str) -> torch.Tensor:
    """States (k/16, n/16, 256) -> their values, float64 (k, n)."""
    return from_tiles(codebook_values(codebook, states.device)[states.long()].double())

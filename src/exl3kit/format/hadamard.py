"""H128: the Walsh-Hadamard transform of aligned blocks of 128, natural order, scale 1/sqrt(128).

H[i, j] = (-1)^popcount(i & j) / sqrt(128): symmetric and its own inverse.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from exl3kit.errors import FormatError
from exl3kit.format.spec import HADAMARD_BLOCK


def hadamard(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Transform every aligned block of 128 along `dim`; same shape and dtype, a new tensor.

    Computed in x's dtype (float32 or float64) by 7 butterfly levels: about 1e-7 relative in
    float32. On a GPU float64 goes through its matrix units instead, twenty times as fast; sums then
    differ in the last bit. Raises FormatError if the length is not a multiple of 128.
    """
    length = x.shape[dim]
    if length % HADAMARD_BLOCK:
        raise FormatError(
            f"dimension {dim}: expected a multiple of {HADAMARD_BLOCK}, got {length}; "
            "EXL3 pads both sides of a matrix to it"
        )
    if x.dtype == torch.float64 and x.device.type == "cuda":
        return _by_product(x, dim % x.dim())
    moved = x.movedim(dim, -1)
    y = moved.reshape(-1, HADAMARD_BLOCK)
    step = 1
    while step < HADAMARD_BLOCK:
        pairs = y.view(-1, HADAMARD_BLOCK // (2 * step), 2, step)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        y = torch.stack((low + high, low - high), dim=2).view(-1, HADAMARD_BLOCK)
        step *= 2
    return (y / math.sqrt(HADAMARD_BLOCK)).view(moved.shape).movedim(-1, dim)


def _by_product(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The same as a matrix product with H128."""
    matrix = _matrix(x.device)
    split = x.unflatten(dim, (-1, HADAMARD_BLOCK))
    if dim == x.dim() - 1:
        return (split @ matrix).view(x.shape)
    columns = split.flatten(dim + 2) if x.dim() > dim + 2 else split
    return (matrix @ columns).view(x.shape)


@cache
def _matrix(device: torch.device) -> torch.Tensor:
    """H128 in float64."""
    identity = torch.eye(HADAMARD_BLOCK, dtype=torch.float64)
    return hadamard(identity).to(device)

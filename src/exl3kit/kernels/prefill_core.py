"""What every core for products of many tokens offers, whatever instructions it is made of.

A core multiplies blocks of rows by their experts' matrices while decoding them. What it reads and
writes is in cuda/prefill_layout.cuh and the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from exl3kit.format.spec import Codebook
from exl3kit.jit.spec import KernelSpec


@dataclass(frozen=True)
class ProductShape:
    """Sizes of one launch: matrices (k, n), rows that y and x have room for.

    max_blocks bounds the blocks of rows that the device counts.
    """

    k: int
    n: int
    rows_capacity: int
    max_blocks: int


# shape, trellis, matrices, codebook, (blocks, their count), x, y:
#   trellis   int16 (E, k/16, n/16, 16 K); with `matrices` flat
#   matrices  None, or of experts of several rates int64 (E, 2): where each starts, twice its bits
#   table     int32 (max_blocks, 4) and (1,), on the device
#   x, y      fp16 panels and fp16 (rows_capacity, n), both in the rotated basis
Product = Callable[
    [
        ProductShape,
        torch.Tensor,
        torch.Tensor | None,
        Codebook,
        tuple[torch.Tensor, torch.Tensor],
        torch.Tensor,
        torch.Tensor,
    ],
    None,
]


@dataclass(frozen=True)
class Core:
    """A core: rows of a block at most, features of an item, items at once on a multiprocessor."""

    block_rows: int
    strip: int
    items_per_sm: int
    product: Product
    spec: Callable[[int, Codebook], KernelSpec]

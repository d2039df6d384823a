"""Row blocks of error feedback on a CUDA device: one kernel a direction, where torch takes six.

`RowBlocks` is the CPU form and says what both do; `CudaRowBlocks` runs kernels/cuda/row_block.cuh.
"""

from __future__ import annotations

import torch

from exl3kit.format.codebook import codebook_values
from exl3kit.format.spec import TILE, TILE_SIZE
from exl3kit.format.tiles import to_tiles
from exl3kit.jit.launch import get_kernel
from exl3kit.jit.spec import KernelSpec, Param

_TO_TILES = KernelSpec(
    "row_block.cuh", "exl3::rows_to_tiles", (), (Param.POINTER, Param.POINTER, Param.INT32)
)
_TAKE_ERRORS = KernelSpec(
    "row_block.cuh",
    "exl3::take_errors",
    (),
    (Param.POINTER,) * 4 + (Param.INT32, Param.INT64),
)
SPECS = (_TO_TILES, _TAKE_ERRORS)


class RowBlocks:
    """Blocks of 16 rows of b matrices with n columns, in and out of stream order."""

    def __init__(self, columns: int, codebook: str, device: torch.device) -> None:
        """Places of a row block's n/16 tiles in its 16 n entries, and the inverse."""
        places = torch.arange(TILE * columns, device=device).view(TILE, columns)
        self._order = to_tiles(places).reshape(-1)
        self._inverse = self._order.argsort()
        self._values = codebook_values(codebook, device).double()

    def tiles(self, target: torch.Tensor) -> torch.Tensor:
        """float64 (b, 16, n) -> float32 (b n/16, 256)."""
        return target.flatten(1)[:, self._order].float().view(-1, TILE_SIZE)

    def take_errors(
        self, states: torch.Tensor, inner: torch.Tensor, errors: torch.Tensor, row: int
    ) -> None:
        """errors[:, row : row + 16] = inner - values[states]; states int32 (b n/16, 256)."""
        rows = slice(row, row + TILE)
        values = self._values[states.flatten().long()].view(len(inner), -1)
        errors[:, rows] = inner[:, rows] - values[:, self._inverse].view_as(inner[:, rows])


class CudaRowBlocks:
    """The same on a CUDA device; nothing here waits for it. Matrices are contiguous."""

    def __init__(self, columns: int, codebook: str, device: torch.device) -> None:
        """Loads both kernels."""
        self._columns = columns
        self._to_tiles = get_kernel(_TO_TILES, device)
        self._take_errors = get_kernel(_TAKE_ERRORS, device)
        self._values = codebook_values(codebook, device)

    def tiles(self, target: torch.Tensor) -> torch.Tensor:
        """float64 (b, 16, n), contiguous -> float32 (b n/16, 256)."""
        count = target.numel() // TILE_SIZE
        tiles = target.new_empty(count, TILE_SIZE, dtype=torch.float32)
        self._to_tiles.launch(count, TILE_SIZE, (target, tiles, self._columns))
        return tiles

    def take_errors(
        self, states: torch.Tensor, inner: torch.Tensor, errors: torch.Tensor, row: int
    ) -> None:
        """errors[:, row : row + 16] = inner - values[states]; states int32 (b n/16, 256)."""
        arguments = (
            states,
            self._values,
            inner[0, row:],
            errors[0, row:],
            self._columns,
            inner.stride(0),
        )
        self._take_errors.launch(len(states), TILE_SIZE, arguments)

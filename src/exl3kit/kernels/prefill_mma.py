"""Products of many tokens by mma.sync, on every architecture: launch of prefill_mma.cuh."""

from __future__ import annotations

import torch

from exl3kit.format.spec import HADAMARD_BLOCK, Codebook, rates_of
from exl3kit.jit.launch import get_kernel
from exl3kit.jit.spec import KernelSpec, Param
from exl3kit.kernels.gemm import CODEBOOK_NAMES, RATES
from exl3kit.kernels.launch import double_bits
from exl3kit.kernels.prefill_core import Core, ProductShape

BLOCK_ROWS = 64  # kMmaRows of prefill_mma.cuh
BLOCKS_PER_SM = 4  # of threads, by registers; fewer where shared memory is small
STRIP = HADAMARD_BLOCK  # features of a block of threads
_THREADS, _STAGES, _PANEL = 128, 3, 64


def product_spec(bits2: int, codebook: Codebook) -> KernelSpec:
    """The kernel of a rate and a codebook."""
    parameters = (Param.POINTER,) * 6 + (Param.INT32,) * 3
    template = (bits2, CODEBOOK_NAMES[codebook])
    return KernelSpec("prefill_mma.cuh", "exl3::prefill_mma", template, parameters)


SPECS = tuple(product_spec(*rate) for rate in RATES)


def shared_bytes(bits2: int) -> int:
    """Shared memory of a block of threads: three stages of rows and tiles."""
    tiles = _PANEL // 16 * STRIP // 16
    return _STAGES * (2 * _PANEL * BLOCK_ROWS + tiles * 16 * bits2)


def grouped_product(
    shape: ProductShape,
    trellis: torch.Tensor,
    matrices: torch.Tensor | None,
    codebook: Codebook,
    table: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """A `Product` of prefill_core.py; with `matrices` one launch for each rate there can be."""
    rates = (
        [double_bits(trellis)]
        if matrices is None
        else [int(2 * bits) for bits in rates_of(codebook)]
    )
    for bits2 in rates:
        get_kernel(product_spec(bits2, codebook), trellis.device).launch(
            (shape.n // STRIP, shape.max_blocks),
            _THREADS,
            (trellis, matrices, *table, x, y, shape.rows_capacity, shape.k, shape.n),
            shared_bytes=shared_bytes(bits2),
            overlaps=True,
        )


CORE = Core(BLOCK_ROWS, STRIP, BLOCKS_PER_SM, grouped_product, product_spec)

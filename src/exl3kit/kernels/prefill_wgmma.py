"""Products of many tokens on capability 9.0: launch of prefill_wgmma.cuh."""

from __future__ import annotations

import torch

from exl3kit.errors import UnsupportedError
from exl3kit.format.spec import Codebook
from exl3kit.jit.launch import get_kernel
from exl3kit.jit.spec import KernelSpec, Param
from exl3kit.kernels.gemm import CODEBOOK_NAMES, RATES, num_multiprocessors
from exl3kit.kernels.launch import double_bits
from exl3kit.kernels.prefill_core import Core, ProductShape

BLOCK_ROWS = 128  # kMaxBlockRows of prefill_layout.cuh
STRIP = 256  # features of an item: four warpgroups of 64
_ARCH = frozenset({"sm_90a"})
_THREADS, _PANEL, _LINE = 512, 64, 1024
# WgmmaShape: rows that four warpgroups store together, barriers, and what a block may have.
_STORES, _BARRIERS, _MOST_STAGES, _MOST_SHARED = 4 * 4096, 256, 8, 227 * 1024


def product_spec(bits2: int, codebook: Codebook) -> KernelSpec:
    """The kernel of a rate and a codebook."""
    parameters = (Param.POINTER,) * 5 + (Param.INT32,) * 3
    template = (bits2, CODEBOOK_NAMES[codebook])
    return KernelSpec("prefill_wgmma.cuh", "exl3::prefill_wgmma", template, parameters, _ARCH)


SPECS = tuple(product_spec(*rate) for rate in RATES)


def shared_bytes(bits2: int) -> int:
    """kShared of WgmmaShape: dynamic shared memory of a block of threads."""
    stage = 2 * _PANEL * BLOCK_ROWS + _PANEL // 16 * STRIP // 16 * 16 * bits2
    stage = -(-stage // _LINE) * _LINE
    stages = min(_MOST_STAGES, (_MOST_SHARED - _LINE - _STORES - _BARRIERS) // stage)
    return stages * stage + _STORES + 12 * stages + _LINE


def grouped_product(
    shape: ProductShape,
    trellis: torch.Tensor,
    matrices: torch.Tensor | None,
    codebook: Codebook,
    table: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """A `Product` of prefill_core.py; UnsupportedError for experts of several rates."""
    if matrices is not None:
        raise UnsupportedError(
            "wgmma core: expected experts of one rate, got a table of several; use the mma core"
        )
    bits2 = double_bits(trellis)
    get_kernel(product_spec(bits2, codebook), trellis.device).launch(
        num_multiprocessors(trellis.device),
        _THREADS,
        (trellis, *table, x, y, shape.rows_capacity, shape.k, shape.n),
        shared_bytes=shared_bytes(bits2),
        overlaps=True,
    )


CORE = Core(BLOCK_ROWS, STRIP, 1, grouped_product, product_spec)

"""Decode, then multiply by cuBLAS: panels of an EXL3 matrix as dense fp16 in the rotated basis.

Any number of rows; what every other kernel is compared with on a device, and for many rows the
faster way where decoding every weight for each block of rows costs more than writing it once.
"""

from __future__ import annotations

import torch

from exl3kit.format.spec import HADAMARD_BLOCK, Codebook, check_codebook
from exl3kit.jit.launch import get_kernel
from exl3kit.jit.spec import KernelSpec, Param
from exl3kit.kernels.gemm import CODEBOOK_NAMES, RATES
from exl3kit.kernels.launch import DTYPE_CODES, double_bits
from exl3kit.kernels.prefill_linear import WARPS, finish, grid_of

# Bounds the memory of a call: a panel, and as many rows as the product of a panel may have.
PANEL_BYTES, MAX_ROWS = 256 << 20, 8192
_THREADS, _PART_K = 256, 64  # of reconstruct.cuh
_POINTER, _INT = Param.POINTER, Param.INT32


def panel_spec(bits2: int, codebook: Codebook) -> KernelSpec:
    """The kernel that decodes a rate and a codebook."""
    template, parameters = (bits2, CODEBOOK_NAMES[codebook]), (_POINTER,) * 2 + (_INT,) * 3
    return KernelSpec("reconstruct.cuh", "exl3::reconstruct", template, parameters)


ROTATE = KernelSpec("reconstruct.cuh", "exl3::rotate_rows", (WARPS,), (_POINTER,) * 3 + (_INT,) * 2)
SPECS = (ROTATE, *(panel_spec(*rate) for rate in RATES))


def specs_of(bits2: int, codebook: Codebook) -> tuple[KernelSpec, ...]:
    """Every kernel that `linear` launches for a matrix of a rate, but for `finish`."""
    return (ROTATE, panel_spec(bits2, codebook))


def reconstruct(trellis: torch.Tensor, codebook: Codebook, first: int, panel: torch.Tensor) -> None:
    """panel[j, i] = What[i, first + j], the format's own values.

    trellis int16 (k/16, n/16, 16 K); panel float16 (columns, k), contiguous; first and columns are
    multiples of 128.
    """
    columns, k = panel.shape
    get_kernel(panel_spec(double_bits(trellis), codebook), panel.device).launch(
        (columns // HADAMARD_BLOCK, k // _PART_K),
        _THREADS,
        (trellis, panel, first, k, 16 * trellis.shape[1]),
        overlaps=True,
    )


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gemm.linear` for any number of rows; same arguments and result."""
    (rows, k), n = x.shape, svh.shape[0]
    y = x.new_empty((rows, n))
    if rows == 0:
        return y
    name = check_codebook(codebook)
    columns = min(n, max(1, PANEL_BYTES // (2 * HADAMARD_BLOCK * k)) * HADAMARD_BLOCK)
    rotated = torch.empty((rows, k), dtype=torch.float16, device=x.device)
    get_kernel(ROTATE, x.device).launch(
        grid_of(rows, k), 32 * WARPS, (x, suh, rotated, k, DTYPE_CODES[x.dtype]), overlaps=True
    )
    for first in range(0, n, columns):
        part = slice(first, min(first + columns, n))
        panel = rotated.new_empty((part.stop - first, k))
        reconstruct(trellis, name, first, panel)
        for start in range(0, rows, MAX_ROWS):
            some = slice(start, start + MAX_ROWS)
            product = torch.mm(rotated[some], panel.T, out_dtype=torch.float32)
            to, own = y[some, part], None if bias is None else bias[part]
            finish(product, torch.float32, 1, len(product), svh[part], own, to)
    return y

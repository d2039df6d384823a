"""One EXL3 linear for many rows on a CUDA device, by one of two ways.

Fused: rotate the rows, multiply them while decoding, rotate the sums. Blocks of rows walk through
the matrix; where they are few, K is cut into splits, which the cores take for experts.

Panel: decode the matrix to fp16 (prefill_panel) and let cuBLAS multiply, with float32 sums.

`heuristics.uses_panel` says which is faster. Within a way and a number of splits a row's bits
depend on nothing but the row; docs/numerics.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from exl3kit.format.spec import HADAMARD_BLOCK, check_codebook
from exl3kit.jit.launch import get_kernel
from exl3kit.jit.spec import KernelSpec, Param
from exl3kit.kernels import heuristics
from exl3kit.kernels.gemm import num_multiprocessors
from exl3kit.kernels.launch import DTYPE_CODES
from exl3kit.kernels.prefill_core import Core, ProductShape
from exl3kit.kernels.scratch import offsets_of, views_of

_POINTER, _INT = Param.POINTER, Param.INT32
WARPS = 8
MAX_ROWS = 8192  # of one launch; more are cut, which does not show


def _spec(name: str, pointers: int, numbers: int) -> KernelSpec:
    parameters = (_POINTER,) * pointers + (_INT,) * numbers
    return KernelSpec("prefill_rows.cuh", f"exl3::{name}", (WARPS,), parameters)


ROTATE = _spec("prefill_rotate_linear", 5, 6)
FINISH = _spec("prefill_finish_linear", 4, 7)
SPECS = (ROTATE, FINISH)


@dataclass(frozen=True)
class FusedPlan:
    """Sizes of one call: rows, in-features k, out-features n, parts of K, rows of a block."""

    rows: int
    k: int
    n: int
    splits: int
    block_rows: int

    @property
    def split_rows(self) -> int:
        """Rows set aside for each split, a multiple of 8."""
        return -(-self.rows // 8) * 8

    @property
    def num_blocks(self) -> int:
        """Blocks of rows of all splits."""
        return self.splits * -(-self.rows // self.block_rows)

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """Byte at which each view of the scratch starts; `end` is the end."""
        return offsets_of(self.items())

    def items(self) -> dict[str, int]:
        """Bytes of each view of the scratch, unaligned."""
        return {
            "blocks": 16 * self.num_blocks,
            "num_blocks": 4,
            "rows": 2 * self.split_rows * self.k,
            "product": 2 * self.splits * self.split_rows * self.n,
        }


@functools.cache
def plan_fused(rows: int, k: int, n: int, core: Core, num_sms: int) -> FusedPlan:
    """The plan of a call of `rows` by a (k, n) matrix on `num_sms` multiprocessors."""
    splits = heuristics.choose_prefill_splits(rows, k, n, core, num_sms)
    return FusedPlan(rows, k, n, splits, core.block_rows)


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gemm.linear` for any number of rows, meant for more than 32; same arguments and result."""
    y = x.new_empty((x.shape[0], svh.shape[0]))
    core, sms = heuristics.choose_core(x.device), num_multiprocessors(x.device)
    for start in range(0, x.shape[0], MAX_ROWS):
        part = slice(start, start + MAX_ROWS)
        plan = plan_fused(len(x[part]), *x.shape[1:], svh.shape[0], core, sms)
        scratch = torch.empty(plan.offsets["end"], dtype=torch.uint8, device=x.device)
        run_fused(plan, scratch, core, x[part], trellis, suh, svh, codebook, bias, y[part])
    return y


def run_fused(
    plan: FusedPlan,
    scratch: torch.Tensor,
    core: Core,
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """The launches of one plan; scratch is uint8 of plan.offsets["end"], aligned to 256.

    x (rows, k), y (rows, n), the rest as in `linear`.
    """
    views = views_of(scratch, plan.offsets, x.device)
    get_kernel(ROTATE, x.device).launch(
        grid_of(plan.rows, plan.k),
        32 * WARPS,
        (
            x, suh, views["rows"], views["blocks"], views["num_blocks"], plan.rows, plan.k,
            plan.splits, plan.split_rows, plan.block_rows, DTYPE_CODES[x.dtype],
        ),
        overlaps=True,
    )  # fmt: skip
    shape = ProductShape(
        plan.k // plan.splits, plan.n, plan.splits * plan.split_rows, plan.num_blocks
    )
    table = views["blocks"], views["num_blocks"]
    name = check_codebook(codebook)
    core.product(shape, trellis, None, name, table, views["rows"], views["product"])
    finish(views["product"], torch.float16, plan.splits, plan.split_rows, svh, bias, y)


def finish(
    product: torch.Tensor,
    dtype: torch.dtype,
    splits: int,
    split_rows: int,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """y (rows, n), whose rows may lie apart = H128(sum of products) * svh + bias.

    product (splits, split_rows, n) of `dtype`, contiguous, or a view of bytes that starts with it.
    """
    rows, n = y.shape
    get_kernel(FINISH, y.device).launch(
        grid_of(rows, n),
        32 * WARPS,
        (
            product, svh, bias, y, n, splits, split_rows, y.stride(0), DTYPE_CODES[dtype],
            DTYPE_CODES[y.dtype], DTYPE_CODES[y.dtype if bias is None else bias.dtype],
        ),
        overlaps=True,
    )  # fmt: skip


def grid_of(rows: int, width: int) -> tuple[int, int]:
    """Blocks of WARPS warps: a warp for each row and block of 128."""
    return rows, -(-width // (WARPS * HADAMARD_BLOCK))

"""One EXL3 linear on a CUDA device: plan, and the launch of kernels/cuda/linear.cuh.

Three kernels in a row: rotate the input, multiply while decoding, rotate the output. K is cut into
`splits` by the shape and the device alone, so a row's result does not depend on the rows beside it.
On capability 9.0 and newer each kernel starts while its predecessor still runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from exl3kit.format.spec import HADAMARD_BLOCK, TILE, Codebook, check_codebook, rates_of
from exl3kit.jit.launch import get_kernel
from exl3kit.jit.spec import KernelSpec, Param
from exl3kit.kernels.launch import DTYPE_CODES, codebook_code, double_bits

# Rows of one pass: bounds the partial sums, which take splits * rows * n * 4 bytes.
MAX_ROWS = 128
# Token groups of 8 that a block of the product holds, and tiles side by side. For two groups six
# tiles make an even two waves of 6144 x 12288 where eight make 1.5, and are no faster.
SHAPES = {1: 8, 2: 8, 4: 4}
# Shape and kStages of partial.cuh and product.cuh.
PRODUCT_WARPS = 8  # of a block of the product
SLICES = 8  # warps that share a strip's part of K
BLOCKS_PER_SM = 3  # with which the product of up to 8 rows fills a multiprocessor
_STAGES = 3
_MIN_SLICE = 2  # rows of tiles below which a warp is not worth its start
_WARPS = 4  # of a block of rotate and finish
_ALIGNMENT = 256

CODEBOOK_NAMES = {
    Codebook.THREE_INST: "exl3::kThreeInst",
    Codebook.MCG: "exl3::kMcg",
    Codebook.MUL1: "exl3::kMul1",
}
# (twice the bits, codebook) of every rate there is.
RATES = tuple((int(2 * bits), name) for name in CODEBOOK_NAMES for bits in rates_of(name))

MAX_BITS2 = max(bits2 for bits2, _ in RATES)

_POINTER, _INT = Param.POINTER, Param.INT32


def product_spec(bits2: int, codebook: Codebook, groups: int) -> KernelSpec:
    """The product kernel of a rate and a codebook, for one of the `SHAPES`."""
    return KernelSpec(
        "linear.cuh",
        "exl3::linear_product",
        (bits2, CODEBOOK_NAMES[codebook], groups, SHAPES[groups]),
        (_POINTER,) * 3 + (_INT,) * 3,
        spill_budget=48,  # four groups at 7 bits: 16 to 40 bytes, by architecture
    )


ROTATE = KernelSpec("linear.cuh", "exl3::linear_rotate", (_WARPS,), (_POINTER,) * 4 + (_INT,) * 3)
FINISH = KernelSpec("linear.cuh", "exl3::linear_finish", (_WARPS,), (_POINTER,) * 5 + (_INT,) * 7)
SPECS = (
    ROTATE,
    FINISH,
    *(product_spec(*rate, groups) for rate in RATES for groups in SHAPES),
)


def specs_of(bits2: int, codebook: Codebook) -> tuple[KernelSpec, ...]:
    """Every kernel that `linear` may launch for a matrix of a rate, by the number of rows."""
    return (ROTATE, FINISH, *(product_spec(bits2, codebook, groups) for groups in SHAPES))


@dataclass(frozen=True)
class LinearPlan:
    """Sizes of one call: rows, in-features k, out-features n, and how K is cut.

    The workspace holds the rotated input, fp16 (rows, k, 2), the first value of each of its blocks
    before the transform, float32 (rows, k/128), and the partial sums, float32 (splits, rows, n). It
    needs no preparation and is free again when the call is done.
    """

    rows: int
    k: int
    n: int
    splits: int

    @property
    def groups(self) -> int:
        """Token groups of 8 of the product kernel."""
        return next(size for size in SHAPES if 8 * size >= min(self.rows, 8 * max(SHAPES)))

    @property
    def firsts_offset(self) -> int:
        """Bytes of the workspace before the first values, a multiple of 256 as k is of 128."""
        return 4 * self.rows * self.k

    @property
    def partial_offset(self) -> int:
        """Bytes of the workspace before the partial sums."""
        firsts = 4 * self.rows * self.k // HADAMARD_BLOCK
        return self.firsts_offset + -(-firsts // _ALIGNMENT) * _ALIGNMENT

    @property
    def workspace_bytes(self) -> int:
        """Bytes the call writes and reads besides its arguments."""
        return self.partial_offset + 4 * self.splits * self.rows * self.n


def plan_linear(rows: int, k: int, n: int, num_sms: int) -> LinearPlan:
    """The plan of a call of `rows` (1 to MAX_ROWS) by a (k, n) matrix on `num_sms` multiprocessors.

    `splits` fills the device once with the blocks of up to 8 rows and is the same for all rows.
    """
    return LinearPlan(rows, k, n, choose_splits(k // TILE, n // HADAMARD_BLOCK, num_sms))


def product_shared_bytes(bits2: int, groups: int) -> tuple[int, int]:
    """Shared memory of a product kernel: the rings of its warps, and their sums."""
    stage = TILE * SHAPES[groups] * bits2 + 512 * groups
    return PRODUCT_WARPS * _STAGES * stage, 4 * PRODUCT_WARPS * 8 * (TILE * SHAPES[groups] + 4)


def choose_splits(k_tiles: int, strips: int, num_sms: int, slices: int = SLICES) -> int:
    """Parts of K, of `slices` warps each, so that strips of 128 columns fill the device once."""
    most = max(1, k_tiles // (slices * _MIN_SLICE))
    return min(max(1, BLOCKS_PER_SM * num_sms * PRODUCT_WARPS // (strips * slices)), most)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = H(H(x * suh) What) * svh + bias, with fp16 rotated inputs and float32 sums.

    x        (T, k) float32, float16 or bfloat16; T may be 0
    trellis  int16 (k/16, n/16, 16 K); suh float16 (k,); svh float16 (n,); bias (n,) of x's dtypes
    returns  (T, n) of x's dtype, new, rounded once

    All tensors contiguous on one CUDA device with shapes that the caller checked. Runs on torch's
    current stream without synchronising; can be captured in a CUDA graph.
    """
    y = x.new_empty((x.shape[0], svh.shape[0]))
    sms = num_multiprocessors(x.device)
    for start in range(0, x.shape[0], MAX_ROWS):
        part = slice(start, start + MAX_ROWS)
        plan = plan_linear(len(x[part]), x.shape[1], svh.shape[0], sms)
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=x.device)
        run_linear(plan, workspace, x[part], trellis, suh, svh, codebook, bias, y[part])
    return y


def run_linear(
    plan: LinearPlan,
    workspace: torch.Tensor,
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """The launches of one plan, on the device of x, which is that of all tensors.

    workspace is uint8 of plan.workspace_bytes, aligned to 256; y (rows, n) is written; the rest as
    in `linear`.
    """
    rows, k, n = plan.rows, plan.k, plan.n
    rotated, firsts = workspace, workspace[plan.firsts_offset :]
    partial = workspace[plan.partial_offset :]
    groups, bits2 = plan.groups, double_bits(trellis)
    spec = product_spec(bits2, check_codebook(codebook), groups)
    dtype = DTYPE_CODES[x.dtype]
    get_kernel(ROTATE, x.device).launch(
        (rows, -(-k // (_WARPS * HADAMARD_BLOCK))),
        32 * _WARPS,
        (x, suh, rotated, firsts, rows, k, dtype),
        overlaps=True,
    )
    get_kernel(spec, x.device).launch(
        (plan.splits, n // (TILE * SHAPES[groups]), -(-rows // (8 * groups))),
        32 * PRODUCT_WARPS,
        (trellis, rotated, partial, rows, k, n),
        shared_bytes=max(product_shared_bytes(bits2, groups)),
        overlaps=True,
    )
    get_kernel(FINISH, x.device).launch(
        (rows, -(-n // (_WARPS * HADAMARD_BLOCK))),
        32 * _WARPS,
        (
            partial, firsts, svh, bias, y, rows, k, n, plan.splits, codebook_code(codebook), dtype,
            DTYPE_CODES[y.dtype if bias is None else bias.dtype],
        ),
        overlaps=True,
    )  # fmt: skip

"""CPU prefill in bf16: panels of an EXL3 matrix are decoded to bf16, and oneDNN multiplies them.

For bfloat16 activations where the machine multiplies bf16 itself (AMX, AVX-512-BF16), several times
as fast as float32. The rotated input, the weights and the product before its output rotation are
rounded to bf16, sums are float32: docs/numerics.md has what that costs.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from exl3kit.format.spec import HADAMARD_BLOCK
from exl3kit.jit.cpu import ISA_NAMES, cpu_isa
from exl3kit.kernels import expert_loop
from exl3kit.kernels.cuda_moe import MoeWeights
from exl3kit.kernels.launch import (
    DTYPE_CODES,
    arguments_struct,
    codebook_code,
    double_bits,
    missing_expert,
    pointer,
    require_library,
)

# Rows, or mean rows of an expert, from which a panel is decoded for the library: where the fused
# kernel changes its own way too (kPanelFrom of kernels/cpu/tier.h). No machine has measured it.
MIN_ROWS = 32
# Of a panel, for each thread: what the second-level cache of a core with AMX holds.
PANEL_BYTES = 2 << 20

# Mirrors of the structs in kernels/cpu/exl3_cpu.h.
_RotateArgs = arguments_struct(
    "_RotateArgs", ("x", "suh", "out"), ("dtype", "tokens", "k", "isa", "threads")
)
_DecodeArgs = arguments_struct(
    "_DecodeArgs",
    ("trellis", "panel"),
    ("k", "n", "first", "columns", "bits2", "codebook", "isa", "threads"),
)
_FinishArgs = arguments_struct(
    "_FinishArgs",
    ("product", "y", "svh", "bias"),
    ("dtype", "bias_dtype", "tokens", "n", "first", "columns", "isa", "threads"),
)


@functools.cache
def has_bfloat_units() -> bool:
    """Whether this machine and torch multiply bf16 in hardware; not with a tier below AVX-512."""
    if cpu_isa() < ISA_NAMES.index("avx512") or not torch.backends.mkldnn.is_available():
        return False
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def suits(x: torch.Tensor, rows: float) -> bool:
    """Whether this path serves activations x of which a matrix multiplies `rows`."""
    return x.dtype == torch.bfloat16 and rows >= MIN_ROWS and has_bfloat_units()


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    bias: torch.Tensor | None = None,
    *,
    isa: int | None = None,
) -> torch.Tensor:
    """`kernels.linear.linear` with bf16 products on torch's threads; same arguments and result."""
    (rows, k), n = x.shape, svh.shape[0]
    y = x.new_empty((rows, n))
    if rows == 0:
        return y
    tier = cpu_isa() if isa is None else isa
    rotated = rotate(x, suh, tier)
    columns = panel_columns(k, n, torch.get_num_threads())
    buffer = torch.empty((columns, k), dtype=torch.bfloat16)
    for first in range(0, n, columns):
        panel = buffer[: min(columns, n - first)]
        decode(trellis, codebook, first, panel, tier)
        finish(torch.mm(rotated, panel.T), first, svh, bias, y, tier)
    return y


def decode(trellis: torch.Tensor, codebook: str, first: int, panel: torch.Tensor, isa: int) -> None:
    """panel[j, i] = What[row of i, first + j], to nearest even.

    trellis int16 (k/16, n/16, 16 K); panel bfloat16 (columns, k), contiguous; first and columns are
    multiples of 128. Within 16 rows i = 4 l + w is row 2 l + w % 2 + 8 (w // 2), as tiles store it.
    """
    columns, k = panel.shape
    _call(
        "exl3_decode_bfloat",
        _DecodeArgs(
            trellis=pointer(trellis), panel=pointer(panel), k=k, n=16 * trellis.shape[1],
            first=first, columns=columns, bits2=double_bits(trellis),
            codebook=codebook_code(codebook), isa=isa, threads=torch.get_num_threads(),
        ),
    )  # fmt: skip


def rotate(x: torch.Tensor, suh: torch.Tensor, isa: int) -> torch.Tensor:
    """H(x * suh) as bfloat16 (rows, k), in the order of a panel."""
    rows, k = x.shape
    out = torch.empty((rows, k), dtype=torch.bfloat16)
    _call(
        "exl3_rotate_bfloat",
        _RotateArgs(
            x=pointer(x), suh=pointer(suh), out=pointer(out), dtype=DTYPE_CODES[x.dtype],
            tokens=rows, k=k, isa=isa, threads=torch.get_num_threads(),
        ),
    )  # fmt: skip
    return out


def finish(
    product: torch.Tensor,
    first: int,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    isa: int,
) -> None:
    """y[:, first : first + columns] = H(product) * svh + bias, rounded once."""
    rows, columns = product.shape
    _call(
        "exl3_finish_bfloat",
        _FinishArgs(
            product=pointer(product), y=pointer(y), svh=pointer(svh), bias=pointer(bias),
            dtype=DTYPE_CODES[y.dtype], bias_dtype=0 if bias is None else DTYPE_CODES[bias.dtype],
            tokens=rows, n=y.shape[1], first=first, columns=columns, isa=isa,
            threads=torch.get_num_threads(),
        ),
    )  # fmt: skip


def _call(entry: str, arguments: ctypes.Structure) -> None:
    getattr(require_library(), entry)(ctypes.byref(arguments))


def panel_columns(k: int, n: int, threads: int) -> int:
    """Columns of a panel, a multiple of 128; all but the last have as many."""
    fitting = PANEL_BYTES * threads // (2 * k * HADAMARD_BLOCK)
    return min(n, HADAMARD_BLOCK * max(1, fitting))


def moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: MoeWeights,
    codebook: str,
    expert_map: torch.Tensor | None = None,
    *,
    isa: int | None = None,
) -> torch.Tensor:
    """`kernels.moe.moe` with bf16 products; same arguments, result and errors."""
    experts = weights.w2_suh.shape[0]
    local = expert_loop.local_experts(topk_weights, topk_ids, experts, expert_map)
    if expert_map is not None and bool((local >= experts).any()):
        raise missing_expert(expert_map, experts)
    product = functools.partial(linear, isa=isa)
    return expert_loop.moe(x, topk_weights, local, weights, codebook, product)

"""Launch of the fused decode and product of one EXL3 linear on the CPU."""

from __future__ import annotations

import ctypes

import torch

from exl3kit.jit.cpu import cpu_isa
from exl3kit.kernels.launch import (
    DTYPE_CODES,
    alloc_floats,
    arguments_struct,
    codebook_code,
    double_bits,
    pointer,
    require_library,
)

_POINTERS = ("x", "y", "trellis", "suh", "svh", "bias", "workspace")
_NUMBERS = ("dtype", "bias_dtype", "tokens", "k", "n", "bits2", "codebook", "isa", "threads")


# Mirror of LinearArgs in kernels/cpu/exl3_cpu.h.
_LinearArgs = arguments_struct("_LinearArgs", _POINTERS, _NUMBERS)


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    bias: torch.Tensor | None = None,
    *,
    isa: int | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """y = H(H(x * suh) What) * svh + bias in float32, rounded once to x's dtype.

    x        (T, k) float32, float16 or bfloat16
    trellis  int16 (k/16, n/16, 16 K); suh float16 (k,); svh float16 (n,); bias (n,) of x's dtypes
    isa      tier, an index into jit.cpu.ISA_NAMES; None takes cpu_isa()
    threads  None takes torch.get_num_threads(); the result does not depend on it
    returns  (T, n), new

    All tensors contiguous on the CPU with shapes that the caller checked.
    """
    library = require_library()
    tokens, k = x.shape
    n = svh.shape[0]
    y = x.new_empty((tokens, n))
    if tokens == 0:
        return y
    threads = torch.get_num_threads() if threads is None else threads
    sizes = (ctypes.c_int64(value) for value in (tokens, k, threads))
    workspace = alloc_floats(library.exl3_linear_workspace(*sizes))
    arguments = _LinearArgs(
        x=pointer(x),
        y=pointer(y),
        trellis=pointer(trellis),
        suh=pointer(suh),
        svh=pointer(svh),
        bias=pointer(bias),
        workspace=pointer(workspace),
        dtype=DTYPE_CODES[x.dtype],
        bias_dtype=0 if bias is None else DTYPE_CODES[bias.dtype],
        tokens=tokens,
        k=k,
        n=n,
        bits2=double_bits(trellis),
        codebook=codebook_code(codebook),
        isa=cpu_isa() if isa is None else isa,
        threads=threads,
    )
    library.exl3_linear(ctypes.byref(arguments))
    return y

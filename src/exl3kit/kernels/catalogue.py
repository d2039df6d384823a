"""Every CUDA kernel there is: what `exl3kit cache build` and the compile tests go through."""

from __future__ import annotations

from exl3kit.jit.spec import KernelSpec
from exl3kit.kernels import cuda_moe, encode_cuda, gemm, row_block


def all_specs() -> tuple[KernelSpec, ...]:
    """The instantiations of all families, each once."""
    return (*encode_cuda.SPECS, *row_block.SPECS, *gemm.SPECS, *cuda_moe.SPECS)

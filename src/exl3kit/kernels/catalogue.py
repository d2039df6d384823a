"""Every CUDA kernel there is: what `exl3kit cache build` and the compile tests go through."""

from __future__ import annotations

from exl3kit.jit.spec import KernelSpec
from exl3kit.kernels import (
    cuda_moe,
    encode_cuda,
    gemm,
    prefill_linear,
    prefill_mma,
    prefill_moe,
    prefill_panel,
    prefill_wgmma,
    row_block,
)


def all_specs() -> tuple[KernelSpec, ...]:
    """The instantiations of all families, each once."""
    families = (
        encode_cuda, row_block, gemm, cuda_moe, prefill_moe, prefill_linear, prefill_mma,
        prefill_wgmma, prefill_panel,
    )  # fmt: skip
    return tuple(spec for family in families for spec in family.SPECS)

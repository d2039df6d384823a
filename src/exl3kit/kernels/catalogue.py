"""Every CUDA kernel there is: what `exl3kit cache build` and the compile tests go through."""

from __future__ import annotations

from exl3kit.jit.spec import KernelSpec
from exl3kit.kernels import encode_cuda


def all_specs() -> tuple[KernelSpec, ...]:
    """The instantiations of all families, each once."""
    return (*encode_cuda.SPECS,)

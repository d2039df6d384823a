"""What every launch needs: codes of dtypes and codebooks, pointers, the tier and the threads."""

from __future__ import annotations

import ctypes

import torch

from exl3kit.errors import UnsupportedError
from exl3kit.format.spec import Codebook, check_codebook
from exl3kit.jit.cpu import cpu_library

# Values of the enums in kernels/cpu/exl3_cpu.h.
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
CODEBOOK_CODES = {Codebook.THREE_INST: 0, Codebook.MCG: 1, Codebook.MUL1: 2}


def codebook_code(codebook: str) -> int:
    """Number of a codebook in the C ABI; FormatError for an unknown name."""
    return CODEBOOK_CODES[check_codebook(codebook)]


def double_bits(trellis: torch.Tensor) -> int:
    """Twice the bits per weight of a trellis (…, 16 K): whole at half rates too."""
    return trellis.shape[-1] // 8


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Address of the first element; None (a null pointer) for no tensor."""
    return None if tensor is None else tensor.data_ptr()


def alloc_floats(count: int) -> torch.Tensor:
    """An uninitialised float32 workspace of `count` elements, freed when the launch returns."""
    return torch.empty(count, dtype=torch.float32)


def require_library() -> ctypes.CDLL:
    """The kernel library; UnsupportedError where no compiler made one (callers choose before)."""
    library = cpu_library()
    if library is None:
        raise UnsupportedError("CPU kernels: expected a C++ compiler, got none; use the reference")
    for name in ("exl3_linear_workspace", "exl3_moe_workspace"):
        getattr(library, name).restype = ctypes.c_int64
    return library

"""Launch of the trellis encoder in kernels/cuda/encode.cuh: the CPU encoder's states on a GPU.

One block encodes one tile at a time, with all 65,536 codebook values in its registers, so a GPU wants as
many tiles a call as it has multiprocessors, or a multiple.
"""

from __future__ import annotations

import functools

import torch

from exl3kit.errors import FormatError
from exl3kit.format.codebook import codebook_values
from exl3kit.format.spec import HALF_BITS, INTEGER_BITS, TILE_SIZE, check_bits, check_codebook
from exl3kit.jit.launch import get_kernel
from exl3kit.jit.spec import KernelSpec, Param

_THREADS = 1024
_POINTERS = (Param.POINTER, Param.POINTER)


def _spec(half_units: int) -> KernelSpec:
    parameters = (*_POINTERS, Param.INT32, *_POINTERS, Param.POINTER)
    return KernelSpec("encode.cuh", "exl3::encode_tiles", (half_units,), parameters)


SPECS = tuple(_spec(int(2 * bits)) for bits in sorted((*INTEGER_BITS, *HALF_BITS)))

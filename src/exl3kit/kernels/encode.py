"""Launch of the trellis encoder in kernels/cpu/encode*.cpp.

Every instruction-set tier returns the same states, bit for bit those of exllamav3 1.6.5 and of
`quantize.viterbi.reference_encode`. Cost: 33.6 million state evaluations a tile at any rate; the
times reached are in benchmarks/results/encode.md.
"""

from __future__ import annotations

import ctypes

import torch

from exl3kit.errors import CompileError, FormatError
from exl3kit.format.codebook import codebook_values
from exl3kit.format.spec import TILE_SIZE, check_bits, check_codebook
from exl3kit.jit.cpu import ISA_NAMES, cpu_isa
from exl3kit.kernels.launch import require_library

HALF_MAX = 65504.0


def check_tiles(tiles: torch.Tensor) -> torch.Tensor:
    """`tiles` as contiguous float32 (n, 256); FormatError unless its values are finite in fp16."""
    if tiles.dim() != 2 or tiles.shape[1] != TILE_SIZE or tiles.dtype != torch.float32:
        raise FormatError(
            f"tiles: expected torch.float32 (n, {TILE_SIZE}), "
            f"got {tiles.dtype} {tuple(tiles.shape)}"
        )
    if tiles.device.type != "cpu":
        raise FormatError(f"tiles: expected a tensor on the CPU, got {tiles.device}")
    # NaN compares false, so it is refused here too.
    if not bool((tiles.abs() <= HALF_MAX).all()):
        raise FormatError(
            f"tiles: expected finite values of magnitude <= {HALF_MAX:.0f}, "
            f"got {tiles.abs().max().item()}"
        )
    return tiles.contiguous()


def encode_tiles(
    tiles: torch.Tensor,
    bits: int | float,
    codebook: str,
    threads: int | None = None,
    isa: int | None = None,
) -> torch.Tensor:
    """States int32 (n, 256) of the cheapest trellis paths through `tiles`.

    tiles: float32 (n, 256) in stream order, already in the codebook's scale; rounded to fp16.
    threads: default torch.get_num_threads(); the result does not depend on it.
    isa: an index into `jit.cpu.ISA_NAMES`, default the one in use.
    Raises FormatError for values fp16 cannot hold and for rates the codebook lacks,
    UnsupportedError where there is no library, CompileError where it lacks the tier.
    """
    name = check_codebook(codebook)
    rate = check_bits(bits, name)
    checked = check_tiles(tiles)
    library = require_library()
    chosen = cpu_isa() if isa is None else isa
    states = torch.empty(checked.shape, dtype=torch.int32)
    failed = library.exl3_encode_tiles(
        ctypes.c_int(chosen),
        ctypes.c_void_p(checked.data_ptr()),
        ctypes.c_int64(len(checked)),
        ctypes.c_int(int(2 * rate)),
        ctypes.c_void_p(codebook_values(name).data_ptr()),
        ctypes.c_void_p(states.data_ptr()),
        ctypes.c_int(threads or torch.get_num_threads()),
    )
    if failed:
        raise CompileError(
            f"trellis encoder: tier {ISA_NAMES[chosen]} is not in this build or not on this machine"
        )
    return states

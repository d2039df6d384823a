"""Launch of the trellis encoder in kernels/cuda/encode.cuh: the CPU encoder's states on a GPU.

A block has all 65,536 codebook values in its registers and takes tiles in pairs, so a GPU wants as
many tiles a call as it has multiprocessors, better twice as many, or a multiple of that.
"""

from __future__ import annotations

import torch

from exl3kit.errors import FormatError, UnsupportedError
from exl3kit.format.codebook import codebook_values
from exl3kit.format.spec import (
    HALF_BITS,
    INTEGER_BITS,
    NUM_STATES,
    TILE_SIZE,
    check_bits,
    check_codebook,
)
from exl3kit.jit.launch import get_kernel
from exl3kit.jit.spec import KernelSpec, Param
from exl3kit.kernels.encode import HALF_MAX

_THREADS = 544  # kEncodeThreads
_STATIC_SHARED = 3328  # of the kernel, rounded up
# tiles, states, their number, values, scratch, refused
_PARAMETERS = (
    Param.POINTER,
    Param.POINTER,
    Param.INT32,
    Param.POINTER,
    Param.POINTER,
    Param.POINTER,
)


def _spec(bits: int | float) -> KernelSpec:
    # 96 registers a thread are all there are for 17 warps. Values pass through memory once, when
    # they are loaded; the loop over positions spills nothing.
    return KernelSpec(
        "encode.cuh", "exl3::encode_tiles", (int(2 * bits),), _PARAMETERS, spill_budget=800
    )


SPECS = tuple(_spec(bits) for bits in sorted((*INTEGER_BITS, *HALF_BITS)))


def row_nodes(bits: int | float) -> int:
    """Nodes of a row of costs, the most there are between two positions."""
    return NUM_STATES >> int(bits)


def kept_rows(bits: int | float) -> int:
    """Rows of costs that are kept in memory for the trace of a tile (kKeptRows)."""
    return TILE_SIZE // (4 if bits <= 1.5 else 2 if bits <= 4 else 1)


def shared_bytes(bits: int | float) -> int:
    """Dynamic shared memory of a block: two rows of fp16 costs."""
    return 2 * 2 * row_nodes(bits)


def _check_shared(bits: int | float, available: int) -> None:
    needed = shared_bytes(bits) + _STATIC_SHARED
    if needed > available:
        raise UnsupportedError(
            f"CUDA encoder at {bits} bits: expected {needed} bytes of shared memory a block, got "
            f"{available}; use 2 bits or more, or the CPU"
        )


class CudaEncoder:
    """The encoder of one rate and codebook on one CUDA device, with its scratch memory."""

    def __init__(self, bits: int | float, codebook: str, device: torch.device) -> None:
        """Takes memory for two tiles a multiprocessor: 0.55 GB at 3 bits, 1.1 GB at 1, on 132."""
        name = check_codebook(codebook)
        self._bits = check_bits(bits, name)
        self._kernel = get_kernel(_spec(self._bits), device)
        self._values = codebook_values(name, device)
        properties = torch.cuda.get_device_properties(device)
        _check_shared(self._bits, properties.shared_memory_per_block_optin)
        self._blocks = properties.multi_processor_count
        scratch = 2 * self._blocks * kept_rows(self._bits) * row_nodes(self._bits)
        self._scratch = torch.empty(scratch, dtype=torch.float16, device=device)
        self._refused = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(self, tiles: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """States int32 (n, 256) for float32 (n, 256), stream order, the codebook's scale.

        out: where to put them, contiguous.

        Does not wait for the GPU; whether a target was not finite in fp16 is `check`'s to say.
        """
        if tiles.dim() != 2 or tiles.shape[1] != TILE_SIZE or tiles.dtype != torch.float32:
            raise FormatError(
                f"tiles: expected torch.float32 (n, {TILE_SIZE}), "
                f"got {tiles.dtype} {tuple(tiles.shape)}"
            )
        if tiles.device != self._values.device:
            raise FormatError(
                f"tiles: expected a tensor on {self._values.device}, got {tiles.device}"
            )
        given = tiles.contiguous()
        states = torch.empty_like(given, dtype=torch.int32) if out is None else out
        if len(given):
            self._kernel.launch(
                min(len(given), self._blocks),
                _THREADS,
                (given, states, len(given), self._values, self._scratch, self._refused),
                shared_bytes=shared_bytes(self._bits),
            )
        return states

    def check(self) -> None:
        """Wait for the GPU; FormatError if any target so far was not finite in fp16."""
        if int(self._refused):
            self._refused.zero_()
            raise FormatError(f"tiles: expected finite values of magnitude <= {HALF_MAX:.0f}")

"""What every launch needs: codes of dtypes and codebooks, pointers, the tier and the threads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from exl3kit.errors import FormatError, UnsupportedError
from exl3kit.format.spec import Codebook, check_codebook
from exl3kit.jit.cpu import cpu_library
from exl3kit.log import get_logger, warn_once

# Values of the enums in kernels/cpu/exl3_cpu.h.
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
CODEBOOK_CODES = {Codebook.THREE_INST: 0, Codebook.MCG: 1, Codebook.MUL1: 2}

_log = get_logger(__name__)


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


def arguments_struct(
    name: str, pointers: Sequence[str], numbers: Sequence[str]
) -> type[ctypes.Structure]:
    """The mirror of a struct in kernels/cpu/exl3_cpu.h: pointers, then int64 numbers."""
    fields = [(field, ctypes.c_void_p) for field in pointers]
    fields += [(field, ctypes.c_int64) for field in numbers]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def missing_expert(expert_map: torch.Tensor, experts: int) -> FormatError:
    """What to raise for a map that names an expert which is not there."""
    return FormatError(
        f"expert_map: expected local ids below {experts} or -1, got {int(expert_map.max())}"
    )


@functools.cache
def require_library() -> ctypes.CDLL:
    """The kernel library, its loops on torch's threads.

    Raises UnsupportedError where no compiler made one: callers choose before.
    """
    library = cpu_library()
    if library is None:
        raise UnsupportedError("CPU kernels: expected a C++ compiler, got none; install g++")
    for name in ("exl3_linear_workspace", "exl3_moe_workspace"):
        getattr(library, name).restype = ctypes.c_int64
    library.exl3_use_team(_team_of_torch())
    return library


def _team_of_torch() -> ctypes.c_void_p:
    """Address of the function that starts the threads of the OpenMP runtime which torch uses.

    A preloaded runtime is in the process's own scope and comes before the one torch brings, for
    torch as for us: two runtimes in a process would be two sets of threads on the same cores.
    """
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        try:
            return ctypes.cast(ctypes.CDLL(library).GOMP_parallel, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
    warn_once(
        _log,
        "no-openmp",
        "CPU kernels: expected a torch with OpenMP, got one without; they run on one thread",
    )
    return ctypes.c_void_p(None)

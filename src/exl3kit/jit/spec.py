"""What one compiled CUDA kernel is: a template of kernels/cuda/*.cuh and its arguments.

One spec is one cubin with one entry point. Specs are plain data: the same spec names the stub that
is compiled, the cache entry, the launch signature and the line in an error message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from exl3kit.errors import UnsupportedError

# What continuous integration compiles for; any device of capability 8.0 or newer works.
ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")


class Param(Enum):
    """Type of one kernel parameter; the value is its size in bytes."""

    POINTER = "pointer", 8
    INT32 = "int32", 4
    INT64 = "int64", 8
    FLOAT32 = "float32", 4

    @property
    def size(self) -> int:
        """Bytes the parameter takes."""
        return self.value[1]


@dataclass(frozen=True)
class KernelSpec:
    """One instantiation of a `__global__` template, or a plain `__global__` function.

    header        file in kernels/cuda that declares the template, "encode.cuh"
    function      qualified name of the template, "exl3::encode_pass"
    template      its arguments: numbers, booleans, or C++ text ("exl3::kMcg"); empty for a function
    parameters    types of the kernel's parameters, in order; checked when it is loaded
    arches        architectures it exists on ("sm_90a"), None for all
    spill_budget  bytes of register spills (stores and loads) a compile may have; a test
    """

    header: str
    function: str
    template: tuple[int | bool | str, ...]
    parameters: tuple[Param, ...]
    arches: frozenset[str] | None = None
    spill_budget: int = 0

    @property
    def expression(self) -> str:
        """The C++ expression that names the instantiation."""
        if not self.template:
            return self.function
        return f"{self.function}<{', '.join(_cxx(value) for value in self.template)}>"

    def is_for(self, arch: str) -> bool:
        """Does the kernel exist on `arch`?"""
        return self.arches is None or arch in self.arches

    def __str__(self) -> str:
        return f"{self.expression} ({self.header})"


def _cxx(value: int | bool | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_arch(arch: str) -> str:
    """`arch` if it looks like a compiler target, "sm_86" or "sm_90a"; else UnsupportedError."""
    if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        raise UnsupportedError(
            f"architecture: expected a target such as {' or '.join(ARCHES)}, got {arch!r}"
        )
    return arch


def arch_of(capability: tuple[int, int]) -> str:
    """Compiler target of a compute capability: (8, 6) -> "sm_86", (9, 0) -> "sm_90a".

    From 9.0 on the architecture-specific target, which the tensor core instructions need.
    UnsupportedError below 8.0: the kernels use bf16 and asynchronous copies.
    """
    major, minor = capability
    if major < 8:
        raise UnsupportedError(
            f"CUDA device: expected compute capability 8.0 or newer, got {major}.{minor}; "
            "use the CPU kernels"
        )
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")

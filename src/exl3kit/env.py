"""Every environment variable exl3kit reads, typed; docs/env.md is the same table for users.

Unset, empty and blank all mean the default. Anything else that is not valid is an error which
names the variable, shows the value and lists what is accepted.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from exl3kit.errors import UnsupportedError

CPU_ISA_CHOICES = ("auto", "portable", "avx2", "avx512", "avx512fp16")


def _read(name: str) -> str | None:
    value = os.environ.get(name, "").strip()
    return value or None


def cache_dir() -> Path:
    """Compiled kernels: EXL3KIT_CACHE_DIR, else XDG_CACHE_HOME/exl3kit, else ~/.cache/exl3kit."""
    if chosen := _read("EXL3KIT_CACHE_DIR"):
        return Path(chosen).expanduser()
    return Path(_read("XDG_CACHE_HOME") or "~/.cache").expanduser() / "exl3kit"


def cpu_isa_request() -> str:
    """EXL3KIT_CPU_ISA: the instruction set of the CPU kernels; `auto` takes the best there is."""
    value = _read("EXL3KIT_CPU_ISA") or "auto"
    if value not in CPU_ISA_CHOICES:
        raise UnsupportedError(
            f"EXL3KIT_CPU_ISA: expected one of {', '.join(CPU_ISA_CHOICES)}, got {value!r}"
        )
    return value


def cxx() -> str | None:
    """The C++ compiler for the CPU kernels: EXL3KIT_CXX, else g++ on PATH, else None.

    A compiler named in EXL3KIT_CXX that does not exist is an error: a named choice is kept.
    """
    if chosen := _read("EXL3KIT_CXX"):
        found = shutil.which(chosen)
        if found is None:
            raise UnsupportedError(
                f"EXL3KIT_CXX: expected a compiler on PATH or an absolute path, got {chosen!r}; "
                "unset it to use g++"
            )
        return found
    return shutil.which("g++")


def _switch(name: str) -> bool:
    value = (_read(name) or "0").lower()
    if value not in ("0", "1"):
        raise UnsupportedError(f"{name}: expected 0 or 1, got {value!r}")
    return value == "1"


def jit_verbose() -> bool:
    """EXL3KIT_JIT_VERBOSE: log every CUDA kernel that is compiled, with time and registers."""
    return _switch("EXL3KIT_JIT_VERBOSE")


def jit_forbid() -> bool:
    """EXL3KIT_JIT_FORBID: a CUDA kernel that the cache lacks is an error, not a compile."""
    return _switch("EXL3KIT_JIT_FORBID")


_ON, _OFF = ("1", "true", "on"), ("0", "false", "off")


def is_prefill_fused() -> bool:
    """VLLM_EXL3_PREFILL_TRELLIS: more than 32 tokens on a GPU run on the fused prefill plans."""
    value = (_read("VLLM_EXL3_PREFILL_TRELLIS") or "1").lower()
    if value not in _ON + _OFF:
        raise UnsupportedError(
            f"VLLM_EXL3_PREFILL_TRELLIS: expected one of {', '.join(_OFF + _ON)}, got {value!r}"
        )
    return value in _ON

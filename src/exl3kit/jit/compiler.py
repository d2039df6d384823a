"""NVRTC through cuda-core: one spec and one architecture -> one cubin. Needs no GPU and no nvcc."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

from exl3kit.errors import CompileError
from exl3kit.jit import source, toolkit
from exl3kit.jit.spec import KernelSpec

# `-lineinfo` costs nothing at run time and lets profilers and the memory checker name lines;
# ptxas -v is where registers and spills are read from. Where there is a driver, NVRTC has a cache
# of its own and answers a repeated compile from it with an empty log: seen on an H200, 13.0.88.
OPTIONS: dict[str, Any] = {
    "std": "c++17",
    "lineinfo": True,
    "ptxas_options": ["-v"],
    "no_cache": True,
}


@dataclass(frozen=True)
class Resources:
    """What one thread and one block of a kernel take, as ptxas reports it."""

    registers: int
    shared_bytes: int  # static; dynamic shared memory is the launch's
    stack_bytes: int
    spill_stores: int  # bytes
    spill_loads: int  # bytes

    @property
    def spill_bytes(self) -> int:
        """Bytes stored to and loaded from spilled registers, by instructions in the code."""
        return self.spill_stores + self.spill_loads


@dataclass(frozen=True)
class Compiled:
    """A cubin, the mangled name of its entry point, and its resources."""

    cubin: bytes
    symbol: str
    resources: Resources


def compile_spec(spec: KernelSpec, arch: str) -> Compiled:
    """Compile `spec` for `arch` ("sm_90a"); CompileError with the compiler's text if that fails."""
    source.closure(spec.header, source.SOURCES)  # refuses what the cache key would not cover
    version, core = toolkit.nvrtc_version(), toolkit.cuda_module("cuda.core")
    folders = [str(source.SOURCES), str(toolkit.header_folder())]
    log = io.StringIO()
    try:
        options = core.ProgramOptions(
            name="exl3kit_stub.cu", arch=arch, include_path=folders, **OPTIONS
        )
        program = core.Program(source.stub(spec), "c++", options)
        code = program.compile("cubin", name_expressions=(spec.expression,), logs=log)
    except Exception as error:  # cuda-core's NVRTCError has no public name
        raise CompileError(
            f"{spec} for {arch}: NVRTC {version} failed, expected a cubin\n{error}"
        ) from error
    symbol = code.symbol_mapping[spec.expression]
    name = symbol.decode() if isinstance(symbol, bytes) else str(symbol)
    return Compiled(bytes(code.code), name, resources_of(log.getvalue()))


def resources_of(log: str) -> Resources:
    """Resources from the output of `ptxas -v` for one kernel; CompileError for any other text."""
    used = re.search(r"Used (\d+) registers", log)
    frame = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    if used is None or frame is None:
        raise CompileError(f"ptxas -v: expected registers and stack frame, got {log!r}")
    shared = re.search(r"(\d+) bytes smem", log)
    return Resources(
        int(used[1]), int(shared[1]) if shared else 0, int(frame[1]), int(frame[2]), int(frame[3])
    )

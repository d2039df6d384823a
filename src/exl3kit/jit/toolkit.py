"""The parts of CUDA that come from wheels: cuda-core, NVRTC, the toolkit's headers.

They are imported at first use, so that everything else works without the `cuda` extra. NVRTC
and headers need no GPU; only a launch loads the driver.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
import threading
from pathlib import Path
from typing import Any

from exl3kit.errors import CompileError

# Headers of the CUDA toolkit the kernels may include; each reads the .hpp beside it.
HEADERS = ("cuda_fp16.h", "cuda_bf16.h")
_INSTALL = "pip install 'exl3kit[cuda]'"
# cuda.core replaces its own __spec__ while it loads, so Python's import lock does not hold back a
# second thread, which then sees half a module.
_importing = threading.Lock()


def cuda_module(name: str) -> Any:
    """A module of the `cuda` namespace ("cuda.core"); CompileError where it is not installed."""
    try:
        with _importing:
            return importlib.import_module(name)
    except ImportError as error:
        raise CompileError(f"CUDA kernels: expected {name}, got {error}; {_INSTALL}") from error


@functools.cache
def nvrtc_version() -> str:
    """Version of the NVRTC library in use, "13.0.88"; CompileError where there is none.

    Two patches of one release make different code, and only what the compiler writes at the head of
    its output tells them apart. 50 ms, most of it for loading the library.
    """
    nvrtc = cuda_module("cuda.bindings.nvrtc")

    def call(function: str, *arguments: object) -> Any:
        status, *results = getattr(nvrtc, function)(*arguments)
        if int(status):
            raise CompileError(f"NVRTC: expected {function} to succeed, got {status.name}")
        return results[0] if results else None

    try:
        program = call("nvrtcCreateProgram", b"", b"empty.cu", 0, [], [])
    except RuntimeError as error:
        raise CompileError(f"CUDA kernels: expected NVRTC, got {error}; {_INSTALL}") from error
    call("nvrtcCompileProgram", program, 0, [])
    ptx = b" " * call("nvrtcGetPTXSize", program)
    call("nvrtcGetPTX", program, ptx)
    call("nvrtcDestroyProgram", program)
    found = re.search(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", ptx)
    if found is None:
        raise CompileError(
            f"NVRTC: expected its version at the head of its output, got {ptx[:200]!r}"
        )
    return found[1].decode()


@functools.cache
def header_folder() -> Path:
    """Folder of cuda_fp16.h: the nvidia-cuda-runtime wheel's, conda's, or CUDA_HOME's."""
    found = cuda_module("cuda.pathfinder").find_nvidia_header_directory("cudart")
    if found is None or not (Path(found) / HEADERS[0]).is_file():
        raise CompileError(
            f"CUDA headers: expected a folder with {HEADERS[0]}, got {found}; {_INSTALL}"
        )
    return Path(found)


@functools.cache
def header_digest() -> str:
    """sha256 over the toolkit headers that kernels may include."""
    digest = hashlib.sha256()
    for name in HEADERS:
        path = header_folder() / name
        digest.update(path.read_bytes() + path.with_suffix(".hpp").read_bytes())
    return digest.hexdigest()

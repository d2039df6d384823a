"""pytest with the CPU kernels built under sanitizers; python and torch stay as they are.

    python -m tests.kernels.sanitizer address|thread [arguments of pytest]

`address` is AddressSanitizer with UndefinedBehaviorSanitizer, `thread` ThreadSanitizer. The first
report ends the run. Builds go to build/, beside nothing that a server would load.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from exl3kit import env

ROOT = Path(__file__).parents[2]
# Without test_process.py, which measures memory that a sanitizer multiplies.
KERNEL_TESTS = [
    f"tests/kernels/test_{name}.py"
    for name in ("bfloat_panel", "decode", "encode", "linear", "moe")
]
FLAGS = {
    "address": "-fsanitize=address,undefined -fno-sanitize-recover=undefined",
    "thread": "-fsanitize=thread",
}
# libstdc++ too: a sanitizer that is loaded before it cannot find the functions it wraps.
RUNTIMES = {
    "address": ("libasan.so", "libubsan.so", "libstdc++.so"),
    "thread": ("libtsan.so", "libstdc++.so"),
}
# Python and torch keep memory until the process ends; torch's OpenMP is not instrumented, so its
# own loops look like races.
OPTIONS = {
    "address": {"ASAN_OPTIONS": "detect_leaks=0"},
    "thread": {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1 halt_on_error=1"},
}


def environment(kind: str) -> dict[str, str]:
    """Variables under which a python process builds and loads sanitized kernels.

    Raises RuntimeError without a compiler or without the sanitizer's libraries.
    """
    compiler = env.cxx()
    if compiler is None:
        raise RuntimeError("C++ compiler: expected g++ on PATH or EXL3KIT_CXX, got none")
    folder = ROOT / "build" / "sanitizer" / kind
    folder.mkdir(parents=True, exist_ok=True)
    wrapper = folder / "g++"
    command = f'exec {shlex.quote(compiler)} "$@" -O1 -g {FLAGS[kind]}'
    wrapper.write_text(f"#!/bin/sh\n{command}\n")
    wrapper.chmod(0o755)
    return os.environ | {
        "EXL3KIT_CXX": str(wrapper),
        "EXL3KIT_CACHE_DIR": str(folder),
        "LD_PRELOAD": " ".join(_runtime(compiler, name) for name in RUNTIMES[kind]),
        **OPTIONS[kind],
    }


def _runtime(compiler: str, name: str) -> str:
    """Path of a library of the compiler, which answers with the bare name when it has none."""
    command = [compiler, f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if path == name:
        raise RuntimeError(f"{name}: expected among the libraries of {compiler}, got none")
    return path


def main() -> int:
    """Run pytest on the kernel tests, or on what the command line names."""
    kind, *arguments = sys.argv[1:]
    # Captured as a whole, stderr would be lost with the report that ends the process.
    command = [sys.executable, "-m", "pytest", "-xq", "--capture=sys", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *(arguments or KERNEL_TESTS)], cwd=ROOT, env=environment(kind)
    ).returncode


if __name__ == "__main__":
    sys.exit(main())

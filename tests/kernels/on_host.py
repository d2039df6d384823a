"""CUDA kernels compiled by g++ and run on host threads, by the programs in cuda_on_host."""

from __future__ import annotations

import subprocess
from pathlib import Path

from exl3kit.jit.source import SOURCES

_HERE = Path(__file__).parent / "cuda_on_host"
# fp16 pairs are read as words, as nvcc allows.
_FLAGS = ("-std=c++20", "-O2", "-pthread", "-w", "-fno-strict-aliasing")
_SECONDS = 500  # a wrong phase of a barrier would wait for ever


def compiled(name: str, folder: Path, **defines: int | str) -> Path:
    """The program `name` of cuda_on_host, made in `folder`."""
    path = folder / name
    macros = [f"-D{key}={value}" for key, value in defines.items()]
    command = ["g++", *_FLAGS, *macros, f"-I{SOURCES}", f"-I{_HERE}"]
    subprocess.run([*command, str(_HERE / f"{name}.cpp"), "-o", str(path)], check=True)
    return path


def output(program: Path, given: bytes) -> bytearray:
    """What the program prints; CalledProcessError if it refuses."""
    run = subprocess.run(
        [program], input=given, stdout=subprocess.PIPE, check=True, timeout=_SECONDS
    )
    return bytearray(run.stdout)

"""The CUDA encoder compiled by g++ and run on host threads, one for each of its 544.

No GPU is needed, so this is what holds the search, the pairing of tiles and the barriers to the CPU
encoder's states where tests/gpu cannot run. The rates take every branch: one and several trace
steps a turn, both kinds of half-rate position, one tile, a pair, a pair and one.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest
import torch

from exl3kit.format.codebook import codebook_values
from exl3kit.jit.source import SOURCES
from exl3kit.kernels.encode import encode_tiles

HERE = Path(__file__).parent / "cuda_on_host"


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "count"), [(1, 1), (3, 3), (3.5, 2)])
def test_states_of_the_cpu(bits: int | float, count: int, tmp_path: Path) -> None:
    program = tmp_path / "encode"
    # fp16 pairs are read as words, as nvcc allows.
    flags = [
        "-std=c++20",
        "-O2",
        "-pthread",
        "-fno-strict-aliasing",
        f"-DHALF_UNITS={int(2 * bits)}",
    ]
    includes = [f"-I{SOURCES}", f"-I{HERE}"]
    command = ["g++", *flags, *includes, str(HERE / "encode.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    tiles = torch.randn(count, 256, generator=torch.Generator().manual_seed(int(2 * bits))) * 1.2
    given = struct.pack("i", count) + tiles.numpy().tobytes()
    given += codebook_values("mul1").numpy().tobytes()
    out = subprocess.run([program], input=given, capture_output=True, check=True).stdout
    states = torch.frombuffer(bytearray(out), dtype=torch.int32).view(count, 256)
    assert torch.equal(states, encode_tiles(tiles, bits, "mul1"))

"""The CUDA encoder compiled by g++ and run on host threads, one for each of its 544.

No GPU is needed, so this is what holds the search, the pairing of tiles and the barriers to the CPU
encoder's states where tests/gpu cannot run. The rates take every branch: one and several trace
steps a turn, both kinds of half-rate position, one tile, a pair, a pair and one.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from exl3kit.format.codebook import codebook_values
from exl3kit.kernels.encode import encode_tiles
from tests.kernels import on_host


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "count"), [(1, 1), (3, 3), (3.5, 2)])
def test_states_of_the_cpu(bits: int | float, count: int, tmp_path: Path) -> None:
    program = on_host.compiled("encode", tmp_path, HALF_UNITS=int(2 * bits))
    tiles = torch.randn(count, 256, generator=torch.Generator().manual_seed(int(2 * bits))) * 1.2
    given = struct.pack("i", count) + tiles.numpy().tobytes()
    given += codebook_values("mul1").numpy().tobytes()
    states = torch.frombuffer(on_host.output(program, given), dtype=torch.int32).view(count, 256)
    assert torch.equal(states, encode_tiles(tiles, bits, "mul1"))

"""The Hopper core of the prefill plan compiled by g++ and run on host threads: no GPU is needed.

What cuda_on_host/hopper.h stands for is PTX's description of the instructions, not the hardware:
registers of a product, the swizzle of a descriptor, phases of a barrier. Held to the format are the
ring and its releases, decoding, the order of rows and features, every size of a block of rows.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest
import torch

from exl3kit.format.decode import decode_inner
from exl3kit.jit.source import SOURCES
from exl3kit.testing.generate import random_exl3

HERE = Path(__file__).parent / "cuda_on_host"
NAMES = {"3inst": "kThreeInst", "mcg": "kMcg", "mul1": "kMul1"}
EXPERTS, K, N = 3, 256, 384  # N: a strip of 256 features and half of one
# Expert, first row, rows: of every number of tokens that a product has, whole blocks and others.
BLOCKS = ((0, 0, 5), (0, 8, 32), (1, 40, 33), (2, 80, 96), (2, 176, 70), (2, 248, 128))
CAPACITY = 376


def panels(x: torch.Tensor) -> torch.Tensor:
    """Rows as prefill_layout.cuh lays them out: panel_offset."""
    rows, k = x.shape
    chunks = x.view(rows, k // 64, 8, 8).transpose(0, 1)
    row = torch.arange(rows)[:, None] % 8
    return chunks[:, torch.arange(rows)[:, None], torch.arange(8) ^ row].contiguous()


@pytest.mark.parametrize(
    ("bits", "codebook", "thread_blocks"),
    [(3, "mcg", 1), (3, "mcg", 5), (2.5, "mul1", 5), (8, "3inst", 1)],
)
def test_product(bits: int | float, codebook: str, thread_blocks: int, tmp_path: Path) -> None:
    """48 stages for one block of threads, six turns of a ring or more; 8 or 12 for each of 5."""
    program = tmp_path / "prefill_wgmma"
    # fp16 pairs are read as words, as nvcc allows.
    flags = ["-std=c++20", "-O2", "-pthread", "-fno-strict-aliasing", "-w"]
    defines = [f"-DBITS2={int(2 * bits)}", f"-DCODEBOOK={NAMES[codebook]}"]
    command = ["g++", *flags, *defines, f"-I{SOURCES}", f"-I{HERE}"]
    subprocess.run([*command, str(HERE / "prefill_wgmma.cpp"), "-o", str(program)], check=True)

    weights = [random_exl3(K, N, bits, codebook, seed) for seed in range(EXPERTS)]
    x = torch.randn(CAPACITY, K, generator=torch.Generator().manual_seed(1)).half()
    sizes = (len(BLOCKS), CAPACITY, K, N, EXPERTS, thread_blocks)
    blocks = b"".join(struct.pack("4i", *block, 0) for block in BLOCKS)
    trellis = torch.stack([w.trellis for w in weights])
    given = struct.pack("6i", *sizes) + blocks + trellis.numpy().tobytes()
    given += panels(x).numpy().tobytes()
    # A wrong phase or release would wait for ever.
    out = subprocess.run([program], input=given, capture_output=True, check=True, timeout=300)
    y = torch.frombuffer(bytearray(out.stdout), dtype=torch.float16).view(CAPACITY, N)

    stored = torch.zeros(CAPACITY, dtype=torch.bool)
    for expert, first, count in BLOCKS:
        rows = slice(first, first + count)
        stored[rows] = True
        expected = x[rows].double() @ decode_inner(weights[expert].trellis, codebook).double()
        error = (y[rows].double() - expected).abs()
        assert (error <= 2**-11 * expected.abs() + 1e-5 * expected.square().mean().sqrt()).all()
    assert y[~stored].isnan().all()

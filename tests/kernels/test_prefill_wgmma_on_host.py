"""The Hopper core of the prefill plan compiled by g++ and run on host threads: no GPU is needed.

What cuda_on_host/hopper.h stands for is PTX's description of the instructions, not the hardware:
registers of a product, the swizzle of a descriptor, phases of a barrier. Held to the format are the
ring and its releases, decoding, the order of rows and features, every size of a block of rows.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from exl3kit.format.decode import decode_inner
from exl3kit.format.spec import Codebook
from exl3kit.kernels.gemm import CODEBOOK_NAMES
from exl3kit.testing.generate import random_exl3
from tests.kernels import on_host

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
    [
        (3, Codebook.MCG, 1),
        (3, Codebook.MCG, 5),
        (2.5, Codebook.MUL1, 5),
        (8, Codebook.THREE_INST, 1),
    ],
)
def test_product(bits: int | float, codebook: Codebook, thread_blocks: int, tmp_path: Path) -> None:
    """48 stages for one block of threads, six turns of a ring or more; 8 or 12 for each of 5."""
    names = {"BITS2": int(2 * bits), "CODEBOOK": CODEBOOK_NAMES[codebook]}
    program = on_host.compiled("prefill_wgmma", tmp_path, **names)
    weights = [random_exl3(K, N, bits, codebook, seed) for seed in range(EXPERTS)]
    x = torch.randn(CAPACITY, K, generator=torch.Generator().manual_seed(1)).half()
    sizes = (len(BLOCKS), CAPACITY, K, N, EXPERTS, thread_blocks)
    blocks = b"".join(struct.pack("4i", *block, 0) for block in BLOCKS)
    trellis = torch.stack([w.trellis for w in weights])
    given = struct.pack("6i", *sizes) + blocks + trellis.numpy().tobytes()
    given += panels(x).numpy().tobytes()
    y = torch.frombuffer(on_host.output(program, given), dtype=torch.float16).view(CAPACITY, N)

    stored = torch.zeros(CAPACITY, dtype=torch.bool)
    for expert, first, count in BLOCKS:
        rows = slice(first, first + count)
        stored[rows] = True
        expected = x[rows].double() @ decode_inner(weights[expert].trellis, codebook).double()
        error = (y[rows].double() - expected).abs()
        assert (error <= 2**-11 * expected.abs() + 1e-5 * expected.square().mean().sqrt()).all()
    assert y[~stored].isnan().all()

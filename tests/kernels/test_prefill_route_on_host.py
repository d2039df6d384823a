"""The routing of the prefill plan compiled by g++ and run on host threads: no GPU is needed."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from exl3kit.runtime.reference import local_expert_ids
from tests.kernels import on_host

HOSTILE = (-1, -(1 << 62), 1 << 40, 7)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, compiled once."""
    return on_host.compiled("prefill_route", tmp_path_factory.mktemp("route"))


def random_ids(routes: int, experts: int, seed: int) -> torch.Tensor:
    """Ids of all experts but the second, a few of them hostile."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, experts, (routes,), generator=random)
    ids[ids == 1] = 0
    ids[::11] = HOSTILE[seed % len(HOSTILE)]
    return ids


@pytest.mark.parametrize("has_map", [False, True])
@pytest.mark.parametrize(
    ("routes", "experts", "block_rows"),
    [(1, 1, 64), (31, 5, 64), (97, 3, 8), (333, 6, 64), (650, 2, 128)],
)
def test_rows_and_blocks(
    program: Path, routes: int, experts: int, block_rows: int, has_map: bool
) -> None:
    """Experts in order, their routes in order, each from a multiple of 8; blocks of even size."""
    ids = random_ids(routes, experts, routes)
    weights = torch.rand(routes)
    weights[5::17] = 0
    table = torch.tensor([2, -1, experts, 0, 1, -7][:experts], dtype=torch.int32)
    sizes = struct.pack("4i", routes, experts, block_rows, len(table) if has_map else 0)
    given = sizes + ids.numpy().tobytes() + weights.numpy().tobytes()
    given += table.numpy().tobytes() if has_map else b""
    found = torch.frombuffer(on_host.output(program, given), dtype=torch.int32)
    expert, row, counts, (num_blocks,), blocks = found.split(
        [routes, routes, experts, 1, len(found) - 2 * routes - experts - 1]
    )

    mapped = table.where(table < experts, -1) if has_map else None
    expected = local_expert_ids(weights[None], ids[None], experts, mapped)[0]
    assert torch.equal(expert.long(), expected)
    first, wanted = 0, []
    for e in range(experts):
        own = (expected == e).nonzero().flatten()
        assert counts[e] == len(own)
        assert torch.equal(row[own].long(), first + torch.arange(len(own)))
        parts = -(-len(own) // block_rows)
        size = (len(own) + 8 * parts - 1) // (8 * parts) * 8 if parts else 0
        wanted += [(e, first + p * size, min(size, len(own) - p * size), 0) for p in range(parts)]
        first += -(-len(own) // 8) * 8
    assert [tuple(block) for block in blocks.view(-1, 4).tolist()] == wanted
    assert num_blocks == len(wanted) and (row[expected < 0] == -1).all()

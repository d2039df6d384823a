"""The planner's arena against the published table for GLM-5.2 at TP4."""

from __future__ import annotations

import pytest

from exl3kit.runtime.arena import MoeShape, arena_bytes, arena_items

GLM_52_TP4 = MoeShape(hidden_size=6144, slice_size=512, num_experts=256, top_k=8)
TABLE = [
    (32, 8, 188, "33.51"),
    (32, 8, 132, "26.51"),
    (64, 8, 188, "43.52"),
    (256, 64, 188, "174.08"),
    (1024, 64, 188, "414.10"),
    (2048, 64, 188, "734.13"),
    (3072, 64, 188, "1054.16"),
    (3072, 64, 132, "1026.16"),
    (4096, 64, 188, "1374.19"),
    (8192, 64, 188, "2654.32"),
]


@pytest.mark.parametrize("capacity, block, sms, mib", TABLE)
def test_published_sizes(capacity: int, block: int, sms: int, mib: str) -> None:
    assert f"{arena_bytes(GLM_52_TP4, capacity, block, sms) / 2**20:.2f}" == mib


def test_every_view_is_aligned() -> None:
    items = arena_items(MoeShape(256, 128, 5, 3), 7, 16, 3)
    assert all(size > 0 and size % 256 == 0 for size in items.values())


def test_three_buffers_of_a_row_each_route_are_most_of_it() -> None:
    items = arena_items(GLM_52_TP4, 3072, 64, 188)
    rows = [items[n] for n in ("fc1 output, fc2 rows", "rotated input, gate", "rotated input, up")]
    assert rows == [2 * 3072 * 8 * 6144] * 3
    assert sum(rows) > 0.8 * sum(items.values())


def test_few_tokens_keep_a_block_for_each_route() -> None:
    """One token of eight routes has fewer routes than experts: its slots are 8 blocks."""
    items = arena_items(GLM_52_TP4, 1, 8, 10_000)
    assert items["packed routes"] == 8 * 8 * 4
    assert items["fc2 partial sums"] == 2 * 6144 * 64 * 4  # doubled for blocks of 8

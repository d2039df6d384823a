"""Plans of the CUDA kernels: pure functions of shapes, no GPU needed."""

from __future__ import annotations

import pytest

from exl3kit.errors import FormatError
from exl3kit.kernels import cuda_moe, gemm

SMALL_SHARED = 99 * 1024  # bytes a block may have on capability 8.6, 8.9 and 12.0


@pytest.mark.parametrize("rows", range(1, 33))
def test_splits_do_not_depend_on_the_rows(rows: int) -> None:
    plan = gemm.plan_linear(rows, 6144, 12288, 132)
    assert plan.splits == 4, "384 blocks, three for each of 132 multiprocessors but a few"
    assert 8 * plan.groups >= rows


@pytest.mark.parametrize(("k", "n"), [(128, 128), (128, 1 << 18), (1 << 16, 128), (6144, 2048)])
def test_splits_are_possible(k: int, n: int) -> None:
    splits = gemm.plan_linear(1, k, n, 132).splits
    assert splits >= 1 and (splits == 1 or k // 16 >= 2 * 8 * splits)


def test_workspace_views_do_not_overlap() -> None:
    plan = gemm.plan_linear(5, 384, 640, 132)
    assert plan.firsts_offset == 4 * 5 * 384
    assert plan.partial_offset >= plan.firsts_offset + 4 * 5 * 3
    assert plan.partial_offset % 256 == 0
    assert plan.workspace_bytes == plan.partial_offset + 4 * plan.splits * 5 * 640


def test_every_rate_fits_the_smallest_shared_memory() -> None:
    for bits2, _ in gemm.RATES:
        for groups in gemm.SHAPES:
            assert max(gemm.product_shared_bytes(bits2, groups)) <= SMALL_SHARED
        assert sum(gemm.product_shared_bytes(bits2, 1)) <= SMALL_SHARED


def test_moe_plan_of_glm52_on_four_ranks() -> None:
    plan = cuda_moe.plan_moe(32, 8, 6144, 512, 132)
    assert (plan.splits13, plan.splits2) == (6, 1)
    assert plan.items()["rotated"] == 2 * 32 * 8 * 6144 * 4
    assert all(start % 256 == 0 for start in plan.offsets.values())
    assert plan.scratch_bytes == sum(-(-size // 256) * 256 for size in plan.items().values())
    assert round(plan.scratch_bytes / 2**20, 1) == 24.6
    assert cuda_moe.plan_moe(32, 8, 6144, 512, 132) == plan
    for suh_rows, rows in ((1, 1), (4, 4), (16, 8)):
        shared = cuda_moe.plan_moe(32, 8, 6144, 512, 132, suh_rows)
        assert shared.items()["rotated"] == 2 * 32 * rows * 6144 * 4


def test_capacity_changes_no_split() -> None:
    plans = [cuda_moe.plan_moe(tokens, 8, 6144, 512, 132) for tokens in (1, 8, 32)]
    assert len({(plan.splits13, plan.splits2) for plan in plans}) == 1


def test_blocks_that_run_at_once() -> None:
    assert cuda_moe.resident_blocks(80, 132) == 3 * 132
    assert cuda_moe.resident_blocks(117, 132) == 2 * 132


def test_too_many_routes() -> None:
    with pytest.raises(FormatError, match="1 to 4096 routes, got 513 tokens of 8"):
        cuda_moe.plan_moe(513, 8, 256, 128, 132)

"""Plans of the prefill kernels and what chooses them: pure functions, no GPU needed."""

from __future__ import annotations

import pytest

from exl3kit import env
from exl3kit.errors import FormatError, UnsupportedError
from exl3kit.kernels import heuristics, prefill_linear, prefill_mma, prefill_moe, prefill_wgmma

SMALL_SHARED = 99 * 1024  # bytes a block may have on capability 8.6, 8.9 and 12.0
HOPPER_SHARED = 227 * 1024
CORE = prefill_mma.CORE


def test_plan_of_glm52_on_four_ranks() -> None:
    """A row each route once, where three buffers of that size make 1026 MiB at 3072 tokens."""
    plan = prefill_moe.plan_prefill(3072, 8, 256, 6144, 512, 64)
    assert all(start % 256 == 0 for start in plan.offsets.values())
    assert plan.scratch_bytes == sum(-(-size // 256) * 256 for size in plan.items().values())
    assert round(plan.scratch_bytes / 2**20) == 386
    assert prefill_moe.plan_prefill(3072, 8, 256, 6144, 512, 64) is plan


@pytest.mark.parametrize("block_rows", [64, 128])
@pytest.mark.parametrize("counts", [[1] * 9, [64] * 3, [65, 1, 129], [600], [8, 0, 127, 128]])
def test_rows_and_blocks_fit_whatever_the_routes(counts: list[int], block_rows: int) -> None:
    """The bounds against a count of what prefill_place makes."""
    plan = prefill_moe.plan_prefill(sum(counts), 1, len(counts), 256, 128, block_rows)
    assert sum(-(-count // 8) * 8 for count in counts) <= plan.rows
    blocks = sum(-(-count // block_rows) for count in counts)
    assert blocks <= plan.max_blocks(sum(counts))
    for count in filter(None, counts):
        parts = -(-count // block_rows)
        rows = (count + 8 * parts - 1) // (8 * parts) * 8
        assert rows <= block_rows and (parts - 1) * rows < count <= parts * rows


def test_rows_beyond_32_bits_are_refused() -> None:
    with pytest.raises(FormatError, match="got 300000000 tokens of 8"):
        prefill_moe.plan_prefill(300_000_000, 8, 256, 256, 128, 64)


def test_every_rate_fits_the_smallest_shared_memory() -> None:
    assert all(prefill_mma.shared_bytes(bits2) <= SMALL_SHARED for bits2 in (2, 3, 6, 12, 16))


def test_every_rate_fits_the_shared_memory_of_hopper() -> None:
    assert all(prefill_wgmma.shared_bytes(bits2) <= HOPPER_SHARED for bits2 in (2, 3, 6, 12, 16))


@pytest.mark.parametrize("rows", [33, 64, 200, 1024])
@pytest.mark.parametrize(("k", "n"), [(128, 128), (6144, 12288), (2304, 640), (1 << 16, 128)])
def test_splits_are_possible(k: int, n: int, rows: int) -> None:
    plan = prefill_linear.plan_fused(rows, k, n, CORE, 132)
    assert k % (128 * plan.splits) == 0
    assert plan.split_rows % 8 == 0 and plan.split_rows >= rows
    assert plan.offsets["end"] == sum(-(-size // 256) * 256 for size in plan.items().values())


def test_few_blocks_get_splits_and_many_do_not() -> None:
    splits = [prefill_linear.plan_fused(m, 6144, 12288, CORE, 132).splits for m in (64, 4096)]
    assert splits[0] > 1 and splits[1] == 1


def test_decode_tokens() -> None:
    assert heuristics.decode_tokens(8, 256) == 128, "GLM-5.2: four routes for each expert"
    assert heuristics.decode_tokens(2, 8) == heuristics.DECODE_TOKENS == 32


@pytest.mark.parametrize(
    ("value", "expected"), [(None, True), (" ", True), ("1", True), ("On", True), ("false", False)]
)
def test_switch(value: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "VLLM_EXL3_PREFILL_TRELLIS"
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    assert env.is_prefill_fused() is expected


def test_switch_refuses_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_PREFILL_TRELLIS", "yes")
    with pytest.raises(UnsupportedError, match=r"PREFILL_TRELLIS: expected one of.*'yes'"):
        env.is_prefill_fused()

from __future__ import annotations

import pytest

from exl3kit.checkpoint.widths import check_cut
from exl3kit.errors import SliceError
from exl3kit.slicing.axes import check_range, rank_range


def test_ranks_cover_the_width_in_order() -> None:
    parts = [rank_range("moe_intermediate_size", 1536, 4, rank) for rank in range(4)]
    assert [channel for part in parts for channel in part] == list(range(1536))


def test_cut_that_is_no_multiple_of_128_lists_what_works() -> None:
    with pytest.raises(SliceError) as error:
        rank_range("moe_intermediate_size", 768, 4, 0)
    assert "192" in str(error.value) and "1, 2, 3, 6" in str(error.value)


def test_width_that_no_tp_cuts() -> None:
    with pytest.raises(SliceError, match="none, 2880 itself"):
        rank_range("moe_intermediate_size", 2880, 1, 0)


def test_no_ranks() -> None:
    with pytest.raises(SliceError, match="tp: expected at least 1, got 0"):
        check_cut("x", 512, 0)


@pytest.mark.parametrize("rank", [-1, 4])
def test_rank_outside_the_group(rank: int) -> None:
    with pytest.raises(SliceError, match=rf"0\.\.3, got {rank}"):
        rank_range("x", 512, 4, rank)


@pytest.mark.parametrize(
    "channels",
    [range(64, 192), range(0, 200), range(0, 0), range(128, 512), range(-128, 0), range(0, 256, 2)],
)
def test_boundaries_inside_a_hadamard_block(channels: range) -> None:
    with pytest.raises(SliceError, match="multiples of 128"):
        check_range("gate_proj", channels, 384)

"""Which part of a linear a tensor-parallel rank owns, and whether the format allows that cut.

The Hadamard transform works on aligned blocks of 128 and a trellis tile on 16 x 16, so a boundary
at a multiple of 128 crosses neither and the cut is exact; any other one is impossible without
quantising again.
"""

from __future__ import annotations

from exl3kit.checkpoint.widths import check_cut
from exl3kit.errors import SliceError
from exl3kit.format.spec import HADAMARD_BLOCK


def rank_range(name: str, width: int, tp: int, rank: int) -> range:
    """Channels of `width` that `rank` of `tp` owns, all ranks equally many.

    SliceError names the dimension and the tp values that work if the parts are no multiples of 128.
    """
    if not 0 <= rank < tp:
        raise SliceError(f"{name}: rank must be 0..{tp - 1}, got {rank}")
    part = check_cut(name, width, tp)
    return range(rank * part, (rank + 1) * part)


def check_range(name: str, channels: range, width: int) -> None:
    """SliceError unless `channels` is a non-empty part of `width` between multiples of 128."""
    start, stop = channels.start, channels.stop
    is_legal = channels.step == 1 and 0 <= start < stop <= width
    if not is_legal or start % HADAMARD_BLOCK or stop % HADAMARD_BLOCK:
        raise SliceError(
            f"{name}: a cut of {width} must run between multiples of {HADAMARD_BLOCK}, "
            f"got {start} to {stop}"
        )

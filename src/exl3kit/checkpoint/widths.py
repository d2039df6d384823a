"""Which widths a tensor-parallel cut may have: whole 128-element Hadamard blocks.

A file holds an expert whose width is no multiple of 128 with zeros at its end: 320 as 384. Cut for
three ranks, the slice of the last one ends in those zeros.
"""

from __future__ import annotations

from exl3kit.errors import SliceError
from exl3kit.format.spec import HADAMARD_BLOCK


def padded(width: int) -> int:
    """`width` rounded up to whole blocks, as EXL3 files store it."""
    return -(-width // HADAMARD_BLOCK) * HADAMARD_BLOCK


def valid_tp(width: int, limit: int = 16) -> tuple[int, ...]:
    """Every tp up to `limit` that cuts `width` into multiples of 128."""
    return tuple(tp for tp in range(1, limit + 1) if width % (tp * HADAMARD_BLOCK) == 0)


def check_cut(name: str, width: int, tp: int) -> int:
    """`width` / tp; if that is not a multiple of 128, SliceError with the tp values that work."""
    if tp < 1:
        raise SliceError(f"tp: expected at least 1, got {tp}")
    if width % (tp * HADAMARD_BLOCK):
        works = ", ".join(map(str, valid_tp(width))) or f"none, {width} itself is not a multiple"
        raise SliceError(
            f"{name} {width} / tp {tp} = {width / tp:g} must be a multiple of {HADAMARD_BLOCK}; "
            f"tp values that work: {works}"
        )
    return width // tp


def stored_cut(name: str, width: int, tp: int) -> int:
    """Width of one of `tp` slices of what a file stores of `width`: of `padded(width)`.

    SliceError as in `check_cut`.
    """
    stored = padded(width)
    return check_cut(name if stored == width else f"{name} {width}, padded to", stored, tp)

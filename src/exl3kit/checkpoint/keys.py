"""Typed reads of untrusted JSON keys: each error names the key, the value and what was expected."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from exl3kit.checkpoint.jsonfile import is_int
from exl3kit.errors import CheckpointError

# Bounds that keep a hostile config from asking for memory by a number.
MAX_COUNT = 4096  # experts, ranks, layers; the largest known is 512
MAX_SIZE = 2**31 - 1  # elements of one dimension
_SHOWN = 8


def show(value: object) -> str:
    """`value` for an error message, cut to a length a terminal can take."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def some(names: Sequence[str], total: int | None = None) -> str:
    """The first few of `names`, and how many there are in all if that is more."""
    total = len(names) if total is None else total
    shown = ", ".join(names[:_SHOWN])
    return shown if total <= _SHOWN else f"{shown}, ... ({total} in all)"


def integer(block: Mapping[str, Any], key: str, where: str, most: int = MAX_COUNT) -> int:
    """block[key] as an int of 1..`most`; booleans, floats and numeric strings are refused."""
    value = block.get(key)
    if not is_int(value) or not 1 <= value <= most:
        raise CheckpointError(f"{where}: {key} must be an integer 1..{most}, got {show(value)}")
    return value


def text(block: Mapping[str, Any], key: str, where: str) -> str:
    """block[key] as a str."""
    value = block.get(key)
    if not isinstance(value, str):
        raise CheckpointError(f"{where}: {key} must be a string, got {show(value)}")
    return value


def integral(value: object) -> int | None:
    """`value` as an int where JSON says an integer or an integral finite float (3.0), else None."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return value if is_int(value) else None

"""Reads of config.json keys that may be absent: sizes with a default, counts from 0, flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exl3kit.checkpoint.jsonfile import is_int
from exl3kit.checkpoint.keys import MAX_COUNT, MAX_SIZE, integer, show
from exl3kit.errors import CheckpointError

WHERE = "config.json"


def size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A dimension, 1..2**31 - 1; `default` stands for an absent or null key."""
    value = config.get(key)
    if value is None and default is not None:
        value = default
    return integer({key: value}, key, WHERE, MAX_SIZE)


def optional_size(config: Mapping[str, Any], key: str) -> int | None:
    """A dimension, or None where the key is absent or null."""
    return None if config.get(key) is None else size(config, key)


def count(config: Mapping[str, Any], key: str, default: int = 0) -> int:
    """A number of layers, experts or ranks, 0..4096; `default` where absent, 0 where null."""
    value = config.get(key, default)
    if value is None:
        return 0
    if not is_int(value) or not 0 <= value <= MAX_COUNT:
        raise CheckpointError(
            f"{WHERE}: {key} must be an integer 0..{MAX_COUNT}, got {show(value)}"
        )
    return value


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """A boolean; `default` where absent or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"{WHERE}: {key} must be true or false, got {show(value)}")
    return value

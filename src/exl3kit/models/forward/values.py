"""Reads of the config.json values that decide the arithmetic; what is not computed is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exl3kit.checkpoint.keys import show
from exl3kit.errors import CheckpointError, UnsupportedError
from exl3kit.models.config_keys import WHERE

_LEAST = 1e-12


def choice(config: Mapping[str, Any], key: str, known: Sequence[object], default: object) -> Any:
    """`config[key]`, one of `known`; `default` where absent or null. Else UnsupportedError."""
    value = config.get(key)
    if value is None:
        return default
    if value not in known:
        raise UnsupportedError(
            f"{WHERE}: {key}: expected {' or '.join(map(repr, known))}, got {show(value)}"
        )
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive number; `default` where absent or null, CheckpointError if there is none.

    The bounds are far from any model's, and keep the logarithms and powers of such numbers finite.
    """
    value = default if config.get(key) is None else config[key]
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not _LEAST < value < 1 / _LEAST
    ):
        raise CheckpointError(f"{WHERE}: {key} must be a positive number, got {show(value)}")
    return float(value)

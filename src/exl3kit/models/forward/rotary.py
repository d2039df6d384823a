"""Rotary position embedding: frequencies of each rope type, and the two ways to pair channels.

Channel pairs of a head turn by the angle position x frequency, in fp32 as transformers computes it.
`half` pairs channel i with i + dim / 2, `interleaved` channel 2 i with 2 i + 1; the result is in
half order either way, which leaves the products of queries and keys unchanged. The formulas are
those of transformers' modeling_rope_utils: `default`, `linear` (positions divided by a factor),
`llama3` and `yarn` (slow frequencies divided by the factor, fast ones kept, a ramp between).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exl3kit.checkpoint.keys import show
from exl3kit.errors import CheckpointError, UnsupportedError
from exl3kit.models.config_keys import WHERE, flag
from exl3kit.models.forward.values import number

_SHARED = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


@dataclass(frozen=True, eq=False)
class Rope:
    """`frequencies` (dim / 2,) fp32 in radians a position; `gain` multiplies cos and sin.

    `score_gain` is what MLA multiplies its softmax scale by.
    """

    frequencies: Tensor
    gain: float = 1.0
    score_gain: float = 1.0

    @property
    def dim(self) -> int:
        """Channels that turn."""
        return 2 * len(self.frequencies)

    def table(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0..length - 1, each (length, dim / 2)."""
        positions = torch.arange(length, dtype=torch.float32, device=device)
        angle = positions[:, None] * self.frequencies.to(device)
        return angle.cos() * self.gain, angle.sin() * self.gain


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn the first channels of x (..., S, n), as many as the table has; the rest pass."""
    head, rest = x.split((2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), dim=-1)
    first, second = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def read_rope(config: Mapping[str, Any], head_dim: int, default_partial: float = 1.0) -> Rope:
    """The rope of heads of `head_dim` channels, `default_partial` of which turn by default.

    Reads `rope_parameters` or the older `rope_scaling` with `rope_theta` beside it.
    UnsupportedError names a rope type or key that is not known, CheckpointError a wrong number.
    """
    kind, rope = _known(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = number(rope, "rope_theta", number(config, "rope_theta", 10000.0))
    if theta <= 1:
        raise CheckpointError(f"{WHERE}: rope_theta must be above 1, got {theta}")
    own = number(config, "partial_rotary_factor", default_partial)
    dim = int(head_dim * number(rope, "partial_rotary_factor", own))
    if dim % 2 or not 0 < dim <= head_dim:
        raise UnsupportedError(
            f"{WHERE}: partial_rotary_factor: expected an even number of channels up to head_dim "
            f"{head_dim}, got {dim}"
        )
    periods = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind == "yarn":
        return _yarn(rope, config, periods, theta)
    frequencies = 1.0 / periods
    if kind == "linear":
        frequencies = frequencies / number(rope, "factor")
    elif kind == "llama3":
        frequencies = _llama3(rope, config, frequencies)
    return Rope(frequencies)


def _known(rope: object) -> tuple[str, Mapping[str, Any]]:
    """The rope type and its keys, all of which are known for it."""
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"{WHERE}: rope_parameters must be an object, got {show(rope)}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(kind, str) or kind not in _KEYS:
        known = " or ".join(_KEYS)
        raise UnsupportedError(f"{WHERE}: rope_type: expected {known}, got {show(kind)}")
    for key in rope:
        if key not in (*_SHARED, *_KEYS[kind]):
            raise UnsupportedError(
                f"{WHERE}: rope_parameters: {key} {show(rope[key])}: not known for {kind!r}"
            )
    return kind, rope


def _trained_length(rope: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Positions seen before the context was stretched; a key beside the rope's own wins."""
    key = "original_max_position_embeddings"
    inner = rope if rope.get(key) is not None else {key: config.get("max_position_embeddings")}
    return number(config if config.get(key) is not None else inner, key)


def _llama3(rope: Mapping[str, Any], config: Mapping[str, Any], frequencies: Tensor) -> Tensor:
    factor, length = number(rope, "factor"), _trained_length(rope, config)
    low, high = number(rope, "low_freq_factor"), number(rope, "high_freq_factor")
    if high <= low:
        raise CheckpointError(
            f"{WHERE}: high_freq_factor must be above low_freq_factor {low}, got {high}"
        )
    wavelength = 2 * math.pi / frequencies
    share = (length / wavelength - low) / (high - low)
    blended = (1 - share) * frequencies / factor + share * frequencies
    is_slow, is_fast = wavelength > length / low, wavelength < length / high
    return torch.where(is_slow, frequencies / factor, torch.where(is_fast, frequencies, blended))


def _yarn(
    rope: Mapping[str, Any], config: Mapping[str, Any], periods: Tensor, theta: float
) -> Rope:
    factor, length = number(rope, "factor"), _trained_length(rope, config)
    half = len(periods)

    def channel(turns: float) -> float:
        """The (fractional) pair of channels that turns so often over the trained length."""
        return half * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    low = channel(number(rope, "beta_fast", 32))
    high = channel(number(rope, "beta_slow", 1))
    if flag(rope, "truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low if high != low else 0.001
    slow = ((torch.arange(half, dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies = 1.0 / (factor * periods) * slow + 1.0 / periods * (1 - slow)
    return Rope(frequencies, _yarn_gain(rope, factor), _yarn_score_gain(rope, factor))


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_gain(rope: Mapping[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        everywhere = _mscale(factor, number(rope, "mscale_all_dim"))
        return _mscale(factor, number(rope, "mscale")) / everywhere
    return _mscale(factor)


def _yarn_score_gain(rope: Mapping[str, Any], factor: float) -> float:
    """DeepSeek's: mscale(mscale_all_dim) on queries and on keys."""
    return (
        _mscale(factor, number(rope, "mscale_all_dim")) ** 2 if rope.get("mscale_all_dim") else 1.0
    )

"""FP8 weights with a scale for each block, as DeepSeek-V3 and GLM publish them.

`NAME.weight` is float8 (out, in) and `NAME.weight_scale_inv` holds, for each block of
`weight_block_size` (128 x 128 unless the config says otherwise), the factor that gives the weight
back. Edge blocks may be partial.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from exl3kit.checkpoint.jsonfile import is_int
from exl3kit.checkpoint.keys import show
from exl3kit.errors import CheckpointError

SCALE_FIELD = "weight_scale_inv"
BLOCK_SIZE_KEY = "weight_block_size"
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_DEFAULT_BLOCK = (128, 128)


def block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a block, from the config's `quantization_config`."""
    quantization = config.get("quantization_config")
    value = quantization.get(BLOCK_SIZE_KEY) if isinstance(quantization, Mapping) else None
    if value is None:
        return _DEFAULT_BLOCK
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(is_int(v) and 1 <= v < 2**31 for v in value):
        raise CheckpointError(
            f"quantization_config: {BLOCK_SIZE_KEY} must be two positive integers, "
            f"got {show(value)}"
        )
    return value[0], value[1]


def dequantize_blocks(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], name: str
) -> torch.Tensor:
    """float8 (out, in) and a scale a block -> float32 (out, in).

    CheckpointError names the scale if its shape is not (ceil(out / rows), ceil(in / columns)).
    """
    rows, columns = block
    if weight.dim() != 2:
        raise CheckpointError(f"tensor {name!r}: expected a matrix, got {list(weight.shape)}")
    expected = [-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)]
    if list(scale.shape) != expected:
        raise CheckpointError(
            f"tensor {name!r}: expected a scale for each {rows} x {columns} block of "
            f"{list(weight.shape)}, {expected}, got {list(scale.shape)}"
        )
    dense = weight.to(torch.float32)
    repeats = min(columns, max(weight.shape[1], 1))
    for i in range(expected[0]):  # by block rows, so that no second matrix is made
        factors = scale[i].to(torch.float32).repeat_interleave(repeats)[: weight.shape[1]]
        dense[i * rows : (i + 1) * rows] *= factors
    return dense

"""The weight of a module, whatever form it is stored in, as one dense matrix.

A module `NAME` may be `NAME.weight` (BF16, FP16, FP32, or FP8 with a scale a block), one EXL3
linear, or several that lie side by side: the slices `NAME.slice.{i}` into which exllamav3 cuts MLPs
wider than 55,296, or the ranks `NAME.rank{r}` of a rank-sliced expert.
"""

from __future__ import annotations

import torch

from exl3kit.checkpoint.fp8 import FP8_DTYPES, SCALE_FIELD, block_size, dequantize_blocks
from exl3kit.checkpoint.open import Checkpoint
from exl3kit.errors import CheckpointError

MAX_SLICES = 4096


def exl3_parts(checkpoint: Checkpoint, module: str) -> list[str]:
    """Names of the EXL3 linears that make up `module`, in order; none if it is dense.

    CheckpointError if slices are not numbered from 0 on.
    """
    if checkpoint.is_exl3(module):
        return [module]
    ranks = [f"{module}.rank{r}" for r in range(checkpoint.tp or 0)]
    if ranks and checkpoint.is_exl3(ranks[0]):
        return ranks
    parts = []
    while len(parts) < MAX_SLICES and checkpoint.is_exl3(f"{module}.slice.{len(parts)}"):
        parts.append(f"{module}.slice.{len(parts)}")
    return parts


def dense_weight(checkpoint: Checkpoint, module: str) -> torch.Tensor:
    """float32 (out, in), the orientation of a Hugging Face weight; EXL3 is decoded.

    Sizes are the stored ones: an EXL3 linear's are padded to multiples of 128. Errors name the
    tensor that is missing or wrong.
    """
    if checkpoint.has(f"{module}.weight"):
        return _stored_weight(checkpoint, module)
    parts = exl3_parts(checkpoint, module)
    if not parts:
        raise CheckpointError(
            f"{checkpoint.path}: module {module!r}: neither '{module}.weight' nor "
            f"'{module}.trellis' is there"
        )
    inner = 1 if module.endswith("down_proj") else 0  # the intermediate side is what is cut
    matrices = [checkpoint.exl3(part).dequantize().T for part in parts]
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim=inner)


def _stored_weight(checkpoint: Checkpoint, module: str) -> torch.Tensor:
    weight = checkpoint.tensor(f"{module}.weight")
    if weight.dtype not in FP8_DTYPES:
        return weight.float()
    scale = checkpoint.tensor(f"{module}.{SCALE_FIELD}")
    block = block_size(checkpoint.config)
    return dequantize_blocks(weight, scale, block, f"{module}.{SCALE_FIELD}")

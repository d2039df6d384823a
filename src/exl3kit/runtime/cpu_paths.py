"""Which CPU kernels serve a call, by its rows, dtype and machine: the choice inside the opaque ops.

Many bfloat16 rows go to the library's bf16 product where the machine has units for it, everything
else to the fused kernels. Without a compiler the reference runs, in float32.
"""

from __future__ import annotations

import torch

from exl3kit.jit.cpu import cpu_library
from exl3kit.kernels import bfloat_panel
from exl3kit.kernels import linear as linear_kernel
from exl3kit.kernels import moe as moe_kernel
from exl3kit.kernels.cuda_moe import MoeWeights
from exl3kit.runtime.reference import reference_linear, reference_moe


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kernels.linear.linear` by the way that suits the rows."""
    arguments = (x, trellis, suh, svh, codebook, bias)
    if cpu_library() is None:
        return reference_linear(*arguments).to(x.dtype)
    if bfloat_panel.suits(x, len(x)):
        return bfloat_panel.linear(*arguments)
    return linear_kernel.linear(*arguments)


def moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: MoeWeights,
    codebook: str,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kernels.moe.moe` by the way that suits the rows of an expert; any integer expert_map."""
    arguments = (x, topk_weights, topk_ids, *weights[:6], codebook)
    if cpu_library() is None:
        return reference_moe(*arguments, expert_map, weights.matrices).to(x.dtype)
    if bfloat_panel.suits(x, topk_ids.numel() / weights.w2_suh.shape[0]):
        return bfloat_panel.moe(x, topk_weights, topk_ids, weights, codebook, expert_map)
    local_map = None if expert_map is None else expert_map.to(torch.int32)
    return moe_kernel.moe(*arguments, local_map, weights.matrices)

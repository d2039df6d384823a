"""Routed experts one by one, each decoded and multiplied by cuBLAS: slow, and close to the format.

What the fused kernels are compared with on a device, and what runs instead of the prefill plan
where `VLLM_EXL3_PREFILL_TRELLIS=0` turns that off. Reads back which experts have routes, so it
cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import torch

from exl3kit.errors import UnsupportedError
from exl3kit.kernels import expert_loop, prefill_panel
from exl3kit.kernels.cuda_moe import MoeWeights


def moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: MoeWeights,
    codebook: str,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """`cuda_moe.moe` for any number of tokens; same arguments and result.

    UnsupportedError while a CUDA graph is captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"parity path, {len(x)} tokens: expected to run eagerly, got a CUDA graph capture; "
            "unset VLLM_EXL3_PREFILL_TRELLIS or capture at most 32 tokens"
        )
    experts = weights.w2_suh.shape[0]
    local = expert_loop.local_experts(topk_weights, topk_ids, experts, expert_map)
    local = local.masked_fill(local >= experts, -1)
    return expert_loop.moe(x, topk_weights, local, weights, codebook, prefill_panel.linear)

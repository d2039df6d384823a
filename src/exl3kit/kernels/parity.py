"""Routed experts one by one, each decoded and multiplied by cuBLAS: slow, and close to the format.

What the fused kernels are compared with on a device, and what runs instead of the prefill plan
where `VLLM_EXL3_PREFILL_TRELLIS=0` turns that off. Reads back which experts have routes, so it
cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from exl3kit.errors import UnsupportedError
from exl3kit.format.spec import TILE
from exl3kit.kernels import prefill_panel
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
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    local = _local_experts(topk_weights, topk_ids, weights.w2_suh.shape[0], expert_map)
    for expert in local.unique().tolist():
        if expert < 0:
            continue
        tokens, slots = (local == expert).nonzero(as_tuple=True)
        down = _expert(x[tokens].float(), weights, expert, codebook)
        y.index_add_(0, tokens, topk_weights[tokens, slots].unsqueeze(1) * down)
    return y.to(x.dtype)


def _expert(x: torch.Tensor, weights: MoeWeights, expert: int, codebook: str) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) of one expert, float32."""
    hidden, inner = x.shape[1], weights.w2_suh.shape[1]

    def side(number: int) -> torch.Tensor:
        suh = weights.w13_suh[number, expert % weights.w13_suh.shape[1]]
        trellis = _matrix(weights, number, expert, hidden, inner)
        return prefill_panel.linear(x, trellis, suh, weights.w13_svh[number, expert], codebook)

    product = silu(side(0)) * side(1)
    down = _matrix(weights, 2, expert, inner, hidden)
    svh = weights.w2_svh[expert % weights.w2_svh.shape[0]]
    return prefill_panel.linear(product, down, weights.w2_suh[expert], svh, codebook)


def _matrix(weights: MoeWeights, which: int, expert: int, k: int, n: int) -> torch.Tensor:
    """Trellis of gate (0), up (1) or down (2) of an expert, int16 (k/16, n/16, 16 K)."""
    trellis = weights.w2_trellis if which == 2 else weights.w13_trellis
    if weights.matrices is None:
        return trellis[expert] if which == 2 else trellis[which, expert]
    start, bits2 = weights.matrices[which, expert].tolist()
    size = k * n * bits2 // 32
    return trellis[start : start + size].view(k // TILE, n // TILE, 8 * bits2)


def _local_experts(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    experts: int,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """int64 (T, top_k): the local expert of every route, -1 where the route adds nothing."""
    size = experts if expert_map is None else len(expert_map)
    ids = topk_ids.long()
    is_absent = (ids < 0) | (ids >= size) | (topk_weights == 0)
    ids = ids.masked_fill(is_absent, 0)
    local = ids if expert_map is None else expert_map.long()[ids]
    return local.masked_fill(is_absent | (local < 0) | (local >= experts), -1)

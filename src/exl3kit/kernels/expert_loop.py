"""Routed experts one by one, each with its rows gathered and any linear that does the product."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import silu

from exl3kit.format.spec import TILE
from exl3kit.kernels.cuda_moe import MoeWeights


class Linear(Protocol):
    """`kernels.linear.linear` without a bias: float32 (rows, k) -> float32 (rows, n)."""

    def __call__(
        self,
        x: torch.Tensor,
        trellis: torch.Tensor,
        suh: torch.Tensor,
        svh: torch.Tensor,
        codebook: str,
        /,
    ) -> torch.Tensor: ...


def local_experts(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    experts: int,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """int64 (T, top_k): the local expert of every route, -1 where the route adds nothing.

    `experts` or more where the map names an expert that is not there.
    """
    size = experts if expert_map is None else len(expert_map)
    ids = topk_ids.long()
    is_absent = (ids < 0) | (ids >= size) | (topk_weights == 0)
    ids = ids.masked_fill(is_absent, 0)
    local = ids if expert_map is None else expert_map.long()[ids]
    return local.masked_fill(is_absent | (local < 0), -1)


def moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    local: torch.Tensor,
    weights: MoeWeights,
    codebook: str,
    linear: Linear,
) -> torch.Tensor:
    """Sum over slots of topk_weights * down(silu(gate(x)) * up(x)), float32 between the products.

    x (T, H); topk_weights float32 and local int64, both (T, top_k): an expert of `weights` or -1.
    Returns (T, H) of x's dtype, rounded once; slots are added in the order of their experts. Reads
    back which experts have routes.
    """
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in local.unique().tolist():
        if expert < 0:
            continue
        tokens, slots = (local == expert).nonzero(as_tuple=True)
        down = _expert(x[tokens].float(), weights, expert, codebook, linear)
        y.index_add_(0, tokens, topk_weights[tokens, slots].unsqueeze(1) * down)
    return y.to(x.dtype)


def _expert(
    x: torch.Tensor, weights: MoeWeights, expert: int, codebook: str, linear: Linear
) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) of one expert, float32."""
    hidden, inner = x.shape[1], weights.w2_suh.shape[1]

    def side(number: int) -> torch.Tensor:
        suh = weights.w13_suh[number, expert % weights.w13_suh.shape[1]]
        trellis = _matrix(weights, number, expert, hidden, inner)
        return linear(x, trellis, suh, weights.w13_svh[number, expert], codebook)

    product = silu(side(0)) * side(1)
    down = _matrix(weights, 2, expert, inner, hidden)
    svh = weights.w2_svh[expert % weights.w2_svh.shape[0]]
    return linear(product, down, weights.w2_suh[expert], svh, codebook)


def _matrix(weights: MoeWeights, which: int, expert: int, k: int, n: int) -> torch.Tensor:
    """Trellis of gate (0), up (1) or down (2) of an expert, int16 (k/16, n/16, 16 K)."""
    trellis = weights.w2_trellis if which == 2 else weights.w13_trellis
    if weights.matrices is None:
        return trellis[expert] if which == 2 else trellis[which, expert]
    start, bits2 = weights.matrices[which, expert].tolist()
    size = k * n * bits2 // 32
    return trellis[start : start + size].view(k // TILE, n // TILE, 8 * bits2)

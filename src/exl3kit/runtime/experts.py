"""Routed experts that do not come as one block of equal matrices.

Two cases, alone or together:

* Slices. A file cut for f times as many ranks gives a rank f slices of each expert. Slices were
  made one by one and cannot be joined, but each is an expert of its own: with every route repeated
  for all slices of its expert, the sum over routes adds the slices up. Rows are numbered
  expert * f + slice.
* Tiers. Experts of one layer with different rates cannot lie in one tensor. Those of one rate are
  a tier with a launch of its own, which skips the routes of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exl3kit.runtime.ops import exl3_moe

Rates = tuple[int | float, int | float, int | float]  # bits of gate, up and down


@dataclass(frozen=True)
class RateTier:
    """Experts of a layer that share their rates, in ascending order."""

    rates: Rates
    experts: tuple[int, ...]

    def make_map(self, num_experts: int, slices: int = 1) -> torch.Tensor:
        """int32 (num_experts * slices,): row of every slice in this tier, -1 for other tiers."""
        rows = torch.full((num_experts, slices), -1, dtype=torch.int32)
        own = torch.arange(len(self.experts) * slices, dtype=torch.int32)
        rows[list(self.experts)] = own.view(-1, slices)
        return rows.flatten()


def rate_tiers(rates: Sequence[Rates]) -> tuple[RateTier, ...]:
    """The tiers of a layer from the rates of each expert, lowest first."""
    return tuple(
        RateTier(tier, tuple(expert for expert, own in enumerate(rates) if own == tier))
        for tier in sorted(set(rates))
    )


@dataclass(frozen=True)
class TierWeights:
    """Weights of one tier as `exl3_moe` takes them; `expert_map` is None for the only tier."""

    w13_trellis: torch.Tensor
    w13_suh: torch.Tensor
    w13_svh: torch.Tensor
    w2_trellis: torch.Tensor
    w2_suh: torch.Tensor
    w2_svh: torch.Tensor
    expert_map: torch.Tensor | None = None


def expand_routes(
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, slices: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each route as one route to every slice of its expert, with the same weight.

    topk_weights, topk_ids (T, top_k); returns both as (T, top_k * slices), the ids being
    id * slices + slice. An id below 0 or beyond the model stays one.
    """
    if slices == 1:
        return topk_weights, topk_ids
    parts = torch.arange(slices, dtype=topk_ids.dtype, device=topk_ids.device)
    ids = (topk_ids.unsqueeze(-1) * slices + parts).flatten(1)
    return topk_weights.repeat_interleave(slices, dim=1), ids


def exl3_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    tiers: Sequence[TierWeights],
    codebook: str,
    slices: int = 1,
) -> torch.Tensor:
    """`exl3_moe` over the slices and tiers of a layer, (T, H) in the dtype of x.

    `topk_ids` are the model's expert ids. Tiers are added in order, in float32 on the CPU, where
    the op takes it, so that only the sum is rounded; elsewhere in float32 from rounded parts.
    """
    weights, ids = expand_routes(topk_weights, topk_ids, slices)

    def run(x: torch.Tensor, tier: TierWeights) -> torch.Tensor:
        return exl3_moe(
            x,
            weights,
            ids,
            tier.w13_trellis,
            tier.w13_suh,
            tier.w13_svh,
            tier.w2_trellis,
            tier.w2_suh,
            tier.w2_svh,
            codebook,
            tier.expert_map,
        )

    if len(tiers) == 1:
        return run(x, tiers[0])
    wide = x.float() if x.device.type == "cpu" else x
    total = run(wide, tiers[0]).float()
    for tier in tiers[1:]:
        total += run(wide, tier)
    return total.to(x.dtype)

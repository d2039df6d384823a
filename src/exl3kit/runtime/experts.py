"""Routed experts that do not come as one block of equal matrices.

Two cases, alone or together:

* Slices. A file cut for f times as many ranks gives a rank f slices of each expert. Slices were
  made one by one and cannot be joined, but each is an expert of its own: with every route repeated
  for all slices of its expert, the sum over routes adds the slices up. Rows are numbered
  expert * f + slice.
* Tiers. Experts of one layer with different rates cannot lie in one tensor. Those of one rate are
  a tier with a launch of its own, which skips the routes of the others.

A tier whose gate and up differ in rate is slower still: `exl3_moe` takes the two as one tensor, so
its experts run one by one, as three linears each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from exl3kit.errors import UnsupportedError
from exl3kit.runtime.ops import exl3_linear, exl3_moe
from exl3kit.runtime.reference import local_expert_ids

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
    """Weights of one tier as `exl3_moe` takes them; `expert_map` is None for the only tier.

    Where gate and up differ in rate, `w13_trellis` is both, each int16 (E, H/16, S/16, 16 K).
    """

    w13_trellis: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
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
    UnsupportedError for a tier whose gate and up differ in rate on another device than a CPU.
    """
    if x.device.type != "cpu" and any(isinstance(tier.w13_trellis, tuple) for tier in tiers):
        raise UnsupportedError(
            "experts: expected gate and up with the same bits on a device that is not a CPU, got "
            f"different ones on {x.device}; run on a CPU, or quantise again"
        )
    weights, ids = expand_routes(topk_weights, topk_ids, slices)

    def run(x: torch.Tensor, tier: TierWeights) -> torch.Tensor:
        rest = (
            tier.w13_suh, tier.w13_svh, tier.w2_trellis, tier.w2_suh, tier.w2_svh, codebook,
            tier.expert_map,
        )  # fmt: skip
        if isinstance(tier.w13_trellis, tuple):
            return _moe_by_expert(x, weights, ids, *tier.w13_trellis, *rest)
        return exl3_moe(x, weights, ids, tier.w13_trellis, *rest)

    if len(tiers) == 1:
        return run(x, tiers[0])
    wide = x.float() if x.device.type == "cpu" else x
    total = run(wide, tiers[0]).float()
    for tier in tiers[1:]:
        total += run(wide, tier)
    return total.to(x.dtype)


@torch.library.custom_op("exl3::moe_by_expert", mutates_args=(), device_types="cpu")
def _moe_by_expert(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_trellis: torch.Tensor,
    up_trellis: torch.Tensor,
    w13_suh: torch.Tensor,
    w13_svh: torch.Tensor,
    w2_trellis: torch.Tensor,
    w2_suh: torch.Tensor,
    w2_svh: torch.Tensor,
    codebook: str,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """`exl3_moe` with a trellis each for gate and up; experts in ascending order, one at a time."""
    y = torch.zeros(x.shape, dtype=torch.float32)
    local = local_expert_ids(topk_weights, topk_ids, w2_suh.shape[0], expert_map)
    for expert in local.unique().tolist():
        if expert < 0:
            continue
        tokens, slots = (local == expert).nonzero(as_tuple=True)
        rows = x[tokens].float()
        gate, up = (
            exl3_linear(
                rows, trellis[expert], w13_suh[side, expert], w13_svh[side, expert], codebook
            )
            for side, trellis in enumerate((gate_trellis, up_trellis))
        )
        product = silu(gate) * up
        down = exl3_linear(product, w2_trellis[expert], w2_suh[expert], w2_svh[expert], codebook)
        y.index_add_(0, tokens, topk_weights[tokens, slots].unsqueeze(1) * down)
    return y.to(x.dtype)


@_moe_by_expert.register_fake
def _(x: torch.Tensor, *_: torch.Tensor | str | None) -> torch.Tensor:
    return torch.empty_like(x)

"""Routed experts that do not come as one block of equal matrices.

Two cases, alone or together:

* Slices. A file cut for f times as many ranks gives a rank f slices of each expert. Slices were
  made one by one and cannot be joined, but each is an expert of its own: with every route repeated
  for all slices of its expert, the sum over routes adds the slices up. Rows are numbered
  expert * f + slice.
* Rates. Matrices of different rates cannot lie in one tensor of several dimensions. They lie behind
  one another in a flat one, and a table says where each starts and at which rate; one launch then
  serves all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from exl3kit.runtime.ops import exl3_moe

Rates = tuple[int | float, int | float, int | float]  # bits of gate, up and down


class ExpertWeights(NamedTuple):
    """Experts of one layer as `exl3_moe` takes them; `matrices` where they differ in rate."""

    w13_trellis: torch.Tensor
    w13_suh: torch.Tensor
    w13_svh: torch.Tensor
    w2_trellis: torch.Tensor
    w2_suh: torch.Tensor
    w2_svh: torch.Tensor
    matrices: torch.Tensor | None = None


def is_uniform(rates: Sequence[Rates]) -> bool:
    """Do gate and up have one rate in all experts, and down one? Then no table is needed."""
    return len(set(rates)) == 1 and rates[0][0] == rates[0][1]


def matrix_table(rates: Sequence[Rates], hidden_size: int, width: int) -> torch.Tensor:
    """The `matrices` of `exl3_moe`, int64 (3, E, 2), for experts of `rates` in this order.

    In the flat w13_trellis lie gate of all experts, then up of all; in w2_trellis down of all.
    """
    gate, up, down = (
        [(int(hidden_size * width * bits) // 16, int(2 * bits)) for bits in side]
        for side in zip(*rates, strict=True)
    )
    rows = _starts(gate + up) + _starts(down)
    return torch.tensor(rows, dtype=torch.int64).view(3, len(rates), 2)


def _starts(matrices: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, twice the bits) of matrices of (size, twice the bits) behind one another."""
    ends = itertools.accumulate(size for size, _ in matrices)
    return [(end - size, bits2) for end, (size, bits2) in zip(ends, matrices, strict=True)]


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
    weights: ExpertWeights,
    codebook: str,
    slices: int = 1,
) -> torch.Tensor:
    """`exl3_moe` over the slices of a layer's experts, (T, H) in the dtype of x.

    `topk_ids` are the model's expert ids, row id * slices + j of the weights is slice j.
    """
    routes = expand_routes(topk_weights, topk_ids, slices)
    return exl3_moe(x, *routes, *weights[:6], codebook, None, weights.matrices)

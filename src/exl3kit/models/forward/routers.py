"""Which experts a token goes to, and with what weights.

sigmoid  DeepSeek V3 and GLM: a correction bias takes part in the choice only.
softmax  DeepSeek V2 (`greedy`, `group_limited_greedy`) and Qwen3 MoE: the best probabilities.

With groups, the best `topk_group` of `num_groups` groups of experts are kept: the sigmoid router
ranks them by the sum of their two best corrected scores, the softmax router by the best.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exl3kit.models.forward.base import Routing, Weights, linear

_GATE = "mlp.gate"


@dataclass(frozen=True)
class Groups:
    """`kept` of `count` equal groups, ranked by the sum of their `ranked_by` best scores."""

    count: int = 1
    kept: int = 1
    ranked_by: int = 1

    def mask(self, scores: Tensor) -> Tensor:
        """Scores (T, E) with those of all but the best groups set to -inf."""
        if self.kept == self.count:
            return scores
        grouped = scores.unflatten(-1, (self.count, -1))
        rank = grouped.topk(self.ranked_by, dim=-1).values.sum(-1)
        kept = rank.topk(self.kept, dim=-1).indices
        is_left_out = torch.ones_like(rank, dtype=torch.bool).scatter_(1, kept, False)
        return grouped.masked_fill(is_left_out.unsqueeze(-1), -torch.inf).flatten(1)


@dataclass(frozen=True)
class SigmoidRouter:
    """Weights are the chosen experts' sigmoid scores, their sum made 1 if `is_normalized`."""

    top_k: int
    is_normalized: bool
    scale: float
    groups: Groups = Groups()

    def __call__(self, x: Tensor, weights: Weights) -> Routing:
        """Route tokens (T, H)."""
        scores = linear(x, weights, _GATE).sigmoid()
        corrected = scores + weights[f"{_GATE}.e_score_correction_bias"]
        topk_ids = self.groups.mask(corrected).topk(self.top_k, dim=-1).indices
        topk_weights = scores.gather(1, topk_ids)
        if self.is_normalized:
            topk_weights = topk_weights / (topk_weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(topk_ids, topk_weights * self.scale)


@dataclass(frozen=True)
class SoftmaxRouter:
    """Weights are the chosen experts' probabilities, their sum made 1 if `is_normalized`."""

    top_k: int
    is_normalized: bool
    scale: float = 1.0
    groups: Groups = Groups()

    def __call__(self, x: Tensor, weights: Weights) -> Routing:
        """Route tokens (T, H)."""
        scores = linear(x, weights, _GATE).softmax(-1)
        topk_weights, topk_ids = self.groups.mask(scores).topk(self.top_k, dim=-1)
        if self.is_normalized:
            topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        return Routing(topk_ids, topk_weights * self.scale)

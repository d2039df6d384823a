"""Gated MLPs: dense, shared experts, and the routed experts one by one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from exl3kit.models.forward.base import MAX_VALUES, Kept, Observe, Routing, Weights, linear


def gated_activation(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(x gate^T) * (x up^T): what the down projection is given, (..., I)."""
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def gated_mlp(
    x: Tensor,
    weights: Weights,
    prefix: str,
    has_bias: bool = False,
    observe: Observe | None = None,
) -> Tensor:
    """The MLP whose three projections lie under `prefix`, (T, H) -> (T, H)."""
    gate, up, down = (f"{prefix}.{name}_proj" for name in ("gate", "up", "down"))
    own, done = Kept(weights), []
    for part in x.split(max(1, MAX_VALUES // len(own[f"{gate}.weight"]))):
        activation = F.silu(linear(part, own, gate, has_bias)) * linear(part, own, up, has_bias)
        if observe is not None:
            observe((gate, up), part)
            observe((down,), activation)
        done.append(linear(activation, own, down, has_bias))
    return done[0] if len(done) == 1 else torch.cat(done)


def routed_experts(x: Tensor, routing: Routing, weights: Weights, num_experts: int) -> Tensor:
    """Weighted sum of the routed experts for (T, H) tokens, expert by expert in ascending order."""
    out = torch.zeros_like(x)
    for expert, tokens, weight in routing.by_expert(num_experts):
        if tokens.numel():
            result = gated_mlp(x.index_select(0, tokens), weights, f"mlp.experts.{expert}")
            out.index_add_(0, tokens, result * weight[:, None])
    return out

"""The words that the parts of a forward pass share, and the two operations all of them use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Layer-local name -> fp32 tensor; matrices are (out_features, in_features).
Weights = Mapping[str, Tensor]
# fp32 values of one intermediate at a time, 256 MiB; tokens pass in pieces so that none has more.
MAX_VALUES = 2**26

# Names of the linears that are given one input, and that input (..., in_features).
Observe = Callable[[tuple[str, ...], Tensor], None]


@dataclass
class Carry:
    """What rows hand on from layer to layer beside their hidden states.

    `selected` (R, S, S) bool: the keys each query attends to, chosen by the last layer that has an
    indexer; None for rows no longer than index_topk, and for models without sparse attention.
    """

    selected: Tensor | None = None


class Kept(dict[str, Tensor]):
    """Tensors of `source`, each of which is read and decoded once."""

    def __init__(self, source: Weights) -> None:
        super().__init__()
        self._source = source

    def __missing__(self, name: str) -> Tensor:
        tensor = self[name] = self._source[name]
        return tensor


class Attention(Protocol):
    """Attention of one kind, without norm and residual."""

    @property
    def width(self) -> int:
        """Channels of one token's queries, all heads."""
        ...

    def __call__(
        self,
        x: Tensor,
        weights: Weights,
        layer: int,
        selected: Tensor | None,
        observe: Observe | None,
    ) -> tuple[Tensor, Tensor | None]:
        """(R, S, H) -> (R, S, H), and what `Carry.selected` becomes."""
        ...


@dataclass(frozen=True)
class Routing:
    """Who goes where: `topk_ids` (T, K_top) int64 and `topk_weights` (T, K_top) fp32."""

    topk_ids: Tensor
    topk_weights: Tensor

    def counts(self, num_experts: int) -> list[int]:
        """Tokens routed to each expert."""
        return torch.bincount(self.topk_ids.flatten(), minlength=num_experts).tolist()

    def by_expert(self, num_experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For each expert in turn: its id, its token indices (n,) ascending, their weights (n,)."""
        order = self.topk_ids.flatten().argsort(stable=True)
        tokens = order // self.topk_ids.shape[1]
        weights = self.topk_weights.flatten()[order]
        counts = self.counts(num_experts)
        pieces = zip(tokens.split(counts), weights.split(counts), strict=True)
        for expert, (index, weight) in enumerate(pieces):
            yield expert, index, weight


class Router(Protocol):
    """The choice of experts for tokens (T, H), the input of a layer's MLP."""

    def __call__(self, x: Tensor, weights: Weights) -> Routing:
        """Route by `mlp.gate`."""
        ...


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def linear(x: Tensor, weights: Weights, name: str, has_bias: bool = False) -> Tensor:
    """x `name`.weight^T (+ `name`.bias), (..., in_features) -> (..., out_features)."""
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"] if has_bias else None)

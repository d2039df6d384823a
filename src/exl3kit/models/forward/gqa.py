"""Grouped-query attention: partial rotary, norms of queries and keys, biases, sliding window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from exl3kit.models.attention import Gqa
from exl3kit.models.forward.base import Observe, Weights, linear, rms_norm
from exl3kit.models.forward.rotary import Rope, rotate

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_O = "self_attn.o_proj"


@dataclass(frozen=True)
class GqaAttention:
    """Attention of `shape`; in `window_layers` a token sees itself and `window` - 1 before it."""

    shape: Gqa
    rope: Rope
    eps: float
    window: int = 0
    window_layers: frozenset[int] = frozenset()

    @property
    def width(self) -> int:
        """Channels of one token's queries."""
        return self.shape.num_heads * self.shape.head_dim

    def __call__(
        self,
        x: Tensor,
        weights: Weights,
        layer: int,
        selected: Tensor | None,
        observe: Observe | None,
    ) -> tuple[Tensor, Tensor | None]:
        """(R, S, H) -> (R, S, H); `selected` passes unused."""
        if observe is not None:
            observe(_QKV, x)
        table = self.rope.table(x.shape[1], x.device)
        query = rotate(self._heads(x, weights, "q"), *table)
        key = rotate(self._heads(x, weights, "k"), *table)
        mixed = self._mix(query, key, self._heads(x, weights, "v"), layer)
        if observe is not None:
            observe((_O,), mixed)
        return linear(mixed, weights, _O, "o_proj" in self.shape.biased), selected

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
        """Softmax attention of (R, heads, S, head_dim), given as (R, S, heads * head_dim).

        One call for each of the queries that share a key: on CUDA torch's enable_gqa is only for
        its half precision kernel and the one that holds all scores; on the CPU it saves a tenth.
        """
        mask = self._window_mask(query.shape[2], layer, query.device)
        mixed = [
            F.scaled_dot_product_attention(part, key, value, attn_mask=mask, is_causal=mask is None)
            for part in query.unflatten(1, (self.shape.num_kv_heads, -1)).unbind(2)
        ]
        return torch.stack(mixed, dim=2).flatten(1, 2).transpose(1, 2).flatten(2)

    def _window_mask(self, length: int, layer: int, device: torch.device) -> Tensor | None:
        """(S, S) bool, the keys a token sees; None for all up to its own."""
        if layer not in self.window_layers or length <= self.window:
            return None
        mask = torch.ones(length, length, dtype=torch.bool, device=device)
        return mask.tril().triu(1 - self.window)

    def _heads(self, x: Tensor, weights: Weights, kind: str) -> Tensor:
        """The q, k or v projection of (R, S, H) as (R, heads, S, head_dim), q and k normed."""
        name = f"{kind}_proj"
        out = linear(x, weights, f"self_attn.{name}", name in self.shape.biased)
        out = out.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        if self.shape.has_qk_norm and kind != "v":
            out = rms_norm(out, weights[f"self_attn.{kind}_norm.weight"], self.eps)
        return out

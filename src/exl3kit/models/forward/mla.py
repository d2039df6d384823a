"""Multi-head latent attention, expanded: keys and values of all heads from the latent vectors.

Of a head's query and key the first `qk_nope_head_dim` channels come from the latent vectors and the
last `qk_rope_head_dim` are turned by position; the turned part of the key is one for all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from exl3kit.models.attention import Mla
from exl3kit.models.forward.base import Observe, Weights, linear, rms_norm
from exl3kit.models.forward.indexer import KeyPicker
from exl3kit.models.forward.rotary import Rope, rotate

_Q, _Q_A, _Q_B = "self_attn.q_proj", "self_attn.q_a_proj", "self_attn.q_b_proj"
_KV_A, _KV_B = "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"
_O = "self_attn.o_proj"
# The norms of the latent vectors keep this whatever rms_norm_eps says, in transformers' classes.
_EPS = 1e-6


@dataclass(frozen=True)
class MlaAttention:
    """Attention of `shape`; `picker` chooses the keys of rows longer than it passes whole."""

    shape: Mla
    rope: Rope
    interleaved: bool
    picker: KeyPicker | None = None

    @property
    def width(self) -> int:
        """Channels of one token's queries, as wide as `_mix` makes them."""
        return self.shape.num_heads * max(sum(self._parts), self.shape.v_head_dim)

    def __call__(
        self,
        x: Tensor,
        weights: Weights,
        layer: int,
        selected: Tensor | None,
        observe: Observe | None,
    ) -> tuple[Tensor, Tensor | None]:
        """(R, S, H) -> (R, S, H), and the keys chosen, here or by the layer before."""
        table = self.rope.table(x.shape[1], x.device)
        if observe is not None:
            observe((_Q if self.shape.q_lora_rank is None else _Q_A, _KV_A), x)
        source = self._query_source(x, weights)
        if self.picker is not None:
            selected = self.picker(x, source, weights, layer, selected, table)
        query = self._query(source, weights, table, observe)
        key, value = self._key_value(x, weights, table, observe)
        mixed = self._mix(query, key, value, selected)
        if observe is not None:
            observe((_O,), mixed)
        return linear(mixed, weights, _O, self.shape.has_bias), selected

    def _query_source(self, x: Tensor, weights: Weights) -> Tensor:
        """What the queries are projected from: the normed latent query, or x itself."""
        if self.shape.q_lora_rank is None:
            return x
        latent = linear(x, weights, _Q_A, self.shape.has_bias)
        return rms_norm(latent, weights["self_attn.q_a_layernorm.weight"], _EPS)

    def _query(
        self,
        source: Tensor,
        weights: Weights,
        table: tuple[Tensor, Tensor],
        observe: Observe | None,
    ) -> Tensor:
        """(R, heads, S, nope + rope)."""
        name = _Q
        if self.shape.q_lora_rank is not None:
            name = _Q_B
            if observe is not None:
                observe((_Q_B,), source)
        query = linear(source, weights, name).unflatten(-1, (self.shape.num_heads, -1))
        still, turned = query.transpose(1, 2).split(self._parts, dim=-1)
        return torch.cat((still, rotate(turned, *table, interleaved=self.interleaved)), dim=-1)

    def _key_value(
        self, x: Tensor, weights: Weights, table: tuple[Tensor, Tensor], observe: Observe | None
    ) -> tuple[Tensor, Tensor]:
        """(R, heads, S, nope + rope) and (R, heads, S, v_head_dim)."""
        shape = self.shape
        joint = linear(x, weights, _KV_A, shape.has_bias)
        latent, turned = joint.split((shape.kv_lora_rank, shape.qk_rope_head_dim), dim=-1)
        latent = rms_norm(latent, weights["self_attn.kv_a_layernorm.weight"], _EPS)
        if observe is not None:
            observe((_KV_B,), latent)
        expanded = linear(latent, weights, _KV_B).unflatten(-1, (shape.num_heads, -1))
        still, value = expanded.transpose(1, 2).split(
            (shape.qk_nope_head_dim, shape.v_head_dim), dim=-1
        )
        turned = rotate(turned, *table, interleaved=self.interleaved)
        turned = turned[:, None].expand(-1, shape.num_heads, -1, -1)
        return torch.cat((still, turned), dim=-1), value

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, selected: Tensor | None) -> Tensor:
        """Softmax attention, (R, S, heads * v_head_dim).

        Heads are widened by zeros to one width: torch's CPU kernel that never holds all scores asks
        for that.
        """
        width = max(sum(self._parts), self.shape.v_head_dim)
        mixed = F.scaled_dot_product_attention(
            *(F.pad(part, (0, width - part.shape[-1])) for part in (query, key, value)),
            attn_mask=None if selected is None else selected[:, None],
            is_causal=selected is None,
            scale=self.rope.score_gain * sum(self._parts) ** -0.5,
        )
        return mixed[..., : self.shape.v_head_dim].transpose(1, 2).flatten(2)

    @property
    def _parts(self) -> tuple[int, int]:
        return self.shape.qk_nope_head_dim, self.shape.qk_rope_head_dim

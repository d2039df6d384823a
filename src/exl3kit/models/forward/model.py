"""A model's forward pass, put together from its attention and its router."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from exl3kit.models.decoder import DecoderMap
from exl3kit.models.forward.base import (
    MAX_VALUES,
    Attention,
    Carry,
    Kept,
    Observe,
    Router,
    Routing,
    Weights,
    linear,
    rms_norm,
)
from exl3kit.models.forward.mlp import gated_mlp, routed_experts


@dataclass(frozen=True)
class ForwardModel:
    """The arithmetic of one model; `shapes` are its tensors' names and sizes.

    `router` is None for a dense model. R rows, S tokens a row, H hidden size; all fp32.
    """

    shapes: DecoderMap
    attention: Attention
    router: Router | None
    eps: float

    @property
    def vocab_size(self) -> int:
        """V, tokens of the vocabulary."""
        return self.shapes.vocab_size

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers of the target model; next-token layers are numbered from there on."""
        return self.shapes.num_hidden_layers

    @property
    def num_experts(self) -> int:
        """E, routed experts a layer; 0 for a dense model."""
        return self.shapes.num_experts

    @property
    def has_shared_experts(self) -> bool:
        """Whether the layers with routed experts also have shared ones."""
        return self.shapes.moe is not None and self.shapes.moe.shared_size > 0

    def is_moe(self, layer: int) -> bool:
        """Whether decoder layer or next-token layer `layer` has routed experts."""
        return layer in self.shapes.moe_layers

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Token rows (R, S) int64 -> hidden states (R, S, H)."""
        return F.embedding(tokens, weight).float()

    def attention_block(
        self,
        x: Tensor,
        weights: Weights,
        layer: int,
        carry: Carry | None = None,
        observe: Observe | None = None,
    ) -> Tensor:
        """x + attention(norm(x)) for (R, S, H).

        `carry` goes with these rows from layer to layer; only a model whose layers share their
        choice of keys needs it, and refuses rows longer than index_topk without it.
        """
        carry = Carry() if carry is None else carry
        normed = rms_norm(x, weights["input_layernorm.weight"], self.eps)
        rows = max(1, MAX_VALUES // (x.shape[1] * self.attention.width))
        parts = normed.split(rows)
        own = weights if len(parts) == 1 else Kept(weights)
        before = [None] * len(parts) if carry.selected is None else carry.selected.split(rows)
        mixed, after = zip(
            *(
                self.attention(part, own, layer, selected, observe)
                for part, selected in zip(parts, before, strict=True)
            ),
            strict=True,
        )
        carry.selected = None if after[0] is None else torch.cat(after)
        return x + torch.cat(mixed)

    def mlp_input(self, x: Tensor, weights: Weights) -> Tensor:
        """norm(x): what router, experts and dense MLP are given, (R, S, H)."""
        return rms_norm(x, weights["post_attention_layernorm.weight"], self.eps)

    def route(self, x: Tensor, weights: Weights) -> Routing:
        """The experts of tokens (T, H)."""
        if self.router is None:
            raise ValueError(f"{self.shapes.architecture} has no routed experts")
        return self.router(x, weights)

    def routed_experts(self, x: Tensor, routing: Routing, weights: Weights) -> Tensor:
        """Weighted sum of the routed experts for tokens (T, H), one expert resident at a time."""
        return routed_experts(x, routing, weights, self.num_experts)

    def shared_experts(self, x: Tensor, weights: Weights, observe: Observe | None = None) -> Tensor:
        """The shared experts, (T, H) -> (T, H); only where `has_shared_experts`."""
        return gated_mlp(x, weights, "mlp.shared_experts", observe=observe)

    def dense_mlp(self, x: Tensor, weights: Weights, observe: Observe | None = None) -> Tensor:
        """The MLP of a layer without routed experts, (T, H) -> (T, H)."""
        return gated_mlp(x, weights, "mlp", self.shapes.has_mlp_bias, observe)

    def mlp_block(
        self, x: Tensor, weights: Weights, layer: int, observe: Observe | None = None
    ) -> Tensor:
        """x + mlp(norm(x)) for (R, S, H): the dense MLP, or routed plus shared experts."""
        tokens = self.mlp_input(x, weights).flatten(0, 1)
        if not self.is_moe(layer):
            out = self.dense_mlp(tokens, weights, observe)
        else:
            out = self.routed_experts(tokens, self.route(tokens, weights), weights)
            if self.has_shared_experts:
                out = out + self.shared_experts(tokens, weights, observe)
        return x + out.view_as(x)

    def decoder_layer(
        self,
        x: Tensor,
        weights: Weights,
        layer: int,
        carry: Carry | None = None,
        observe: Observe | None = None,
    ) -> Tensor:
        """Decoder layer `layer` on hidden states (R, S, H)."""
        x = self.attention_block(x, weights, layer, carry, observe)
        return self.mlp_block(x, weights, layer, observe)

    def final_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm in front of the head, (..., H): `model.norm`, or an MTP layer's own."""
        return rms_norm(x, weight, self.eps)

    def logits(self, x: Tensor, norm: Tensor, head: Tensor) -> Tensor:
        """Final norm and head: (..., H) -> (..., V); a tied head is the embedding."""
        return F.linear(self.final_norm(x, norm), head)

    def mtp_input(self, hidden: Tensor, next_embeds: Tensor, weights: Weights) -> Tensor:
        """What a next-token layer is given: eh_proj(enorm(next_embeds) | hnorm(hidden)), (R, S, H).

        Position s joins the target's state of token s with the embedding of token s + 1, and the
        layer, run as `decoder_layer` and followed by `shared_head.norm` and a head (`logits`),
        predicts token s + 2. A row of n tokens so has n - 1 positions:

            hidden = model.final_norm(x, weights["model.norm.weight"])[:, :-1]
            y = model.mtp_input(hidden, model.embed(rows[:, 1:], embedding), own)

        `hidden` is taken after the target's final norm, as vLLM and transformers do; a further
        next-token layer takes the previous one's state after its `shared_head.norm`. The embedding
        at position 0 is taken as 0, as in vLLM (deepseek_mtp, glm4_moe_mtp), which the layer is
        calibrated for.
        """
        embeds = next_embeds.clone()
        embeds[:, 0] = 0
        parts = (
            rms_norm(embeds, weights["enorm.weight"], self.eps),
            rms_norm(hidden, weights["hnorm.weight"], self.eps),
        )
        return linear(torch.cat(parts, dim=-1), weights, "eh_proj")

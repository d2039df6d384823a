"""The forward pass of Glm4MoeForCausalLM in plain torch, one decoder layer at a time.

Calibration and perplexity need the layer's arithmetic, not a serving engine: every function takes
a mapping of layer-local names to fp32 tensors in Hugging Face orientation, (out_features,
in_features), and asks it for one tensor at a time, so a lazy mapping keeps a single expert
resident. The MoE runs expert by expert over all its tokens; `observe` sees each expert's input and
activation, from which the Hessians are made. tests/models/test_glm4_moe_block.py holds it to
transformers' own class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from exl3kit.errors import CheckpointError, UnsupportedError

ARCHITECTURE = "Glm4MoeForCausalLM"
Weights = Mapping[str, Tensor]

# Tokens of one attention call: bounds the copies of q, k and v, which exist for all heads at once.
_ATTENTION_TOKENS = 16384


@dataclass(frozen=True)
class ForwardConfig:
    """What the arithmetic needs of a Glm4Moe config.json; sizes in elements."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    use_qk_norm: bool
    attention_bias: bool
    first_k_dense_replace: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ForwardConfig:
        """Read a parsed config.json.

        Defaults are those of transformers' Glm4MoeConfig. Raises CheckpointError for a missing key
        and UnsupportedError for an architecture, an activation or a rope type not computed here.
        """
        names = config.get("architectures")
        if names != [ARCHITECTURE]:
            raise UnsupportedError(f"architectures: expected [{ARCHITECTURE!r}], got {names!r}")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise UnsupportedError(f"rope_type: expected 'default', got {rope_type!r}")
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedError(f"hidden_act: expected 'silu', got {activation!r}")
        try:
            head_dim = config.get("head_dim") or (
                config["hidden_size"] // config["num_attention_heads"]
            )
            factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.5))
            return cls(
                vocab_size=config["vocab_size"],
                hidden_size=config["hidden_size"],
                num_hidden_layers=config["num_hidden_layers"],
                num_attention_heads=config["num_attention_heads"],
                num_key_value_heads=config["num_key_value_heads"],
                head_dim=head_dim,
                rotary_dim=int(head_dim * factor),
                rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-5)),
                use_qk_norm=bool(config.get("use_qk_norm", False)),
                attention_bias=bool(config.get("attention_bias", False)),
                first_k_dense_replace=config.get("first_k_dense_replace", 1),
                n_routed_experts=config["n_routed_experts"],
                n_shared_experts=config.get("n_shared_experts") or 0,
                num_experts_per_tok=config["num_experts_per_tok"],
                n_group=config.get("n_group", 1),
                topk_group=config.get("topk_group", 1),
                norm_topk_prob=bool(config.get("norm_topk_prob", True)),
                routed_scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            )
        except KeyError as error:
            raise CheckpointError(f"config.json: key {error.args[0]!r} is missing") from None

    def is_moe(self, layer: int) -> bool:
        """Whether decoder layer `layer` has routed experts."""
        return layer >= self.first_k_dense_replace


@dataclass(frozen=True)
class Routing:
    """Who goes where: `topk_ids` (T, K_top) int64 and `topk_weights` (T, K_top) fp32."""

    topk_ids: Tensor
    topk_weights: Tensor

    def by_expert(self, num_experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For each expert in turn: its id, its token indices (n,) ascending, their weights (n,)."""
        flat = self.topk_ids.flatten()
        order = flat.argsort(stable=True)
        tokens = order // self.topk_ids.shape[1]
        weights = self.topk_weights.flatten()[order]
        counts = torch.bincount(flat, minlength=num_experts).tolist()
        pieces = zip(tokens.split(counts), weights.split(counts), strict=True)
        for expert, (index, weight) in enumerate(pieces):
            yield expert, index, weight


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """Token rows (R, S) int64 -> hidden states (R, S, H) fp32."""
    return F.embedding(tokens, weight).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def attention_block(x: Tensor, weights: Weights, config: ForwardConfig) -> Tensor:
    """x + attention(norm(x)) for (R, S, H) fp32; rows are independent sequences from position 0."""
    cos, sin = _rotary_table(x.shape[1], config)
    normed = rms_norm(x, weights["input_layernorm.weight"], config.rms_norm_eps)
    rows = max(1, _ATTENTION_TOKENS // x.shape[1])
    mixed = [_attention(part, weights, config, cos, sin) for part in normed.split(rows)]
    return x + torch.cat(mixed)


def _rotary_table(length: int, config: ForwardConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, each (length, rotary_dim), the two halves alike."""
    steps = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    frequency = 1.0 / (config.rope_theta**steps)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first rotary_dim of the last dimension (first half against second half)."""
    head, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
    first, second = head.chunk(2, dim=-1)
    turned = head * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1)


def _heads(x: Tensor, weights: Weights, name: str, config: ForwardConfig) -> Tensor:
    """Projection `name` of (R, S, H) as (R, heads, S, head_dim), with its q or k norm."""
    bias = weights[f"self_attn.{name}_proj.bias"] if config.attention_bias else None
    out = F.linear(x, weights[f"self_attn.{name}_proj.weight"], bias)
    out = out.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
    if config.use_qk_norm and name != "v":
        out = rms_norm(out, weights[f"self_attn.{name}_norm.weight"], config.rms_norm_eps)
    return out


def _attention(
    x: Tensor, weights: Weights, config: ForwardConfig, cos: Tensor, sin: Tensor
) -> Tensor:
    query = _rotate(_heads(x, weights, "q", config), cos, sin)
    key = _rotate(_heads(x, weights, "k", config), cos, sin)
    value = _heads(x, weights, "v", config)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return F.linear(mixed.transpose(1, 2).flatten(2), weights["self_attn.o_proj.weight"])


def gated_activation(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(x gate^T) * (x up^T): what the down projection is given, (..., I)."""
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def dense_mlp(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    """The gated MLP whose three projections lie under `prefix` (dense layers, shared experts)."""
    gate, up = weights[f"{prefix}.gate_proj.weight"], weights[f"{prefix}.up_proj.weight"]
    return F.linear(gated_activation(x, gate, up), weights[f"{prefix}.down_proj.weight"])


def route(x: Tensor, weights: Weights, config: ForwardConfig) -> Routing:
    """Sigmoid router of (T, H) tokens.

    The correction bias takes part in the choice only: groups are ranked by the sum of their two
    best corrected scores, experts of the best `topk_group` groups by corrected score. The weights
    are the uncorrected scores, normalised to 1 if `norm_topk_prob`, times the scaling factor.
    """
    scores = F.linear(x, weights["mlp.gate.weight"]).sigmoid()
    choice = scores + weights["mlp.gate.e_score_correction_bias"]
    if config.n_group > 1:
        choice = _mask_groups(choice, config)
    topk_ids = choice.topk(config.num_experts_per_tok, dim=-1).indices
    topk_weights = scores.gather(1, topk_ids)
    if config.norm_topk_prob:
        topk_weights = topk_weights / (topk_weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(topk_ids, topk_weights * config.routed_scaling_factor)


def _mask_groups(choice: Tensor, config: ForwardConfig) -> Tensor:
    grouped = choice.unflatten(-1, (config.n_group, -1))
    group_scores = grouped.topk(2, dim=-1).values.sum(-1)
    kept = group_scores.topk(config.topk_group, dim=-1).indices
    mask = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(mask.unsqueeze(-1), float("-inf")).flatten(1)


# expert id, its input tokens (n, H), its activation (n, I), the tokens' routing weights (n,)
Observer = Callable[[int, Tensor, Tensor, Tensor], None]


def routed_experts(
    x: Tensor,
    routing: Routing,
    weights: Weights,
    config: ForwardConfig,
    observe: Observer | None = None,
) -> Tensor:
    """Weighted sum of the routed experts for (T, H) tokens, expert by expert in ascending order."""
    out = torch.zeros_like(x)
    for expert, tokens, weight in routing.by_expert(config.n_routed_experts):
        if not tokens.numel():
            continue
        prefix = f"mlp.experts.{expert}"
        gate, up = weights[f"{prefix}.gate_proj.weight"], weights[f"{prefix}.up_proj.weight"]
        inputs = x.index_select(0, tokens)
        activation = gated_activation(inputs, gate, up)
        if observe is not None:
            observe(expert, inputs, activation, weight)
        result = F.linear(activation, weights[f"{prefix}.down_proj.weight"])
        out.index_add_(0, tokens, result * weight[:, None])
    return out


def mlp_input(x: Tensor, weights: Weights, config: ForwardConfig) -> Tensor:
    """norm(x): what router, experts and dense MLP are given, (R, S, H)."""
    return rms_norm(x, weights["post_attention_layernorm.weight"], config.rms_norm_eps)


def mlp_block(x: Tensor, weights: Weights, config: ForwardConfig, layer: int) -> Tensor:
    """x + mlp(norm(x)) for (R, S, H) fp32: the dense MLP, or routed plus shared experts."""
    normed = mlp_input(x, weights, config)
    if not config.is_moe(layer):
        return x + dense_mlp(normed, weights, "mlp")
    tokens = normed.flatten(0, 1)
    out = routed_experts(tokens, route(tokens, weights, config), weights, config)
    if config.n_shared_experts:
        out = out + dense_mlp(tokens, weights, "mlp.shared_experts")
    return x + out.view_as(x)


def decoder_layer(x: Tensor, weights: Weights, config: ForwardConfig, layer: int) -> Tensor:
    """Decoder layer `layer` on hidden states (R, S, H) fp32."""
    return mlp_block(attention_block(x, weights, config), weights, config, layer)


def logits(x: Tensor, norm: Tensor, head: Tensor, config: ForwardConfig) -> Tensor:
    """Final norm and head: (..., H) -> (..., V) fp32; a tied head is the embedding."""
    return F.linear(rms_norm(x, norm, config.rms_norm_eps), head)

"""A Glm4Moe language model with one MTP layer in plain torch, small enough to train in minutes.

The arithmetic is that of transformers' `glm4_moe` (which has no MTP layer) and vLLM's
`glm4_moe_mtp`:

    block   x += attention(norm(x)); x += mlp(norm(x)); rotary embedding on the first half of
            every head, QK norm before it
    router  s = sigmoid(gate x); the top k of s + bias are used, with the weights
            s / sum(s) * routed_scaling_factor
    MTP     block(eh_proj([enorm(embed(next token)), hnorm(model.norm(x))])) -> shared_head.norm
            -> lm_head predicts the token after the next; at position 0 the embedding is masked

All experts are computed for every token as one wide MLP whose activations are scaled by the
routing weights, zero for experts not chosen: two dense products, 2.7 million tokens a second on
an H200. The experts' bias is not trained by gradient: after every step it moves against the load
(`Router.balance`), so that no loss term for balance is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of the model; the names are those of config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 512
    moe_intermediate_size: int = 256
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    num_hidden_layers: int = 4
    first_k_dense_replace: int = 1
    num_nextn_predict_layers: int = 1
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    partial_rotary_factor: float = 0.5
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    routed_scaling_factor: float = 1.5
    max_position_embeddings: int = 1024

    def to_config(self) -> dict[str, object]:
        """config.json for vLLM 0.32 and transformers 5: rope and dtype in both spellings."""
        rope = {
            "rope_type": "default",
            "rope_theta": self.rope_theta,
            "partial_rotary_factor": self.partial_rotary_factor,
        }
        return {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            **asdict(self),
            "rope_parameters": rope,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "use_qk_norm": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "use_cache": True,
            "bos_token_id": 0,
            "eos_token_id": [0, 1],
            "pad_token_id": 4,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


def rotary_tables(config: TinyConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin), each (length, rotary_dim) float32."""
    dim = int(config.head_dim * config.partial_rotary_factor)
    exponent = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
    frequency = config.rope_theta**-exponent
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first rotary_dim channels; x is (B, heads, T, head_dim)."""
    turned, kept = x[..., : cos.shape[-1]].float(), x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned.to(x.dtype), kept], dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention with QK norm."""

    def __init__(self, config: TinyConfig):
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * config.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.head_dim)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin)
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v.transpose(1, 2)))
        out = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores in float32; choice by score + bias, weights by score alone (noaux_tc)."""

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, config: TinyConfig):
        super().__init__()
        self.top_k, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.register_buffer("load", torch.zeros(config.n_routed_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, hidden) -> (…, experts) float32 weights, zero where not chosen; stores the load."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        self.load.copy_(mask.detach().flatten(0, -2).mean(dim=0) / self.top_k)
        weights = scores * mask
        return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * self.scale

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Raise the bias of experts with less than their share of the last batch, lower others."""
        self.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)


class Experts(nn.Module):
    """E MLPs side by side: gate_up (H, E, 2, I), down (E, I, H)."""

    def __init__(self, config: TinyConfig):
        super().__init__()
        h, i, e = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        self.gate_up = nn.Parameter(torch.empty(h, e, 2, i))
        self.down = nn.Parameter(torch.empty(e, i, h))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        h, e, _, i = self.gate_up.shape
        gate, up = (x @ self.gate_up.reshape(h, -1)).unflatten(-1, (e, 2, i)).unbind(-2)
        inner = F.silu(gate) * up * weights.unsqueeze(-1).to(gate.dtype)
        return inner.flatten(-2) @ self.down.reshape(e * i, h)


class MoE(nn.Module):
    """Routed experts plus the shared one."""

    def __init__(self, config: TinyConfig):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(
            config.hidden_size, config.moe_intermediate_size * config.n_shared_experts
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.gate(x)) + self.shared_experts(x)


class Block(nn.Module):
    """One decoder layer, dense below first_k_dense_replace."""

    def __init__(self, config: TinyConfig, index: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        is_dense = index < config.first_k_dense_replace
        self.mlp = MLP(config.hidden_size, config.intermediate_size) if is_dense else MoE(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class MTPBlock(Block):
    """The MTP layer: mixes hidden state and next token's embedding, then is a decoder layer."""

    def __init__(self, config: TinyConfig):
        super().__init__(config, config.num_hidden_layers)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(config.hidden_size, config.rms_norm_eps)})

    def draft(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Next tokens' embeddings and the model's states, both (B, T, H) -> normed (B, T, H)."""
        embedded = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, 1:]], dim=1)
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        return self.shared_head["norm"](self(x, cos, sin))


class Trunk(nn.Module):
    """Embedding, decoder layers with the MTP layer as the last, final norm."""

    def __init__(self, config: TinyConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = [Block(config, i) for i in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList([*layers, MTPBlock(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class TinyGlm4Moe(nn.Module):
    """The language model; parameter names are the checkpoint's, stacked experts excepted."""

    def __init__(self, config: TinyConfig):
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down"))
                nn.init.normal_(parameter, std=0.01 if is_output else 0.03)

    def blocks(self) -> list[Block]:
        """The decoder layers, the MTP layer last."""
        return [block for block in self.model.layers if isinstance(block, Block)]

    def hidden(self, tokens: Tensor) -> Tensor:
        """(B, T) tokens -> (B, T, H) states after the final norm."""
        cos, sin = rotary_tables(self.config, tokens.shape[1], tokens.device)
        x = self.model.embed_tokens(tokens)
        for block in self.blocks()[: self.config.num_hidden_layers]:
            x = block(x, cos, sin)
        return self.model.norm(x)

    def drafted(self, following: Tensor, hidden: Tensor) -> Tensor:
        """(B, T) next tokens and the model's (B, T, H) states -> the MTP layer's (B, T, H) states.

        Nothing flows back from here into the embedding or the states.
        """
        mtp = self.model.layers[-1]
        assert isinstance(mtp, MTPBlock)
        cos, sin = rotary_tables(self.config, following.shape[1], following.device)
        embedded = F.embedding(following, self.model.embed_tokens.weight.detach())
        return mtp.draft(embedded.to(hidden.dtype), hidden.detach(), cos, sin)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) tokens -> (B, T, vocab) logits for the next token."""
        return self.lm_head(self.hidden(tokens))

    def losses(self, window: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T + 2) tokens -> cross entropies in nats: of token t + 1, of t + 2 by the MTP layer.

        The MTP loss trains the MTP layer alone: states, embedding and head are detached from it.
        """
        tokens, following, after = window[:, :-2], window[:, 1:-1], window[:, 2:]
        hidden = self.hidden(tokens)
        drafted, head = self.drafted(following, hidden), self.lm_head.weight
        return cross_entropy(hidden, head, following), cross_entropy(drafted, head.detach(), after)

    def routers(self) -> dict[int, Router]:
        """Layer index -> router, the MTP layer's included."""
        return {i: b.mlp.gate for i, b in enumerate(self.blocks()) if isinstance(b.mlp, MoE)}

    def checkpoint(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) for a Hugging Face checkpoint: BF16, experts apart, router bias F32."""
        for name, tensor in self.state_dict().items():
            tensor = tensor.detach().cpu()
            if name.endswith("experts.gate_up"):
                prefix = name.removesuffix(".gate_up")
                for e in range(tensor.shape[1]):
                    for i, part in enumerate(("gate_proj", "up_proj")):
                        yield f"{prefix}.{e}.{part}.weight", stored(tensor[:, e, i].t())
            elif name.endswith("experts.down"):
                for e in range(tensor.shape[0]):
                    yield (
                        f"{name.removesuffix('.down')}.{e}.down_proj.weight",
                        stored(tensor[e].t()),
                    )
            elif name.endswith("e_score_correction_bias"):
                yield name, tensor.float()
            else:
                yield name, stored(tensor)


def stored(tensor: Tensor) -> Tensor:
    """The tensor as the checkpoint holds it: BF16, contiguous."""
    return tensor.bfloat16().contiguous()


def cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats of (B, T) targets under the head's logits, in float32."""
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

"""Glm4MoeForCausalLM: GLM-4.5, 4.6 and 4.7.

Dense MLP in the first `first_k_dense_replace` layers, then routed and shared experts. A
multi-token-prediction layer is named like a decoder layer, from `num_hidden_layers` on, and adds
`eh_proj`, `enorm`, `hnorm` and `shared_head.norm`; published files also carry copies of the
embedding and the head there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from exl3kit.checkpoint.jsonfile import is_int
from exl3kit.checkpoint.keys import MAX_SIZE, integer
from exl3kit.errors import CheckpointError
from exl3kit.models.base import LinearSpec, ShardKind, TensorSpec

_WHERE = "config.json"
_COUNTS = {"n_shared_experts": 0, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}


@dataclass(frozen=True)
class Glm4MoeMap:
    """Names and shapes of one Glm4Moe model; sizes in elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    num_dense_layers: int
    num_mtp_layers: int
    attention_bias: bool
    use_qk_norm: bool
    has_tied_head: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Glm4MoeMap:
        """Read config.json; CheckpointError names a key that is missing or has a wrong value.

        Defaults are those of transformers' Glm4MoeConfig.
        """
        sizes = {
            key: integer(config, key, _WHERE, MAX_SIZE)
            for key in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "moe_intermediate_size",
                "num_attention_heads",
                "num_key_value_heads",
            )
        }
        counts = {key: _count(config, key, default) for key, default in _COUNTS.items()}
        layers = integer(config, "num_hidden_layers", _WHERE)
        head_dim = config.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
        return cls(
            **sizes,
            num_hidden_layers=layers,
            num_experts_per_tok=integer(config, "num_experts_per_tok", _WHERE),
            head_dim=integer({"head_dim": head_dim}, "head_dim", _WHERE, MAX_SIZE),
            num_experts=integer(config, "n_routed_experts", _WHERE),
            num_shared_experts=counts["n_shared_experts"],
            num_dense_layers=min(counts["first_k_dense_replace"], layers),
            num_mtp_layers=counts["num_nextn_predict_layers"],
            attention_bias=_flag(config, "attention_bias"),
            use_qk_norm=_flag(config, "use_qk_norm"),
            has_tied_head=_flag(config, "tie_word_embeddings"),
        )

    @property
    def layers(self) -> range:
        """All decoder layers, multi-token-prediction layers included."""
        return range(self.num_hidden_layers + self.num_mtp_layers)

    @property
    def mtp_layers(self) -> range:
        """The multi-token-prediction layers; they follow the target's layers."""
        return range(self.num_hidden_layers, self.num_hidden_layers + self.num_mtp_layers)

    @property
    def moe_layers(self) -> range:
        """Layers with routed experts, multi-token-prediction layers included."""
        return range(self.num_dense_layers, self.num_hidden_layers + self.num_mtp_layers)

    def linears(self, layer: int) -> list[LinearSpec]:
        """Attention, router, dense MLP or shared experts, and a draft layer's `eh_proj`."""
        prefix = f"model.layers.{layer}"
        found = self._attention(f"{prefix}.self_attn")
        if layer not in self.moe_layers:
            found += self._mlp(f"{prefix}.mlp", self.intermediate_size)
        else:
            found.append(
                LinearSpec(
                    f"{prefix}.mlp.gate", self.hidden_size, self.num_experts, ShardKind.REPLICATED
                )
            )
            if self.num_shared_experts:
                width = self.moe_intermediate_size * self.num_shared_experts
                found += self._mlp(f"{prefix}.mlp.shared_experts", width)
        if layer in self.mtp_layers:
            width = 2 * self.hidden_size
            eh_proj = f"{prefix}.eh_proj"
            found.append(LinearSpec(eh_proj, width, self.hidden_size, ShardKind.REPLICATED))
        return found

    def expert_linears(self, layer: int, expert: int) -> tuple[LinearSpec, LinearSpec, LinearSpec]:
        """gate, up and down projection of one routed expert, not cut."""
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        return self._mlp(prefix, self.moe_intermediate_size)

    def tensors(self) -> Iterator[TensorSpec]:
        """Every tensor of the unquantised model under its checkpoint name."""
        embedding = (self.vocab_size, self.hidden_size)
        yield TensorSpec("model.embed_tokens.weight", embedding)
        for layer in self.layers:
            yield from self._layer_tensors(layer)
        yield TensorSpec("model.norm.weight", (self.hidden_size,))
        yield TensorSpec("lm_head.weight", embedding, self.has_tied_head)

    def _layer_tensors(self, layer: int) -> Iterator[TensorSpec]:
        prefix = f"model.layers.{layer}"
        for spec in self.linears(layer):
            yield TensorSpec(f"{spec.name}.weight", spec.weight_shape)
            if spec.has_bias:
                yield TensorSpec(f"{spec.name}.bias", (spec.out_features,))
        for name in self._norms(layer):
            yield TensorSpec(f"{prefix}.{name}.weight", (self.hidden_size,))
        if self.use_qk_norm:
            for name in ("q_norm", "k_norm"):
                yield TensorSpec(f"{prefix}.self_attn.{name}.weight", (self.head_dim,))
        if layer in self.moe_layers:
            bias = f"{prefix}.mlp.gate.e_score_correction_bias"
            yield TensorSpec(bias, (self.num_experts,))
            for expert in range(self.num_experts):
                for spec in self.expert_linears(layer, expert):
                    yield TensorSpec(f"{spec.name}.weight", spec.weight_shape)
        if layer in self.mtp_layers:
            for name in ("embed_tokens", "shared_head.head"):
                shape = (self.vocab_size, self.hidden_size)
                yield TensorSpec(f"{prefix}.{name}.weight", shape, is_optional=True)

    def _norms(self, layer: int) -> list[str]:
        norms = ["input_layernorm", "post_attention_layernorm"]
        return norms + (["enorm", "hnorm", "shared_head.norm"] if layer in self.mtp_layers else [])

    def _attention(self, prefix: str) -> list[LinearSpec]:
        hidden, bias = self.hidden_size, self.attention_bias
        query = self.num_attention_heads * self.head_dim
        key = self.num_key_value_heads * self.head_dim
        return [
            LinearSpec(f"{prefix}.q_proj", hidden, query, ShardKind.COLUMN, bias),
            LinearSpec(f"{prefix}.k_proj", hidden, key, ShardKind.COLUMN, bias),
            LinearSpec(f"{prefix}.v_proj", hidden, key, ShardKind.COLUMN, bias),
            LinearSpec(f"{prefix}.o_proj", query, hidden, ShardKind.ROW),
        ]

    def _mlp(self, prefix: str, width: int) -> tuple[LinearSpec, LinearSpec, LinearSpec]:
        hidden = self.hidden_size
        return (
            LinearSpec(f"{prefix}.gate_proj", hidden, width, ShardKind.COLUMN),
            LinearSpec(f"{prefix}.up_proj", hidden, width, ShardKind.COLUMN),
            LinearSpec(f"{prefix}.down_proj", width, hidden, ShardKind.ROW),
        )


def _count(config: Mapping[str, Any], key: str, default: int) -> int:
    """A key that may be 0, null or absent."""
    value = config.get(key, default)
    return (
        integer({key: value}, key, _WHERE)
        if value is not None and not (is_int(value) and value == 0)
        else 0
    )


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"{_WHERE}: {key} must be true or false, got {value!r}")
    return value

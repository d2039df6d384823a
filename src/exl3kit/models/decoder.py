"""Names and shapes of a decoder-only model: attention of one kind, dense MLPs, routed experts.

Every architecture known here is one `DecoderMap`; they differ in its values (see `architectures`).
The layers `moe_layers` have routed and shared experts, the others a dense MLP. A
multi-token-prediction (MTP) layer is named like a decoder layer, from `num_hidden_layers` on, and
adds `eh_proj`, `enorm`, `hnorm` and `shared_head.norm`; published files also carry copies of the
embedding and the head there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from exl3kit.models.attention import Gqa, Mla
from exl3kit.models.base import LinearSpec, ShardKind, TensorSpec


@dataclass(frozen=True, slots=True)
class Moe:
    """Routed experts of width `intermediate_size`, and shared ones of `shared_size` together."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    shared_size: int
    has_correction_bias: bool


@dataclass(frozen=True)
class DecoderMap:
    """Names and shapes of one model; sizes in elements.

    `moe_layers` are those with routed experts, ascending, multi-token-prediction layers included;
    none, and `moe` is None, for a dense model.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_mtp_layers: int
    moe_layers: tuple[int, ...]
    attention: Gqa | Mla
    moe: Moe | None
    has_mlp_bias: bool
    has_tied_head: bool

    @property
    def moe_intermediate_size(self) -> int:
        """I, width of one routed expert; 0 for a dense model."""
        return self.moe.intermediate_size if self.moe else 0

    @property
    def num_experts(self) -> int:
        """E, routed experts a layer; 0 for a dense model."""
        return self.moe.num_experts if self.moe else 0

    @property
    def layers(self) -> range:
        """All decoder layers, multi-token-prediction layers included."""
        return range(self.num_hidden_layers + self.num_mtp_layers)

    @property
    def mtp_layers(self) -> range:
        """The multi-token-prediction layers; they follow the target's layers."""
        return range(self.num_hidden_layers, self.num_hidden_layers + self.num_mtp_layers)

    def linears(self, layer: int) -> list[LinearSpec]:
        """Attention, router, dense MLP or shared experts, and an MTP layer's `eh_proj`."""
        prefix, hidden = f"model.layers.{layer}", self.hidden_size
        found = self.attention.linears(layer, hidden)
        if self.moe is None or layer not in self.moe_layers:
            found += self._mlp(f"{prefix}.mlp", self.intermediate_size, self.has_mlp_bias)
        else:
            gate = f"{prefix}.mlp.gate"
            found.append(LinearSpec(gate, hidden, self.moe.num_experts, ShardKind.REPLICATED))
            if self.moe.shared_size:
                found += self._mlp(f"{prefix}.mlp.shared_experts", self.moe.shared_size)
        if layer in self.mtp_layers:
            eh_proj = f"{prefix}.eh_proj"
            found.append(LinearSpec(eh_proj, 2 * hidden, hidden, ShardKind.REPLICATED))
        return found

    def expert_linears(self, layer: int, expert: int) -> tuple[LinearSpec, LinearSpec, LinearSpec]:
        """gate, up and down projection of one routed expert, not cut."""
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        return self._mlp(prefix, self.moe_intermediate_size)

    def ways(self, spec: LinearSpec, tp: int) -> int:
        """Different parts of a linear that `tp` ranks hold: 1 if it is not cut at all.

        Fewer than `tp` where there are fewer key-value heads than ranks and they are repeated.
        """
        if spec.shard is ShardKind.REPLICATED:
            return 1
        is_kv = spec.name.endswith((".k_proj", ".v_proj"))
        if is_kv and isinstance(self.attention, Gqa):
            return min(tp, self.attention.num_kv_heads)
        return tp

    def tensors(self) -> Iterator[TensorSpec]:
        """Every tensor of the unquantised model under its checkpoint name."""
        embedding = (self.vocab_size, self.hidden_size)
        yield TensorSpec("model.embed_tokens.weight", embedding)
        for layer in self.layers:
            yield from self.layer_tensors(layer)
        yield TensorSpec("model.norm.weight", (self.hidden_size,))
        yield TensorSpec("lm_head.weight", embedding, self.has_tied_head)

    def layer_tensors(self, layer: int) -> Iterator[TensorSpec]:
        """The tensors of one layer, routed experts last."""
        prefix = f"model.layers.{layer}"
        for spec in self.linears(layer):
            yield TensorSpec(f"{spec.name}.weight", spec.weight_shape, spec.is_optional)
            if spec.has_bias:
                yield TensorSpec(f"{spec.name}.bias", (spec.out_features,))
        yield from self._vectors(layer)
        if layer in self.mtp_layers:
            for name in ("embed_tokens", "shared_head.head"):
                shape = (self.vocab_size, self.hidden_size)
                yield TensorSpec(f"{prefix}.{name}.weight", shape, is_optional=True)
        if self.moe is not None and layer in self.moe_layers:
            for expert in range(self.moe.num_experts):
                for spec in self.expert_linears(layer, expert):
                    yield TensorSpec(f"{spec.name}.weight", spec.weight_shape)

    def _vectors(self, layer: int) -> Iterator[TensorSpec]:
        prefix = f"model.layers.{layer}"
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["enorm", "hnorm", "shared_head.norm"] if layer in self.mtp_layers else []
        for name in norms:
            yield TensorSpec(f"{prefix}.{name}.weight", (self.hidden_size,))
        yield from self.attention.vectors(layer)
        if self.moe is not None and self.moe.has_correction_bias and layer in self.moe_layers:
            bias = f"{prefix}.mlp.gate.e_score_correction_bias"
            yield TensorSpec(bias, (self.moe.num_experts,))

    def _mlp(
        self, prefix: str, width: int, has_bias: bool = False
    ) -> tuple[LinearSpec, LinearSpec, LinearSpec]:
        hidden = self.hidden_size
        return (
            LinearSpec(f"{prefix}.gate_proj", hidden, width, ShardKind.COLUMN, has_bias),
            LinearSpec(f"{prefix}.up_proj", hidden, width, ShardKind.COLUMN, has_bias),
            LinearSpec(f"{prefix}.down_proj", width, hidden, ShardKind.ROW, has_bias),
        )

"""The two kinds of attention: tensors they have, and what they keep of each token.

Gqa  grouped queries; the cache holds a key and a value of `head_dim` for each key-value head.
Mla  multi-head latent attention; the cache holds one compressed vector of `kv_lora_rank` and one
     rotated key, which every rank needs whole. DeepSeek-V3.2 and GLM-5 add an `Indexer`, a small
     attention of its own that picks the tokens to attend to.
"""

from __future__ import annotations

from dataclasses import dataclass

from exl3kit.models.base import LinearSpec, ShardKind, TensorSpec

COLUMN, ROW, REPLICATED = ShardKind.COLUMN, ShardKind.ROW, ShardKind.REPLICATED


@dataclass(frozen=True, slots=True)
class Gqa:
    """Grouped-query attention; `biased` names the projections that have a bias."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    biased: tuple[str, ...] = ()
    has_qk_norm: bool = False

    def linears(self, layer: int, hidden: int) -> list[LinearSpec]:
        """q, k, v and o projection of a layer; `hidden` is the width of the residual stream."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {
            "q_proj": (hidden, query, COLUMN),
            "k_proj": (hidden, key, COLUMN),
            "v_proj": (hidden, key, COLUMN),
            "o_proj": (query, hidden, ROW),
        }
        return [
            LinearSpec(f"{_module(layer)}.{name}", ins, outs, shard, name in self.biased)
            for name, (ins, outs, shard) in sizes.items()
        ]

    def vectors(self, layer: int) -> list[TensorSpec]:
        """Norm weights of a layer."""
        names = ("q_norm", "k_norm") if self.has_qk_norm else ()
        return [TensorSpec(f"{_module(layer)}.{name}.weight", (self.head_dim,)) for name in names]


@dataclass(frozen=True, slots=True)
class Indexer:
    """The token picker of sparse MLA: `num_heads` heads of `head_dim`, one key a token.

    `shared_layers` take the choice of an earlier layer and need no tensors of their own; some files
    carry them all the same.
    """

    num_heads: int
    head_dim: int
    shared_layers: frozenset[int] = frozenset()

    def linears(self, layer: int, hidden: int, q_rank: int) -> list[LinearSpec]:
        """Query, key and head-weight projection of a layer; every rank computes all of it."""
        sizes = {
            "wq_b": (q_rank, self.num_heads * self.head_dim),
            "wk": (hidden, self.head_dim),
            "weights_proj": (hidden, self.num_heads),
        }
        prefix, is_optional = f"{_module(layer)}.indexer", layer in self.shared_layers
        return [
            LinearSpec(f"{prefix}.{name}", ins, outs, REPLICATED, is_optional=is_optional)
            for name, (ins, outs) in sizes.items()
        ]

    def vectors(self, layer: int) -> list[TensorSpec]:
        """The layer norm of the key."""
        prefix, is_optional = f"{_module(layer)}.indexer.k_norm", layer in self.shared_layers
        return [
            TensorSpec(f"{prefix}.{name}", (self.head_dim,), is_optional)
            for name in ("weight", "bias")
        ]


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention; without `q_lora_rank` the query is projected in one step."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    has_bias: bool = False
    indexer: Indexer | None = None

    def linears(self, layer: int, hidden: int) -> list[LinearSpec]:
        """Query, compressed key-value, output and indexer projections of a layer.

        The projections into the compressed spaces are needed whole on every rank.
        """
        heads, bias, prefix = self.num_heads, self.has_bias, _module(layer)
        query = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        compressed = self.kv_lora_rank + self.qk_rope_head_dim
        expanded = heads * (self.qk_nope_head_dim + self.v_head_dim)
        rank = self.q_lora_rank
        if rank is None:
            found = [LinearSpec(f"{prefix}.q_proj", hidden, query, COLUMN)]
        else:
            found = [
                LinearSpec(f"{prefix}.q_a_proj", hidden, rank, REPLICATED, bias),
                LinearSpec(f"{prefix}.q_b_proj", rank, query, COLUMN),
            ]
        found += [
            LinearSpec(f"{prefix}.kv_a_proj_with_mqa", hidden, compressed, REPLICATED, bias),
            LinearSpec(f"{prefix}.kv_b_proj", self.kv_lora_rank, expanded, COLUMN),
            LinearSpec(f"{prefix}.o_proj", heads * self.v_head_dim, hidden, ROW, bias),
        ]
        if self.indexer is not None and rank is not None:
            found += self.indexer.linears(layer, hidden, rank)
        return found

    def vectors(self, layer: int) -> list[TensorSpec]:
        """Norm weights of a layer, and the bias of the indexer's layer norm."""
        sizes = {"kv_a_layernorm": self.kv_lora_rank, "q_a_layernorm": self.q_lora_rank}
        found = [
            TensorSpec(f"{_module(layer)}.{name}.weight", (size,))
            for name, size in sizes.items()
            if size is not None
        ]
        return found + (self.indexer.vectors(layer) if self.indexer is not None else [])


def _module(layer: int) -> str:
    return f"model.layers.{layer}.self_attn"

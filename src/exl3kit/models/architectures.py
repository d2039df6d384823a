"""The architectures known: what a config.json leaves unsaid, one row for each.

Names, biases and defaults are those of the Hugging Face models of the same names; next-token layers
follow vLLM's classes, since transformers has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from exl3kit.checkpoint.keys import show
from exl3kit.errors import CheckpointError, UnsupportedError
from exl3kit.models.attention import Gqa, Indexer, Mla
from exl3kit.models.config_keys import WHERE, count, flag, optional_size, size
from exl3kit.models.decoder import DecoderMap, Moe

_QKV = ("q_proj", "k_proj", "v_proj")
_QKVO = (*_QKV, "o_proj")
_CORRECTED = "noaux_tc"  # the routing method that adds a bias to each expert's score


@dataclass(frozen=True)
class Architecture:
    """What is fixed for an architecture.

    `biased` are the attention projections that `attention_bias` gives a bias; `qk_norm` is true,
    false, or the config key that decides; `experts_key` names the number of routed experts, None in
    a dense model; `num_dense_layers` stands for an absent first_k_dense_replace.
    """

    attention: Literal["gqa", "mla"]
    biased: tuple[str, ...] = _QKVO
    qk_norm: bool | str = False
    has_indexer: bool = False
    experts_key: str | None = None
    num_dense_layers: int = 0
    correction_bias: Literal["always", "never", "by topk_method"] = "never"


_DEEPSEEK_V3 = Architecture(
    "mla", experts_key="n_routed_experts", num_dense_layers=3, correction_bias="always"
)
_SPARSE = Architecture(
    "mla",
    has_indexer=True,
    experts_key="n_routed_experts",
    num_dense_layers=3,
    correction_bias="always",
)
ARCHITECTURES = {
    "DeepseekV2ForCausalLM": Architecture(
        "mla", experts_key="n_routed_experts", correction_bias="by topk_method"
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": _SPARSE,
    "Glm4MoeForCausalLM": Architecture(
        "gqa",
        biased=_QKV,
        qk_norm="use_qk_norm",
        experts_key="n_routed_experts",
        num_dense_layers=1,
        correction_bias="always",
    ),
    "Glm4MoeLiteForCausalLM": Architecture(
        "mla", experts_key="n_routed_experts", num_dense_layers=1, correction_bias="always"
    ),
    "GlmMoeDsaForCausalLM": _SPARSE,
    "LlamaForCausalLM": Architecture("gqa"),
    "Qwen3ForCausalLM": Architecture("gqa", qk_norm=True),
    "Qwen3MoeForCausalLM": Architecture("gqa", qk_norm=True, experts_key="num_experts"),
}


def read_model(name: str, config: Mapping[str, Any]) -> DecoderMap:
    """The model of architecture `name`, a key of ARCHITECTURES, that config.json describes.

    CheckpointError names a key that is missing or wrong, UnsupportedError one that is valid but
    describes a model of another build.
    """
    fixed = ARCHITECTURES[name]
    layers = count(config, "num_hidden_layers")
    if layers < 1:
        raise CheckpointError(f"{WHERE}: num_hidden_layers must be at least 1, got {layers}")
    attention = _mla(fixed, config, layers) if fixed.attention == "mla" else _gqa(fixed, config)
    moe = _moe(fixed, config)
    return DecoderMap(
        architecture=name,
        vocab_size=size(config, "vocab_size"),
        hidden_size=size(config, "hidden_size"),
        intermediate_size=size(config, "intermediate_size"),
        num_hidden_layers=layers,
        num_mtp_layers=count(config, "num_nextn_predict_layers") if moe else 0,
        num_dense_layers=_num_dense_layers(fixed, config, layers) if moe else layers,
        attention=attention,
        moe=moe,
        has_mlp_bias=flag(config, "mlp_bias"),
        has_tied_head=flag(config, "tie_word_embeddings"),
    )


def _gqa(fixed: Architecture, config: Mapping[str, Any]) -> Gqa:
    heads = size(config, "num_attention_heads")
    norm = fixed.qk_norm
    return Gqa(
        num_heads=heads,
        num_kv_heads=size(config, "num_key_value_heads", heads),
        head_dim=size(config, "head_dim", size(config, "hidden_size") // heads),
        biased=fixed.biased if flag(config, "attention_bias") else (),
        has_qk_norm=flag(config, norm) if isinstance(norm, str) else norm,
    )


def _mla(fixed: Architecture, config: Mapping[str, Any], layers: int) -> Mla:
    query_rank = optional_size(config, "q_lora_rank")
    if fixed.has_indexer and query_rank is None:
        raise CheckpointError(f"{WHERE}: q_lora_rank must be set where there is an indexer")
    return Mla(
        num_heads=size(config, "num_attention_heads"),
        q_lora_rank=query_rank,
        kv_lora_rank=size(config, "kv_lora_rank"),
        qk_nope_head_dim=size(config, "qk_nope_head_dim"),
        qk_rope_head_dim=size(config, "qk_rope_head_dim"),
        v_head_dim=size(config, "v_head_dim"),
        has_bias=flag(config, "attention_bias"),
        indexer=_indexer(config, layers) if fixed.has_indexer else None,
    )


def _indexer(config: Mapping[str, Any], layers: int) -> Indexer:
    return Indexer(
        num_heads=size(config, "index_n_heads"),
        head_dim=size(config, "index_head_dim"),
        shared_layers=frozenset(n for n in range(layers) if _shares_indexer(config, n)),
    )


def _shares_indexer(config: Mapping[str, Any], layer: int) -> bool:
    """GLM-5's pattern of layers with an indexer: a list, a string of F and S, or every n-th."""
    pattern = config.get("indexer_types") or config.get("index_topk_pattern")
    if isinstance(pattern, list | str):
        return layer < len(pattern) and pattern[layer] in ("shared", "S")
    frequency = max(count(config, "index_topk_freq", 1), 1)
    offset = count(config, "index_skip_topk_offset", 2)
    return max(layer - offset + 1, 0) % frequency != 0


def _moe(fixed: Architecture, config: Mapping[str, Any]) -> Moe | None:
    if fixed.experts_key is None:
        return None
    experts = count(config, fixed.experts_key)
    if not experts:
        return None
    width = size(config, "moe_intermediate_size")
    per_token = count(config, "num_experts_per_tok")
    if not 1 <= per_token <= experts:
        raise CheckpointError(
            f"{WHERE}: num_experts_per_tok must be 1..{experts}, the number of experts, "
            f"got {per_token}"
        )
    by_method = config.get("topk_method") == _CORRECTED
    return Moe(
        num_experts=experts,
        num_experts_per_tok=per_token,
        intermediate_size=width,
        shared_size=width * count(config, "n_shared_experts"),
        has_correction_bias=fixed.correction_bias == "always"
        or (fixed.correction_bias == "by topk_method" and by_method),
    )


def _num_dense_layers(fixed: Architecture, config: Mapping[str, Any], layers: int) -> int:
    """Dense layers in front; a model that mixes them in elsewhere is refused."""
    for key, usual in (("moe_layer_freq", 1), ("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if config.get(key) not in (None, usual):
            raise UnsupportedError(
                f"{WHERE}: {key} {show(config[key])}: expected {usual}; models with dense layers "
                "between layers of routed experts are not supported"
            )
    types = config.get("mlp_layer_types")
    if types is None:
        return min(count(config, "first_k_dense_replace", fixed.num_dense_layers), layers)
    dense = types.count("dense") if isinstance(types, list) else 0
    if types != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise UnsupportedError(
            f"{WHERE}: mlp_layer_types must be {layers} times 'dense' or 'sparse', all dense "
            f"layers first, got {show(types)}"
        )
    return dense

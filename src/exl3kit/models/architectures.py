"""The architectures known: what a config.json leaves unsaid, one row for each.

Names, biases and defaults are those of the Hugging Face models of the same names; next-token layers
follow vLLM's classes, since transformers has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from exl3kit.checkpoint.jsonfile import is_int
from exl3kit.checkpoint.keys import show
from exl3kit.errors import CheckpointError
from exl3kit.models.attention import Gqa, Indexer, Mla
from exl3kit.models.config_keys import WHERE, count, flag, optional_size, size
from exl3kit.models.decoder import DecoderMap, Moe

_QKV = ("q_proj", "k_proj", "v_proj")
_QKVO = (*_QKV, "o_proj")
# The name under which save_pretrained of transformers 5 writes Qwen3-MoE's num_experts.
_SAVED_EXPERTS_KEY = "num_local_experts"
_CORRECTED = "noaux_tc"  # the routing method that adds a bias to each expert's score


@dataclass(frozen=True)
class Architecture:
    """What is fixed for an architecture.

    `biased` are the attention projections that `attention_bias` gives a bias; `qk_norm` is true,
    false, or the config key that decides; `experts_key` names the number of routed experts, None in
    a dense model; `num_dense_layers` stands for an absent first_k_dense_replace. `frequency_key`
    names the key by which only every n-th layer has experts, None where no key does.
    """

    attention: Literal["gqa", "mla"]
    biased: tuple[str, ...] = _QKVO
    qk_norm: bool | str = False
    has_indexer: bool = False
    experts_key: str | None = None
    num_dense_layers: int = 0
    frequency_key: Literal["moe_layer_freq", "decoder_sparse_step"] | None = None
    correction_bias: Literal["always", "never", "by topk_method"] = "never"


_DEEPSEEK_V3 = Architecture(
    "mla",
    experts_key="n_routed_experts",
    num_dense_layers=3,
    frequency_key="moe_layer_freq",
    correction_bias="always",
)
_SPARSE = replace(_DEEPSEEK_V3, has_indexer=True)
ARCHITECTURES = {
    "DeepseekV2ForCausalLM": replace(
        _DEEPSEEK_V3, num_dense_layers=0, correction_bias="by topk_method"
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
    "Glm4MoeLiteForCausalLM": replace(_DEEPSEEK_V3, num_dense_layers=1),
    "GlmMoeDsaForCausalLM": _SPARSE,
    "LlamaForCausalLM": Architecture("gqa"),
    "Qwen3ForCausalLM": Architecture("gqa", qk_norm=True),
    "Qwen3MoeForCausalLM": Architecture(
        "gqa", qk_norm=True, experts_key="num_experts", frequency_key="decoder_sparse_step"
    ),
}


def read_model(name: str, config: Mapping[str, Any]) -> DecoderMap:
    """The model of architecture `name`, a key of ARCHITECTURES, that config.json describes.

    CheckpointError names a key that is missing or wrong.
    """
    fixed = ARCHITECTURES[name]
    layers = count(config, "num_hidden_layers")
    if layers < 1:
        raise CheckpointError(f"{WHERE}: num_hidden_layers must be at least 1, got {layers}")
    attention = _mla(fixed, config, layers) if fixed.attention == "mla" else _gqa(fixed, config)
    moe = _moe(fixed, config)
    mtp_layers = count(config, "num_nextn_predict_layers") if moe else 0
    return DecoderMap(
        architecture=name,
        vocab_size=size(config, "vocab_size"),
        hidden_size=size(config, "hidden_size"),
        intermediate_size=size(config, "intermediate_size"),
        num_hidden_layers=layers,
        num_mtp_layers=mtp_layers,
        moe_layers=_moe_layers(fixed, config, layers, mtp_layers) if moe else (),
        attention=attention,
        moe=moe,
        has_mlp_bias=flag(config, "mlp_bias"),
        has_tied_head=flag(config, "tie_word_embeddings"),
    )


def _gqa(fixed: Architecture, config: Mapping[str, Any]) -> Gqa:
    heads = size(config, "num_attention_heads")
    pairs = size(config, "num_key_value_heads", heads)
    if heads % pairs:
        raise CheckpointError(
            f"{WHERE}: num_attention_heads must be a multiple of num_key_value_heads {pairs}, "
            f"got {heads}"
        )
    norm = fixed.qk_norm
    return Gqa(
        num_heads=heads,
        num_kv_heads=pairs,
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
    experts = count(config, fixed.experts_key) or count(config, _SAVED_EXPERTS_KEY)
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


def _moe_layers(
    fixed: Architecture, config: Mapping[str, Any], layers: int, mtp_layers: int
) -> tuple[int, ...]:
    """The layers with routed experts, next-token layers included.

    By a list of layer types, whose next-token layers all have experts, else by counting as the
    models do: from the first layer that may have experts on every n-th, save those named.
    """
    numbers = range(layers + mtp_layers)
    if (types := config.get("mlp_layer_types")) is not None:
        sparse = _sparse_by_type(types, layers)
        return tuple(n for n in numbers if n >= layers or sparse[n])
    frequency = size(config, fixed.frequency_key, 1) if fixed.frequency_key else 1
    if fixed.frequency_key == "decoder_sparse_step":
        dense = _dense_by_number(config.get("mlp_only_layers"))
        return tuple(n for n in numbers if (n + 1) % frequency == 0 and n not in dense)
    first = count(config, "first_k_dense_replace", fixed.num_dense_layers)
    return tuple(n for n in numbers if n >= first and n % frequency == 0)


def _sparse_by_type(types: Any, layers: int) -> list[bool]:
    is_list = isinstance(types, list) and len(types) == layers
    if not is_list or any(kind not in ("dense", "sparse") for kind in types):
        raise CheckpointError(
            f"{WHERE}: mlp_layer_types must be {layers} times 'dense' or 'sparse', "
            f"got {show(types)}"
        )
    return [kind == "sparse" for kind in types]


def _dense_by_number(numbers: Any) -> list[int]:
    found = [] if numbers is None else numbers
    if not isinstance(found, list) or not all(is_int(number) for number in found):
        raise CheckpointError(
            f"{WHERE}: mlp_only_layers must be a list of layer numbers, got {show(numbers)}"
        )
    return found

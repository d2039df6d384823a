"""A config.json of a few hundred channels for every architecture that exl3kit knows."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 320  # a multiple of 64, vLLM's padding of the vocabulary
HIDDEN_SIZE = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
}
_GQA: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 64}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_INDEXER: dict[str, Any] = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 8}
_MOE: dict[str, Any] = {
    "moe_intermediate_size": 256,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
_DEEPSEEK_MOE: dict[str, Any] = {
    **_MOE,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
_BY_TYPE: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {
            **_MLA,
            **_DEEPSEEK_MOE,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_MLA, **_DEEPSEEK_MOE}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", {**_MLA, **_DEEPSEEK_MOE, **_INDEXER}),
    "glm4_moe": ("Glm4MoeForCausalLM", {**_GQA, **_DEEPSEEK_MOE, "use_qk_norm": True}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {**_MLA, **_DEEPSEEK_MOE}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", {**_MLA, **_DEEPSEEK_MOE, **_INDEXER}),
    "llama": ("LlamaForCausalLM", _GQA),
    "qwen3": ("Qwen3ForCausalLM", _GQA),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_GQA, **_MOE}),
}
MODEL_TYPES = tuple(_BY_TYPE)
MTP_TYPES = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
MOE_TYPES = tuple(name for name in MODEL_TYPES if name not in ("llama", "qwen3"))


def tiny_config_of(
    model_type: str, num_layers: int = 2, num_experts: int = 4, mtp_layers: int = 0
) -> dict[str, Any]:
    """The config of a tiny `model_type`, one of MODEL_TYPES: one dense layer, then expert layers.

    `mtp_layers` is for MTP_TYPES only; llama and qwen3 have no experts.
    """
    architecture, keys = _BY_TYPE[model_type]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": num_layers,
        **_COMMON,
        **keys,
    }
    if model_type == "qwen3_moe":
        config |= {"num_experts": num_experts}
    elif model_type in MOE_TYPES:
        config |= {"n_routed_experts": num_experts}
    if model_type in MTP_TYPES:
        config |= {"num_nextn_predict_layers": mtp_layers}
    if model_type == "glm4_moe_lite":
        config |= {"mlp_layer_types": ["dense"] + ["sparse"] * (num_layers - 1)}
    return config

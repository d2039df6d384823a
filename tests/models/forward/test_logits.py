"""Logits of every architecture against transformers' own class, in fp32."""

from __future__ import annotations

from typing import Any

import pytest

from exl3kit.models.forward import forward_model

from . import reference

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LAYER_TYPES = ["full_attention", "sliding_attention", "full_attention"]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("glm4_moe", {}),
    ("glm4_moe", {"n_group": 4, "topk_group": 2}),
    ("glm4_moe", {"n_group": 2, "topk_group": 1, "norm_topk_prob": False}),
    ("glm4_moe", {"use_qk_norm": False, "attention_bias": True, "n_shared_experts": 2}),
    ("glm4_moe", {"num_key_value_heads": 4, "first_k_dense_replace": 0}),
    ("glm4_moe", {"partial_rotary_factor": 1.0}),
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "head_dim": 32}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": LAYER_TYPES}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"mlp_only_layers": [1]}),
    ("deepseek_v2", {}),
    ("deepseek_v2", {"q_lora_rank": 32, "attention_bias": True, "routed_scaling_factor": 4.0}),
    (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    ("deepseek_v2", {"rope_scaling": YARN}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True}),
    ("deepseek_v3", {"n_group": 2, "topk_group": 1, "rope_scaling": YARN}),
    ("deepseek_v3", {"rope_scaling": YARN | {"mscale": 0.7}}),
    ("glm4_moe_lite", {}),
    ("glm4_moe_lite", {"rope_interleave": False, "v_head_dim": 32}),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    ("deepseek_v32", {}),
    ("glm_moe_dsa", {}),
]
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8,
        "beta_slow": 2,
        "truncate": False,
        "attention_factor": 1.25,
    },
]


def check(config: dict[str, Any], lengths: tuple[int, ...] = (1, 7, 37)) -> None:
    model = reference.reference_model(config)
    tensors = reference.checkpoint_tensors(model)
    for length in lengths:
        tokens = reference.token_rows(3, length)
        got = reference.our_logits(forward_model(config), tensors, tokens)
        reference.assert_close(got, reference.their_logits(model, tokens))


@pytest.mark.parametrize(("model_type", "changes"), CASES)
def test_logits_equal_transformers(model_type: str, changes: dict[str, Any]) -> None:
    check(reference.tiny(model_type, **changes))


@pytest.mark.parametrize("rope", ROPES)
def test_rope_types(rope: dict[str, Any]) -> None:
    check(reference.tiny("llama", rope_parameters=rope | {"rope_theta": 5000.0}), (130,))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("deepseek_v32", {}),
        ("glm_moe_dsa", {}),
        ("glm_moe_dsa", {"num_hidden_layers": 5, "index_topk_freq": 2}),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full"]}),
    ],
)
def test_rows_longer_than_the_choice_of_keys(model_type: str, changes: dict[str, Any]) -> None:
    check(reference.tiny(model_type, index_topk=12, **changes), (12, 13, 40))

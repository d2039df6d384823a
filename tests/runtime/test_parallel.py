"""Which tensor-parallel sizes are possible: published models, and the reason for every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from exl3kit.models.registry import model_map
from exl3kit.runtime.parallel import tp_faults
from exl3kit.testing.tiny_configs import tiny_config_of
from tests.runtime.glm52 import GLM_52

QWEN3_235B: dict[str, Any] = tiny_config_of("qwen3_moe") | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
GLM_45_AIR: dict[str, Any] = tiny_config_of("glm4_moe") | {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def possible(config: dict[str, Any], file_tp: int | None = None) -> list[int]:
    model = model_map(config)
    return [tp for tp in range(1, 17) if not tp_faults(model, tp, file_tp, is_expert)]


def is_expert(module: str) -> bool:
    return ".mlp.experts." in module


@pytest.mark.parametrize(
    "config, sizes",
    [(GLM_52, [1, 2, 4, 8, 16]), (QWEN3_235B, [1, 2, 4]), (GLM_45_AIR, [1])],
)
def test_published_models(config: dict[str, Any], sizes: list[int]) -> None:
    """Blocks allow 1536 at 1 2 3 4 6 12 and 1408 at 1 11; heads and vocabulary rule more out."""
    assert possible(config) == sizes


def test_file_cut_for_four_ranks() -> None:
    """At fewer ranks a rank runs several slices of each expert."""
    assert possible(GLM_52, file_tp=4) == [1, 2, 4]
    model = model_map(GLM_52)
    assert "cut it finer" in tp_faults(model, 8, 4, is_expert)[-1]
    assert "quantise again" in tp_faults(model, 3, 4, is_expert)[-1]


REASONS = [
    (GLM_52, 3, "64 attention heads cannot be divided by 3"),
    (GLM_52, 3, "vocabulary: 154880 (padded to 64) cannot be divided by 3"),
    (GLM_52, 32, "mlp.experts.*.gate_proj: 2048 / 32 = 64 is not a multiple of 128"),
    (GLM_45_AIR, 16, "mlp.experts.*.gate_proj: 1408 / 16 = 88 is not a multiple of 128"),
    (QWEN3_235B, 6, "4 key-value heads can be neither divided by 6 nor repeated"),
    (GLM_45_AIR, 11, "mlp.gate_proj: 10944 cannot be divided by 11"),
]


@pytest.mark.parametrize("config, tp, reason", REASONS)
def test_every_reason_is_given(config: dict[str, Any], tp: int, reason: str) -> None:
    assert reason in tp_faults(model_map(config), tp, None, is_expert)


def test_exl3_attention_needs_blocks_too() -> None:
    """Two key-value heads of 64 are one block: EXL3 cannot part them, BF16 can."""
    model = model_map(tiny_config_of("llama"))
    assert tp_faults(model, 2, None, is_expert) == []
    (fault, *_) = tp_faults(model, 2, None, lambda module: True)
    assert fault == "self_attn.k_proj: 128 / 2 = 64 is not a multiple of 128"


def test_a_reason_of_dense_and_expert_layers_is_given_once() -> None:
    model = model_map(tiny_config_of("glm4_moe"))
    faults = tp_faults(model, 2, None, lambda module: True)
    assert len(faults) == len(set(faults)) > 0

"""What a config may say: both spellings of rope, and refusals that name the value."""

from __future__ import annotations

import math
from typing import Any

import pytest

from exl3kit.errors import CheckpointError, Exl3Error, UnsupportedError
from exl3kit.models.architectures import ARCHITECTURES
from exl3kit.models.forward import forward_model
from exl3kit.models.forward.gqa import GqaAttention
from exl3kit.models.forward.registry import FAMILIES
from exl3kit.models.forward.routers import SigmoidRouter
from exl3kit.testing.tiny_configs import MODEL_TYPES

from .reference import tiny

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_every_architecture_has_a_forward_pass() -> None:
    assert FAMILIES.keys() == ARCHITECTURES.keys()


def test_older_spelling_of_rope() -> None:
    old = tiny("glm4_moe", rope_theta=5000.0, partial_rotary_factor=0.25, rope_scaling=None)
    new = tiny("glm4_moe") | {
        "rope_theta": None,
        "rope_parameters": {"rope_theta": 5000.0, "partial_rotary_factor": 0.25},
    }
    ropes = []
    for config in (old, new):
        attention = forward_model(config).attention
        assert isinstance(attention, GqaAttention)
        ropes.append(attention.rope.frequencies.tolist())
    assert ropes[0] == ropes[1]
    assert len(ropes[0]) == 8 and ropes[0][1] == pytest.approx(5000 ** (-1 / 8))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_configs_as_transformers_writes_them(model_type: str) -> None:
    """Its defaults are those of a published model of each architecture."""
    transformers = pytest.importorskip("transformers")
    written = transformers.AutoConfig.for_model(model_type).to_dict()
    name = tiny(model_type)["architectures"]
    unsaid = {"num_experts_per_tok": 6, "head_dim": 128}  # of DeepSeek V2 and of GLM-4.5
    config = {**unsaid, **_present(written), "architectures": name}
    model = forward_model(config)
    assert model.num_hidden_layers == written["num_hidden_layers"]
    assert model.eps == written["rms_norm_eps"]


def _present(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


@pytest.mark.parametrize(
    ("model_type", "changes", "error", "words"),
    [
        ("llama", {"architectures": ["OlmoForCausalLM"]}, UnsupportedError, "OlmoForCausalLM"),
        (
            "llama",
            {"hidden_act": "gelu"},
            UnsupportedError,
            "hidden_act: expected 'silu', got 'gelu'",
        ),
        (
            "llama",
            {"sliding_window": 128},
            UnsupportedError,
            "sliding_window: expected None, got 128",
        ),
        (
            "llama",
            {"rms_norm_eps": "small"},
            CheckpointError,
            "rms_norm_eps must be a positive num",
        ),
        ("qwen3", {"mlp_bias": True}, UnsupportedError, "mlp_bias: expected False, got True"),
        ("qwen3", {"layer_types": ["chunked"] * 3}, UnsupportedError, "layer_types: .*'chunked'"),
        ("qwen3", {"layer_types": ["full_attention"]}, UnsupportedError, "expected 3 times"),
        ("qwen3", {"layer_types": 3}, UnsupportedError, "expected 3 times full_attention, got 3"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, UnsupportedError, "'sliding_att"),
        ("glm4_moe", {"topk_method": "greedy"}, UnsupportedError, "topk_method: .*'greedy'"),
        ("glm4_moe", {"scoring_func": "softmax"}, UnsupportedError, "scoring_func: .*'softmax'"),
        ("glm4_moe", {"n_group": 3}, CheckpointError, "n_group 3, topk_group 1"),
        ("glm4_moe", {"n_group": 8, "topk_group": 4}, CheckpointError, "n_group 8, topk_group 4"),
        ("glm4_moe", {"n_group": 16}, CheckpointError, "n_group 16"),
        ("deepseek_v2", {"norm_topk_prob": True}, UnsupportedError, "norm_topk_prob: expected Fal"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, UnsupportedError, "scoring_func: .*'sigmoid'"),
        ("deepseek_v2", {"topk_method": "random"}, UnsupportedError, "topk_method: .*'random'"),
        ("deepseek_v32", {"rope_interleave": False}, UnsupportedError, "rope_interleave"),
        ("glm4_moe_lite", {"partial_rotary_factor": 0.5}, UnsupportedError, "turns 32 of qk_rope"),
        ("glm_moe_dsa", {"index_topk": 0}, CheckpointError, "index_topk"),
        ("glm4_moe", {"partial_rotary_factor": 0.55}, UnsupportedError, "partial_rotary_factor"),
    ],
)
def test_refusals_name_the_value(
    model_type: str, changes: dict[str, Any], error: type[Exl3Error], words: str
) -> None:
    with pytest.raises(error, match=words):
        forward_model(tiny(model_type, **changes))


@pytest.mark.parametrize(
    ("rope", "error", "words"),
    [
        ({"rope_type": "longrope"}, UnsupportedError, "rope_type: expected .*, got 'longrope'"),
        ({"type": "dynamic", "factor": 2.0}, UnsupportedError, "got 'dynamic'"),
        ({"rope_type": "default", "factor": 2.0}, UnsupportedError, "factor 2.0: not known for"),
        ({"rope_type": "linear"}, CheckpointError, "factor must be a positive number, got None"),
        ({"rope_type": "yarn", "factor": 0}, CheckpointError, "factor must be .*, got 0"),
        ({"full_attention": {"rope_theta": 1e4}}, UnsupportedError, "full_attention"),
        ({"rope_type": ["yarn"]}, UnsupportedError, r"rope_type: .*, got \['yarn'\]"),
        (
            {"rope_type": "default", "rope_theta": 1.0},
            CheckpointError,
            "rope_theta must be above 1",
        ),
        (LLAMA3 | {"high_freq_factor": 1.0}, CheckpointError, "above low_freq_factor 1.0, got 1.0"),
        ("yarn", CheckpointError, "rope_parameters must be an object, got 'yarn'"),
    ],
)
def test_rope_refusals(rope: object, error: type[Exl3Error], words: str) -> None:
    with pytest.raises(error, match=words):
        forward_model(tiny("llama", rope_parameters=rope))


STRANGE = [-1, 0, 3, 2.5, 1e308, 5e-324, math.inf, math.nan, "x", [], ["x"], {}, {"a": 1}, True]
OPTIONAL = (
    "index_topk_freq",
    "indexer_types",
    "layer_types",
    "max_window_layers",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_interleave",
    "rope_parameters",
    "rope_scaling",
    "sliding_window",
)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_strange_values_are_computed_or_refused(model_type: str) -> None:
    base = tiny(model_type, use_sliding_window=model_type.startswith("qwen"))
    yarn = LLAMA3 | {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn = {k: v for k, v in yarn.items() if "freq" not in k} | {"beta_fast": 32, "beta_slow": 1}
    changes = [{key: value} for key in (*base, *OPTIONAL) for value in STRANGE]
    for rope in (LLAMA3, yarn):
        forward_model(base | {"rope_parameters": rope})
        changes += [{"rope_parameters": rope | {k: value}} for k in rope for value in STRANGE]
    refused = 0
    for change in changes:
        try:
            forward_model(base | change)
        except Exl3Error:
            refused += 1
    assert 0.2 < refused / len(changes) < 0.9


def test_deepseek_v2_with_a_correction_bias_routes_as_v3() -> None:
    router = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
    second, third = (forward_model(tiny(t, **router)) for t in ("deepseek_v2", "deepseek_v3"))
    assert isinstance(second.router, SigmoidRouter) and second.router == third.router

from __future__ import annotations

from typing import Any

import pytest

from exl3kit.errors import CheckpointError, UnsupportedError
from exl3kit.models.base import ShardKind
from exl3kit.models.registry import model_map
from exl3kit.testing.tiny_model import TinyGlm4Moe, tiny_config, tiny_tensors


@pytest.mark.parametrize(
    "spec",
    [
        TinyGlm4Moe(),
        TinyGlm4Moe(mtp_layers=1),
        TinyGlm4Moe(mtp_layers=2, mtp_own_head=True, dense_layers=2, num_layers=4),
    ],
)
def test_names_and_shapes_of_whole_models(spec: TinyGlm4Moe) -> None:
    tensors = tiny_tensors(spec)
    expected = {found.name: found for found in model_map(tiny_config(spec)).tensors()}
    assert tensors.keys() <= expected.keys()
    absent = expected.keys() - tensors.keys()
    assert all(expected[name].is_optional for name in absent)
    assert bool(absent) == (spec.mtp_layers > 0 and not spec.mtp_own_head)
    assert {n: tuple(t.shape) for n, t in tensors.items()} == {
        name: expected[name].shape for name in tensors
    }


def test_layers() -> None:
    model = model_map(tiny_config(TinyGlm4Moe(num_layers=4, dense_layers=2, mtp_layers=1)))
    assert list(model.layers) == [0, 1, 2, 3, 4]
    assert list(model.moe_layers) == [2, 3, 4]
    assert list(model.mtp_layers) == [4]


def test_how_linears_are_cut() -> None:
    model = model_map(tiny_config(TinyGlm4Moe(mtp_layers=1)))
    kinds = {spec.name.rpartition(".")[2]: spec.shard for spec in model.linears(3)}
    assert kinds["q_proj"] is ShardKind.COLUMN and kinds["o_proj"] is ShardKind.ROW
    assert kinds["gate"] is kinds["eh_proj"] is ShardKind.REPLICATED
    gate, up, down = model.expert_linears(1, 7)
    assert gate.name == "model.layers.1.mlp.experts.7.gate_proj"
    assert (gate.shard, up.shard, down.shard) == (
        ShardKind.COLUMN,
        ShardKind.COLUMN,
        ShardKind.ROW,
    )
    assert down.weight_shape == (256, 256)


def test_switches_add_their_tensors() -> None:
    config = tiny_config(TinyGlm4Moe()) | {"attention_bias": True, "use_qk_norm": False}
    shapes = {spec.name: spec.shape for spec in model_map(config).tensors()}
    assert shapes["model.layers.0.self_attn.k_proj.bias"] == (128,)
    assert "model.layers.0.self_attn.o_proj.bias" not in shapes
    assert "model.layers.0.self_attn.q_norm.weight" not in shapes
    tied = model_map(config | {"tie_word_embeddings": True})
    assert [spec.is_optional for spec in tied.tensors() if spec.name == "lm_head.weight"] == [True]


def test_head_dim_defaults_to_an_even_share() -> None:
    config = tiny_config(TinyGlm4Moe())
    del config["head_dim"]
    shapes = {spec.name: spec.shape for spec in model_map(config).tensors()}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (256, 256)


@pytest.mark.parametrize(
    "key, value",
    [
        ("hidden_size", None),
        ("hidden_size", "256"),
        ("n_routed_experts", True),
        ("num_hidden_layers", 10**9),
        ("num_nextn_predict_layers", -1),
        ("first_k_dense_replace", 1.5),
        ("use_qk_norm", 1),
        ("head_dim", "64"),
        ("num_key_value_heads", 3),
    ],
)
def test_wrong_config_values_are_named(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key):
        model_map(tiny_config(TinyGlm4Moe()) | {key: value})


@pytest.mark.parametrize("key", ["attention_bias", "use_qk_norm", "tie_word_embeddings"])
def test_null_flag_is_an_absent_one(key: str) -> None:
    config = tiny_config(TinyGlm4Moe()) | {key: None}
    without = {name: value for name, value in config.items() if name != key}
    assert model_map(config) == model_map(without)


@pytest.mark.parametrize("names", [None, [], ["GPT2LMHeadModel"], "Glm4MoeForCausalLM", [3]])
def test_unknown_architecture_lists_the_known(names: Any) -> None:
    with pytest.raises(UnsupportedError, match="Glm4MoeForCausalLM"):
        model_map({"architectures": names})

"""Every architecture against the Hugging Face model of the same name, built without memory."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from exl3kit.errors import CheckpointError
from exl3kit.models.base import ShardKind
from exl3kit.models.registry import model_map
from exl3kit.testing.tiny_configs import MODEL_TYPES, MTP_TYPES, tiny_config_of

EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")


def reference_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of transformers' own model, its stacked experts one by one."""
    transformers = pytest.importorskip("transformers")
    keys = {key: value for key, value in config.items() if key not in ("architectures", "dtype")}
    own = transformers.AutoConfig.for_model(**keys)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(own)
    shapes = {}
    for name, tensor in model.state_dict().items():
        match = EXPERTS.fullmatch(name)
        if match is None:
            shapes[name] = tuple(tensor.shape)
            continue
        for expert in range(tensor.shape[0]):
            stem = f"{match[1]}.{expert}"
            if match[2] == "down_proj":
                shapes[f"{stem}.down_proj.weight"] = tuple(tensor.shape[1:])
                continue
            half = (tensor.shape[1] // 2, tensor.shape[2])
            shapes |= {f"{stem}.gate_proj.weight": half, f"{stem}.up_proj.weight": half}
    return shapes


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in MODEL_TYPES],
    *[(name, {"attention_bias": True}) for name in MODEL_TYPES],
    ("deepseek_v2", {"q_lora_rank": 128, "n_shared_experts": 2}),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("glm4_moe", {"use_qk_norm": False}),
    ("glm_moe_dsa", {"index_topk_freq": 2, "num_hidden_layers": 4}),
    ("llama", {"mlp_bias": True}),
    ("qwen3", {"head_dim": 128}),
]


@pytest.mark.parametrize("name, changes", VARIANTS)
def test_names_and_shapes_are_those_of_transformers(name: str, changes: dict[str, Any]) -> None:
    config = tiny_config_of(name) | changes
    required = {
        spec.name: spec.shape for spec in model_map(config).tensors() if not spec.is_optional
    }
    assert required == reference_shapes(config)


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_config_as_transformers_writes_it(name: str) -> None:
    """Its own names for some keys, and keys that the original config left out."""
    transformers = pytest.importorskip("transformers")
    config = tiny_config_of(name)
    keys = {key: value for key, value in config.items() if key not in ("architectures", "dtype")}
    written = transformers.AutoConfig.for_model(**keys).to_dict()
    assert model_map({**written, "architectures": config["architectures"]}) == model_map(config)


@pytest.mark.parametrize("name", MTP_TYPES)
def test_mtp_layer_is_a_decoder_layer_and_more(name: str) -> None:
    """As vLLM's next-token classes load it; transformers has none."""
    model = model_map(tiny_config_of(name, num_layers=2, mtp_layers=1))
    shapes = {spec.name: spec for spec in model.tensors()}
    below = {n.split(".", 3)[3]: s for n, s in shapes.items() if n.startswith("model.layers.2.")}
    decoder = {n.split(".", 3)[3] for n in shapes if n.startswith("model.layers.1.")}
    added = {n: (s.shape, s.is_optional) for n, s in below.items() if n not in decoder}
    assert decoder <= below.keys()
    assert added == {
        "eh_proj.weight": ((256, 512), False),
        "enorm.weight": ((256,), False),
        "hnorm.weight": ((256,), False),
        "shared_head.norm.weight": ((256,), False),
        "embed_tokens.weight": ((320, 256), True),
        "shared_head.head.weight": ((320, 256), True),
    }
    assert list(model.moe_layers) == [1, 2] and list(model.mtp_layers) == [2]


def test_layers_that_share_an_indexer_may_lack_their_own() -> None:
    config = tiny_config_of("glm_moe_dsa", num_layers=3, mtp_layers=1)
    model = model_map(config | {"index_topk_pattern": "FSF"})
    optional = {
        s.name.split(".")[2] for s in model.tensors() if s.is_optional and "index" in s.name
    }
    assert optional == {"1"}


def test_how_mla_is_cut() -> None:
    model = model_map(tiny_config_of("deepseek_v32"))
    kinds = {spec.name.rpartition(".")[2]: spec.shard for spec in model.linears(1)}
    assert {name for name, kind in kinds.items() if kind is ShardKind.REPLICATED} == {
        "q_a_proj", "kv_a_proj_with_mqa", "wq_b", "wk", "weights_proj", "gate"
    }  # fmt: skip
    assert kinds["q_b_proj"] is kinds["kv_b_proj"] is ShardKind.COLUMN
    assert kinds["o_proj"] is kinds["down_proj"] is ShardKind.ROW


def test_dense_model_has_no_expert_layers() -> None:
    model = model_map(tiny_config_of("qwen3"))
    assert (model.num_experts, model.moe_intermediate_size, len(model.moe_layers)) == (0, 0, 0)


MIXED: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("qwen3_moe", {"decoder_sparse_step": 2}, (1, 3, 5)),
    ("qwen3_moe", {"mlp_only_layers": [0, 2, 9]}, (1, 3, 4, 5)),
    ("qwen3_moe", {"mlp_only_layers": [3], "decoder_sparse_step": 2}, (1, 5)),
    ("qwen3_moe", {"mlp_only_layers": list(range(6))}, ()),
    *[
        (name, {"mlp_layer_types": ["sparse", "dense", "dense", "sparse", "dense", "sparse"]},
         (0, 3, 5))
        for name in ("glm4_moe_lite", "glm_moe_dsa", "deepseek_v32")
    ],
]  # fmt: skip


@pytest.mark.parametrize("name, changes, layers", MIXED)
def test_dense_layers_between_layers_of_experts(
    name: str, changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    config = tiny_config_of(name, num_layers=6) | changes
    model = model_map(config)
    assert model.moe_layers == layers
    required = {spec.name: spec.shape for spec in model.tensors() if not spec.is_optional}
    assert required == reference_shapes(config)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_every_nth_layer_has_experts(name: str) -> None:
    """By DeepSeek's own rule, which vLLM follows; transformers does not know the key.

    It counts from layer 0, and a next-token layer is one of the row.
    """
    mtp_layers = 1 if name == "deepseek_v3" else 0
    config = tiny_config_of(name, num_layers=6, mtp_layers=mtp_layers)

    def layers(**keys: int) -> tuple[int, ...]:
        return model_map(config | keys).moe_layers

    assert layers(moe_layer_freq=2) == (2, 4, 6)[: 2 + mtp_layers]
    assert layers(moe_layer_freq=4) == (4,)
    assert layers(moe_layer_freq=3, first_k_dense_replace=0) == (0, 3, 6)[: 2 + mtp_layers]


def test_keys_that_other_architectures_read_are_ignored() -> None:
    config = tiny_config_of("glm4_moe") | {"moe_layer_freq": 2, "mlp_only_layers": [1]}
    assert model_map(config).moe_layers == (1,)


@pytest.mark.parametrize(
    "name, key, value",
    [
        ("deepseek_v3", "kv_lora_rank", None),
        ("deepseek_v3", "num_experts_per_tok", 5),
        ("deepseek_v32", "q_lora_rank", None),
        ("glm_moe_dsa", "index_n_heads", 0),
        ("glm_moe_dsa", "index_topk_freq", True),
        ("qwen3_moe", "moe_intermediate_size", "256"),
        ("llama", "num_hidden_layers", 0),
        ("llama", "mlp_bias", "yes"),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("qwen3_moe", "mlp_only_layers", [1, True]),
        ("qwen3_moe", "mlp_only_layers", 1),
        ("deepseek_v3", "moe_layer_freq", "2"),
        ("glm4_moe_lite", "mlp_layer_types", ["dense"]),
        ("glm4_moe_lite", "mlp_layer_types", ["dense", "both"]),
        ("glm4_moe_lite", "mlp_layer_types", ["dense", []]),
        ("glm4_moe_lite", "mlp_layer_types", 3),
    ],
)
def test_wrong_values_are_named(name: str, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key):
        model_map(tiny_config_of(name) | {key: value})

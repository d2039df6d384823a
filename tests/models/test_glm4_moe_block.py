"""Our plain-torch forward against transformers' Glm4Moe class, in fp32."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from exl3kit.errors import CheckpointError, UnsupportedError
from exl3kit.models import glm4_moe_block as block

BASE = {
    "architectures": ["Glm4MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "use_qk_norm": True,
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}


def reference(config: dict[str, object], seed: int = 0) -> torch.nn.Module:
    """transformers' model with every parameter random, correction bias and norms included."""
    transformers = pytest.importorskip("transformers")
    model = transformers.Glm4MoeForCausalLM(
        transformers.Glm4MoeConfig(**config, attn_implementation="eager")
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("inv_freq"):
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        is_norm = "norm" in name
        tensor.data.copy_(1 + 0.2 * noise if is_norm else noise * tensor.shape[-1] ** -0.5)
    return model


def layer_weights(model: torch.nn.Module, layer: int) -> Mapping[str, torch.Tensor]:
    """Layer-local names as checkpoints have them: stacked experts taken apart."""
    prefix, out = f"model.layers.{layer}.", {}
    for name, tensor in model.state_dict().items():
        if name.startswith(prefix):
            out[name.removeprefix(prefix)] = tensor
    if "mlp.experts.gate_up_proj" in out:
        gate_up, down = out.pop("mlp.experts.gate_up_proj"), out.pop("mlp.experts.down_proj")
        for e in range(gate_up.shape[0]):
            gate, up = gate_up[e].chunk(2)
            names = (f"mlp.experts.{e}.{p}_proj.weight" for p in ("gate", "up", "down"))
            out.update(zip(names, (gate, up, down[e]), strict=True))
    return out


@torch.no_grad()
def ours(model: torch.nn.Module, config: block.ForwardConfig, tokens: torch.Tensor) -> torch.Tensor:
    state = model.state_dict()
    x = block.embed(tokens, state["model.embed_tokens.weight"])
    for layer in range(config.num_hidden_layers):
        x = block.decoder_layer(x, layer_weights(model, layer), config, layer)
    return block.logits(x, state["model.norm.weight"], state["lm_head.weight"], config)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"n_group": 4, "topk_group": 2},
        {"n_group": 2, "topk_group": 1, "norm_topk_prob": False},
        {"use_qk_norm": False, "attention_bias": True, "n_shared_experts": 2},
        {"num_key_value_heads": 4, "first_k_dense_replace": 0},
        {"rope_parameters": BASE["rope_parameters"] | {"partial_rotary_factor": 1.0}},
    ],
    ids=["plain", "groups-4-2", "groups-2-1", "bias-no-qk-norm", "no-dense-layer", "full-rotary"],
)
@torch.no_grad()
def test_logits_equal_transformers(change: dict[str, object]) -> None:
    config = BASE | change
    model = reference(config)
    tokens = torch.randint(0, 96, (3, 37), generator=torch.Generator().manual_seed(1))
    expected = model(tokens).logits
    got = ours(model, block.ForwardConfig.from_config(config), tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_rows_are_independent_of_the_attention_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference(BASE)
    config = block.ForwardConfig.from_config(BASE)
    tokens = torch.randint(0, 96, (5, 16), generator=torch.Generator().manual_seed(2))
    whole = ours(model, config, tokens)
    monkeypatch.setattr(block, "_ATTENTION_TOKENS", 32)
    torch.testing.assert_close(ours(model, config, tokens), whole, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_observer_sees_every_routed_token_once() -> None:
    weights = layer_weights(reference(BASE), 1)
    config = block.ForwardConfig.from_config(BASE)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(3))
    routing = block.route(x, weights, config)
    seen: dict[int, int] = {}

    def observe(
        expert: int, inputs: torch.Tensor, activation: torch.Tensor, weight: torch.Tensor
    ) -> None:
        rows = (routing.topk_ids == expert).any(-1)
        assert torch.equal(inputs, x[rows])
        assert activation.shape == (len(inputs), 48)
        assert torch.equal(weight, routing.topk_weights[routing.topk_ids == expert])
        seen[expert] = len(inputs)

    block.routed_experts(x, routing, weights, config, observe)
    assert sum(seen.values()) == 50 * 3


def test_config_reads_the_older_spelling_of_rope() -> None:
    old = {k: v for k, v in BASE.items() if k != "rope_parameters"}
    old |= {"rope_theta": 5000.0, "partial_rotary_factor": 0.25, "rope_scaling": None}
    config = block.ForwardConfig.from_config(old)
    assert (config.rotary_dim, config.rope_theta) == (8, 5000.0)


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"rope_parameters": {"rope_type": "yarn"}}, UnsupportedError, "yarn"),
        ({"architectures": ["LlamaForCausalLM"]}, UnsupportedError, "LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, UnsupportedError, "gelu"),
        ({"n_routed_experts": None}, CheckpointError, "n_routed_experts"),
    ],
)
def test_config_refusals_name_the_value(
    change: dict[str, object], error: type[Exception], word: str
) -> None:
    config = {k: v for k, v in (BASE | change).items() if v is not None}
    with pytest.raises(error, match=word):
        block.ForwardConfig.from_config(config)

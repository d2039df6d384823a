"""Steps of a layer: independence of the attention batch, routing, observed inputs, devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from exl3kit.models.forward import Carry, forward_model, indexer, mlp, model
from exl3kit.models.forward.base import Routing

from . import reference


def random_layer(config: Mapping[str, Any], layer: int, device: str = "cpu") -> dict[str, Tensor]:
    """Random weights of one layer, by the names and shapes of the model's map."""
    generator = torch.Generator().manual_seed(layer)
    prefix, specs = f"model.layers.{layer}.", forward_model(config).shapes.layer_tensors(layer)
    return {
        spec.name.removeprefix(prefix): torch.randn(spec.shape, generator=generator).to(device)
        for spec in specs
    }


@pytest.mark.parametrize("model_type", ["glm4_moe", "glm_moe_dsa"])
def test_tokens_in_pieces(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = reference.tiny(model_type, index_topk=8, index_topk_freq=2)
    tensors = reference.checkpoint_tensors(reference.reference_model(config))
    tokens, ours = reference.token_rows(5, 16), forward_model(config)
    whole = reference.our_logits(ours, tensors, tokens)
    for module in (indexer, mlp, model):  # 2 rows, 10 tokens and 1 token at a time
        monkeypatch.setattr(module, "MAX_VALUES", {model: 2 * 16 * 512, mlp: 1000}.get(module, 1))
    pieces = reference.our_logits(ours, tensors, tokens)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-5)


def test_weights_are_read_once_however_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    config = reference.tiny("llama")
    layer, reads = random_layer(config, 0), Counter[str]()

    class Reads(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            reads[name] += 1
            return super().__getitem__(name)

    for module in (mlp, model):
        monkeypatch.setattr(module, "MAX_VALUES", 1)
    forward_model(config).decoder_layer(torch.randn(3, 4, 64), Reads(layer), 0)
    assert reads == dict.fromkeys(layer, 1)


def test_shared_choice_of_keys_needs_the_carry_of_its_rows() -> None:
    config = reference.tiny("glm_moe_dsa", index_topk=8, indexer_types=["full", "shared", "shared"])
    ours, x = forward_model(config), torch.randn(1, 9, 64)
    with pytest.raises(ValueError, match=r"layer 1 attends to the keys .* Carry of its 9 tokens"):
        ours.attention_block(x, random_layer(config, 1), 1)
    carry = Carry()
    ours.attention_block(x, random_layer(config, 0), 0, carry)
    chosen = carry.selected
    assert chosen is not None and chosen.sum(-1).tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 8]]
    ours.attention_block(x, random_layer(config, 1), 1, carry)
    assert carry.selected is not None and torch.equal(carry.selected, chosen)
    short = x[:, :8]  # every key is chosen
    ours.attention_block(short, random_layer(config, 1), 1)


def test_by_expert_gives_every_routed_token_once() -> None:
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(50, 8, generator=generator).topk(3).indices
    ids[ids == 5] = 6  # an expert without tokens
    routing = Routing(ids, torch.rand(50, 3, generator=generator))
    seen = [len(tokens) for _, tokens, _ in routing.by_expert(8)]
    assert seen == routing.counts(8) and sum(seen) == 150 and seen[5] == 0
    for expert, tokens, weights in routing.by_expert(8):
        rows, _ = (ids == expert).nonzero(as_tuple=True)
        assert torch.equal(tokens, rows)
        assert torch.equal(weights, routing.topk_weights[ids == expert])


@pytest.mark.parametrize("q_lora_rank", [None, 32])
@pytest.mark.parametrize("model_type", ["llama", "glm4_moe", "deepseek_v3", "qwen3_moe"])
def test_observed_are_the_inputs_of_all_dense_linears(
    model_type: str, q_lora_rank: int | None
) -> None:
    config = reference.tiny(model_type, q_lora_rank=q_lora_rank)
    ours = forward_model(config)
    for layer in (0, 1):
        seen: dict[str, Tensor] = {}

        def observe(names: tuple[str, ...], x: Tensor, seen: dict[str, Tensor] = seen) -> None:
            seen |= dict.fromkeys(names, x)

        weights, x = random_layer(config, layer), torch.randn(2, 5, 64)
        mixed = ours.attention_block(x, weights, layer, observe=observe)
        ours.mlp_block(mixed, weights, layer, observe)
        prefix = f"model.layers.{layer}."
        expected = {spec.name.removeprefix(prefix): spec for spec in ours.shapes.linears(layer)}
        expected.pop("mlp.gate", None)
        assert {name: seen[name].shape[-1] for name in seen} == {
            name: spec.in_features for name, spec in expected.items()
        }
        out = seen["self_attn.o_proj"] @ weights["self_attn.o_proj.weight"].T
        torch.testing.assert_close(x + out, mixed)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
        ("glm_moe_dsa", {"index_topk": 4}),
    ],
)
def test_attention_stays_on_the_device_of_its_input(
    model_type: str, changes: dict[str, Any]
) -> None:
    config = reference.tiny(model_type, **changes)
    x = torch.empty(2, 7, 64, device="meta")
    weights = random_layer(config, 0, "meta")
    assert forward_model(config).attention_block(x, weights, 0).device.type == "meta"

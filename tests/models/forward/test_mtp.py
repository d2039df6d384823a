"""A next-token layer against transformers' MtpLayer, with the first embedding 0 as in vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from exl3kit.models.forward import forward_model

from . import reference


def mtp_layer(model: Any, seed: int = 5) -> torch.nn.Module:
    """A random next-token layer of the same classes as the model's last layer."""
    modeling = pytest.importorskip("transformers.modeling_layers")
    last = model.model.layers[-1]
    layer = modeling.MtpLayer(model.config, type(last), type(last.input_layernorm), 2).eval()
    reference.randomize(layer, seed)
    return layer


def layer_weights(layer: torch.nn.Module) -> dict[str, Tensor]:
    """Its tensors under the names of published checkpoints, in the layer's scope."""
    tensors = layer.state_dict()
    tensors["shared_head.norm.weight"] = tensors.pop("post_norm.weight")
    named = {name.removeprefix("mtp_block."): tensor for name, tensor in tensors.items()}
    return reference.unstacked(named)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
@torch.no_grad()
def test_logits_of_the_token_after_next(model_type: str) -> None:
    config = reference.tiny(model_type, num_nextn_predict_layers=1)
    model: Any = reference.reference_model(config)
    layer, tokens = mtp_layer(model), reference.token_rows(2, 25)
    # What transformers' own candidate generator feeds the layer.
    hidden = model(tokens, output_hidden_states=True).hidden_states[-1][:, :-1]
    embeds = model.model.embed_tokens(tokens[:, 1:])
    first_is_zero = embeds.clone()
    first_is_zero[:, 0] = 0
    positions = torch.arange(24)[None]
    expected = model.lm_head(
        layer(
            first_is_zero,
            hidden,
            position_embeddings=model.model.rotary_emb(hidden, positions),
            attention_mask=torch.full((1, 1, 24, 24), -torch.inf).triu(1),
            position_ids=positions,
            past_key_values=None,
        )
    )

    ours, own = forward_model(config), layer_weights(layer)
    tensors = reference.checkpoint_tensors(model)
    number = ours.num_hidden_layers
    assert ours.is_moe(number)
    x = reference.hidden_states(ours, tensors, tokens)
    x = ours.final_norm(x, tensors["model.norm.weight"])[:, :-1]
    y = ours.mtp_input(x, ours.embed(tokens[:, 1:], tensors["model.embed_tokens.weight"]), own)
    y = ours.decoder_layer(y, own, number)
    got = ours.logits(y, own["shared_head.norm.weight"], tensors["lm_head.weight"])
    reference.assert_close(got, expected)


def test_embeddings_are_not_changed() -> None:
    model = forward_model(reference.tiny("glm4_moe"))
    generator = torch.Generator().manual_seed(0)
    hidden, embeds = (torch.randn(1, 3, 64, generator=generator) for _ in range(2))
    weights = {name: torch.ones(64) for name in ("enorm.weight", "hnorm.weight")}
    weights["eh_proj.weight"] = torch.randn(64, 128, generator=generator)
    before = embeds.clone()
    model.mtp_input(hidden, embeds, weights)
    assert torch.equal(embeds, before)

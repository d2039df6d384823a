"""Weights of the model's own sizes from every stored form, seen through the forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.models.forward import Carry, forward_model
from exl3kit.models.module_weights import ModuleWeights
from exl3kit.testing.checkpoints import OrdinaryOptions, write_ordinary
from exl3kit.testing.dense import write_dense_twin
from exl3kit.testing.tiny_configs import tiny_config_of

TOKENS = torch.arange(24).view(2, 12) * 13 % 320


@torch.inference_mode()
def logits(checkpoint: Checkpoint) -> Tensor:
    """(2, 12, V) of a whole checkpoint."""
    model, weights, carry = forward_model(checkpoint.config), ModuleWeights(checkpoint), Carry()
    x = model.embed(TOKENS, weights["model.embed_tokens.weight"])
    for layer in range(model.num_hidden_layers):
        own = ModuleWeights(checkpoint, f"model.layers.{layer}.")
        x = model.decoder_layer(x, own, layer, carry)
    return model.logits(x, weights["model.norm.weight"], weights["lm_head.weight"])


@pytest.mark.parametrize(
    ("model_type", "changes", "options"),
    [
        # 200, 300 and 330 are no multiples of 128, nor is kv_a_proj's 128 + 64.
        ("llama", {"hidden_size": 200, "intermediate_size": 300, "vocab_size": 330}, {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 300}, {}),
        ("deepseek_v3", {"moe_intermediate_size": 200, "hidden_size": 200}, {}),
        ("qwen3", {}, {"embedding_bits": 6, "slice_width": 384}),
    ],
)
def test_padding_is_cut_off(
    model_type: str, changes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    config = tiny_config_of(model_type) | changes
    source = write_ordinary(tmp_path / "exl3", config, OrdinaryOptions(**options))
    got = logits(open_checkpoint(source))
    expected = logits(open_checkpoint(write_dense_twin(source, tmp_path / "dense")))
    assert got.shape[-1] == config["vocab_size"] and got.std() > 0.01
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)

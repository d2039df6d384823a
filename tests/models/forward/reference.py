"""transformers' own class with random weights, and our forward pass of the same weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from exl3kit.models.forward import Carry, ForwardModel
from exl3kit.testing.tiny_configs import VOCAB_SIZE, tiny_config_of

_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")


def tiny(model_type: str, **changes: Any) -> dict[str, Any]:
    """The config of three layers (one dense where the architecture has dense layers), 8 experts."""
    return (
        tiny_config_of(model_type, num_layers=3, num_experts=8)
        | {
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 48,
            "num_experts_per_tok": 3,
        }
        | changes
    )


def reference_model(config: Mapping[str, Any], seed: int = 0) -> torch.nn.Module:
    """transformers' model in fp32, every parameter and the correction biases random."""
    transformers = pytest.importorskip("transformers")
    keys = {key: value for key, value in config.items() if key not in ("architectures", "dtype")}
    own = transformers.AutoConfig.for_model(**keys)
    own._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(own, dtype=torch.float32).eval()
    randomize(model, seed)
    return model


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draw all of a module's tensors, norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        is_norm = "norm" in name and tensor.dim() == 1 and not name.endswith("bias")
        tensor.copy_(1 + 0.2 * noise if is_norm else noise * tensor.shape[-1] ** -0.5)


def checkpoint_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """The model's tensors as checkpoints have them."""
    return unstacked(model.state_dict())


def unstacked(stacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with the stacked experts of transformers taken apart."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in stacked.items():
        match = _STACKED.fullmatch(name)
        if match is None:
            tensors[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            stem = f"{match[1]}.{expert}"
            if match[2] == "down_proj":
                tensors[f"{stem}.down_proj.weight"] = matrix
            else:
                gate, up = matrix.chunk(2)
                tensors |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
    return tensors


def layer_of(tensors: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    """The tensors of one layer under their layer-local names."""
    prefix = f"model.layers.{layer}."
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


@torch.no_grad()
def hidden_states(model: ForwardModel, tensors: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Our (R, S, H) after the last decoder layer."""
    x, carry = model.embed(tokens, tensors["model.embed_tokens.weight"]), Carry()
    for layer in range(model.num_hidden_layers):
        x = model.decoder_layer(x, layer_of(tensors, layer), layer, carry)
    return x


@torch.no_grad()
def our_logits(model: ForwardModel, tensors: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Our (R, S, V)."""
    x = hidden_states(model, tensors, tokens)
    return model.logits(x, tensors["model.norm.weight"], tensors["lm_head.weight"])


def token_rows(rows: int, length: int, seed: int = 1) -> Tensor:
    """Random token rows (rows, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (rows, length), generator=generator)


@torch.no_grad()
def their_logits(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """transformers' (R, S, V)."""
    return model(tokens).logits


def assert_close(got: Tensor, expected: Tensor) -> None:
    """No element differs by 1e-4 of the expected values' standard deviation."""
    scale = float(expected.std())
    assert scale > 0.1
    worst = float((got - expected).abs().max())
    assert worst < 1e-4 * scale, f"largest difference {worst:.2e}, scale {scale:.2e}"

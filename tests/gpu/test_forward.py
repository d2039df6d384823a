"""Forward passes and Hessians on a GPU against the same on the CPU, in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exl3kit.models.forward import ForwardModel, forward_model
from exl3kit.quantize.hessian import LayerHessians
from exl3kit.testing.checkpoints import plain_tensors
from exl3kit.testing.tiny_configs import MODEL_TYPES, tiny_config_of

from ..models.forward import reference


def on(device: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def logits(model: ForwardModel, tensors: dict[str, Tensor], device: str) -> Tensor:
    tokens = reference.token_rows(2, 70).to(device)
    return reference.our_logits(model, on(device, tensors), tokens).cpu()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logits_equal_the_cpus(model_type: str) -> None:
    config = tiny_config_of(model_type) | {"index_topk": 32}
    tensors = dict(plain_tensors(config, torch.float32))
    model = forward_model(config)
    reference.assert_close(logits(model, tensors, "cuda"), logits(model, tensors, "cpu"))


def test_hessians_equal_the_cpus() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(3000, 256, generator=generator)
    gate, up = (torch.randn(128, 256, generator=generator) / 16 for _ in range(2))
    found = {}
    for device in ("cpu", "cuda"):
        hessians = LayerHessians("layer", len(tokens))
        for part in tokens.split(1000):
            hessians.add(part.to(device))
        routed = [tokens[:700].to(device)]
        found[device] = hessians.of(0, gate.to(device), up.to(device), routed)
    for name in ("gate_up", "down"):
        on_cpu, on_gpu = (getattr(found[device], name) for device in ("cpu", "cuda"))
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, atol=1e-5, rtol=1e-4)

"""Hessians per expert: the definition, and what experts without tokens get."""

from __future__ import annotations

import pytest
import torch

from exl3kit.errors import CheckpointError
from exl3kit.models import glm4_moe_block as block
from exl3kit.quantize import hessian
from exl3kit.quantize.hessian import Coverage, LayerHessians, require_finite, second_moment
from exl3kit.testing.tiny_model import TinyGlm4Moe, tiny_config, tiny_tensors

SPEC = TinyGlm4Moe(hidden_size=128, moe_intermediate_size=128, num_experts=4, num_layers=2)
CONFIG = block.ForwardConfig.from_config(tiny_config(SPEC))
PREFIX = "model.layers.1."


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    tensors = tiny_tensors(SPEC)
    return {n.removeprefix(PREFIX): t.float() for n, t in tensors.items() if n.startswith(PREFIX)}


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(seed))


def routing_to(*counts: int) -> block.Routing:
    """One route a token: the first counts[0] tokens to expert 0, and so on."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return block.Routing(ids[:, None], torch.ones(len(ids), 1))


def activation(x: torch.Tensor, weights: dict[str, torch.Tensor], expert: int) -> torch.Tensor:
    gate, up = (weights[f"mlp.experts.{expert}.{p}_proj.weight"] for p in ("gate", "up"))
    return block.gated_activation(x, gate, up)


def test_second_moment_is_the_mean_outer_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessian, "_CHUNK", 7)
    x = tokens(50)
    expected = sum(torch.outer(row, row) for row in x.double()) / 50
    torch.testing.assert_close(second_moment(x).double(), expected, atol=1e-5, rtol=1e-5)


def test_covered_expert_uses_its_own_tokens(weights: dict[str, torch.Tensor]) -> None:
    x, routing = tokens(80), routing_to(40, 40, 0, 0)
    own = LayerHessians("layer", x, routing, weights, CONFIG).of(
        1, x[40:], activation(x[40:], weights, 1)
    )
    assert (own.coverage, own.tokens) == (Coverage.ROUTED, 40)
    assert own.gate_up is not None and own.down is not None
    torch.testing.assert_close(own.gate_up, second_moment(x[40:]))
    torch.testing.assert_close(own.down, second_moment(activation(x[40:], weights, 1)))


@pytest.mark.parametrize("count", [0, 3])
def test_starved_expert_takes_the_layers_average(
    weights: dict[str, torch.Tensor], count: int
) -> None:
    x, routing = tokens(80 + count), routing_to(50, 30, count, 0)
    few = x[80:]
    own = LayerHessians("layer", x, routing, weights, CONFIG).of(
        2, few, activation(few, weights, 2)
    )
    assert (own.coverage, own.tokens) == (Coverage.LAYER, count)
    assert own.gate_up is not None and own.down is not None
    routed = [activation(x[a:b], weights, e) for e, (a, b) in enumerate([(0, 50), (50, 80)])]
    routed.append(activation(few, weights, 2))
    torch.testing.assert_close(own.gate_up, second_moment(x))
    torch.testing.assert_close(own.down, second_moment(torch.cat(routed)))


def test_dead_layer_has_no_hessian(weights: dict[str, torch.Tensor]) -> None:
    x, routing = torch.zeros(80, 128), routing_to(80, 0, 0, 0)
    own = LayerHessians("layer", x, routing, weights, CONFIG).of(0, x, activation(x, weights, 0))
    assert (own.gate_up, own.down, own.coverage) == (None, None, Coverage.NONE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_tokens_are_counted_and_named(value: float) -> None:
    x = torch.zeros(2, 5, 8)
    x[1, 3, 2] = value
    x[1, 3, 5] = value
    with pytest.raises(CheckpointError, match=r"model\.layers\.7: .* in 1 of 10 calibration tok"):
        require_finite(x, "model.layers.7")

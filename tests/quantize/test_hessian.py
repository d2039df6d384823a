"""Hessians per expert: the definition, and what experts with few tokens or none get."""

from __future__ import annotations

import pytest
import torch

from exl3kit.errors import CheckpointError
from exl3kit.models.forward import gated_activation
from exl3kit.quantize import hessian
from exl3kit.quantize.hessian import Coverage, LayerHessians, require_finite, second_moment

HIDDEN, WIDTH = 32, 48
PRIOR_GATE_UP, PRIOR_DOWN = 2 * HIDDEN, 2 * WIDTH


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TOKENS = draw(200, HIDDEN)
GATE, UP = draw(WIDTH, HIDDEN, seed=1), draw(WIDTH, HIDDEN, seed=2)


def exact(x: torch.Tensor) -> torch.Tensor:
    """The definition, in float64."""
    return torch.stack([torch.outer(row, row) for row in x.double()]).mean(0)


def test_second_moment_is_the_mean_outer_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessian, "_CHUNK", 7)
    torch.testing.assert_close(second_moment(TOKENS).double(), exact(TOKENS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("count", "coverage"),
    [(0, Coverage.LAYER), (5, Coverage.MOSTLY_LAYER), (150, Coverage.ROUTED)],
)
def test_hessians_shrink_to_the_layers_by_token_count(count: int, coverage: Coverage) -> None:
    inputs = 3 * TOKENS[:count]  # unlike the layer's tokens, so that the mixture shows
    own = LayerHessians("layer", TOKENS).of(0, GATE, UP, inputs)
    assert own.coverage is coverage
    assert own.gate_up is not None and own.down is not None
    everywhere = gated_activation(TOKENS, GATE, UP)
    expected_gate_up, expected_down = exact(TOKENS), exact(everywhere)
    if count:
        share = count / (count + PRIOR_GATE_UP)
        expected_gate_up = share * exact(inputs) + (1 - share) * expected_gate_up
        share = count / (count + PRIOR_DOWN)
        routed = exact(gated_activation(inputs, GATE, UP))
        expected_down = share * routed + (1 - share) * expected_down
    torch.testing.assert_close(own.gate_up.double(), expected_gate_up, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(own.down.double(), expected_down, atol=1e-3, rtol=1e-4)


def test_down_prior_is_an_even_sample_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessian, "_SAMPLE", 70)
    own = LayerHessians("layer", TOKENS).of(0, GATE, UP, TOKENS[:0])
    assert own.down is not None
    expected = exact(gated_activation(TOKENS[::3], GATE, UP))
    torch.testing.assert_close(own.down.double(), expected, atol=1e-3, rtol=1e-4)


def test_overflowing_expert_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"model\.layers\.7\.mlp\.experts\.5: activation"):
        LayerHessians("model.layers.7", TOKENS).of(5, GATE * 1e30, UP * 1e30, TOKENS)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_tokens_are_counted_and_named(value: float) -> None:
    x = torch.zeros(2, 5, 8)
    x[1, 3, 2] = value
    x[1, 3, 5] = value
    with pytest.raises(CheckpointError, match=r"model\.layers\.7: .* in 1 of 10 calibration tok"):
        require_finite(x, "model.layers.7")

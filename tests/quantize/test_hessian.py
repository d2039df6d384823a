"""Hessians per expert: the definition, and what experts with few tokens or none get."""

from __future__ import annotations

import pytest
import torch

from exl3kit.errors import CheckpointError
from exl3kit.models.forward import gated_activation
from exl3kit.quantize import hessian
from exl3kit.quantize.hessian import (
    Coverage,
    InputMoments,
    LayerHessians,
    Moment,
    require_finite,
)

HIDDEN, WIDTH = 32, 48
PRIOR_GATE_UP, PRIOR_DOWN = 2 * HIDDEN, 2 * WIDTH


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TOKENS = draw(200, HIDDEN)
GATE, UP = draw(WIDTH, HIDDEN, seed=1), draw(WIDTH, HIDDEN, seed=2)


def exact(x: torch.Tensor) -> torch.Tensor:
    """The definition, in float64."""
    return torch.stack([torch.outer(row, row) for row in x.double()]).mean(0)


def layer_hessians(pieces: int = 1, name: str = "layer") -> LayerHessians:
    """Of the layer whose input tokens are TOKENS, added in so many pieces of unequal size."""
    hessians = LayerHessians(name, len(TOKENS))
    for part in TOKENS.split(-(-len(TOKENS) // pieces)):
        hessians.add(part)
    return hessians


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, atol=1e-3, rtol=1e-4)


def test_moment_is_the_mean_outer_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessian, "_CHUNK", 7)
    moment = Moment(HIDDEN, TOKENS.device)
    assert torch.equal(moment.mean(), torch.zeros(HIDDEN, HIDDEN))
    for part in TOKENS.view(20, 10, HIDDEN).split(3):
        moment.add(part)
    assert moment.tokens == len(TOKENS)
    assert_close(moment.mean(), exact(TOKENS))


def test_observed_linears_share_the_moment_of_a_shared_input() -> None:
    moments = InputMoments(("q_proj", "v_proj", "o_proj"))
    for part in TOKENS.split(70):
        moments.observe(("q_proj", "k_proj", "v_proj"), part)
        moments.observe(("o_proj",), 2 * part)
        moments.observe(("gate_proj",), part)
    assert_close(moments.of("q_proj"), exact(TOKENS))
    assert moments.of("v_proj") is moments.of("q_proj")  # the quantiser conditions it once
    assert_close(moments.of("o_proj"), 4 * exact(TOKENS))
    with pytest.raises(KeyError):
        moments.of("gate_proj")


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(
    ("count", "coverage"),
    [(0, Coverage.LAYER), (5, Coverage.MOSTLY_LAYER), (150, Coverage.ROUTED)],
)
def test_hessians_shrink_to_the_layers_by_token_count(
    count: int, coverage: Coverage, pieces: int
) -> None:
    inputs = 3 * TOKENS[:count]  # unlike the layer's tokens, so that the mixture shows
    own = layer_hessians(pieces).of(0, GATE, UP, inputs.chunk(pieces))
    assert own.coverage is coverage
    everywhere = gated_activation(TOKENS, GATE, UP)
    expected_gate_up, expected_down = exact(TOKENS), exact(everywhere)
    if count:
        share = count / (count + PRIOR_GATE_UP)
        expected_gate_up = share * exact(inputs) + (1 - share) * expected_gate_up
        share = count / (count + PRIOR_DOWN)
        routed = exact(gated_activation(inputs, GATE, UP))
        expected_down = share * routed + (1 - share) * expected_down
    assert_close(own.gate_up, expected_gate_up)
    assert_close(own.down, expected_down)


def test_all_tokens_in_place_of_the_routed_ones() -> None:
    own = layer_hessians(3).of_all(0, GATE, UP, TOKENS.split(90))
    assert own.coverage is Coverage.ALL
    assert_close(own.gate_up, exact(TOKENS))
    assert_close(own.down, exact(gated_activation(TOKENS, GATE, UP)))


@pytest.mark.parametrize("pieces", [1, 3, 200])
def test_down_prior_is_an_even_sample_of_the_layer(
    monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    monkeypatch.setattr(hessian, "_SAMPLE", 70)
    own = layer_hessians(pieces).of(0, GATE, UP, [])
    assert_close(own.down, exact(gated_activation(TOKENS[::3], GATE, UP)))


def test_overflowing_expert_is_named() -> None:
    hessians = layer_hessians(name="model.layers.7")
    words = r"model\.layers\.7\.mlp\.experts\.5: activation"
    for ask in (hessians.of, hessians.of_all):
        with pytest.raises(CheckpointError, match=words):
            ask(5, GATE * 1e30, UP * 1e30, [TOKENS])


def test_tokens_come_before_experts() -> None:
    with pytest.raises(ValueError, match="layer: expected the layer's tokens to be added first"):
        LayerHessians("layer", 10).of(0, GATE, UP, [])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_tokens_are_counted_and_named(value: float) -> None:
    x = torch.zeros(2, 5, 8)
    x[1, 3, 2] = value
    x[1, 3, 5] = value
    with pytest.raises(CheckpointError, match=r"model\.layers\.7: .* in 1 of 10 calibration tok"):
        require_finite(x, "model.layers.7")

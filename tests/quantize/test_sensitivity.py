"""The weight of an expert: the stream's relative error when that expert's matrices are noisy."""

from __future__ import annotations

import pytest
import torch

from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.models.forward import ForwardModel, forward_model
from exl3kit.models.module_weights import ModuleWeights
from exl3kit.quantize import sensitivity
from exl3kit.quantize.sensitivity import add_noise, measure_experts
from exl3kit.testing.tiny_model import TinyGlm4Moe, write_tiny_model

SPEC = TinyGlm4Moe(hidden_size=128, moe_intermediate_size=128, num_experts=4, num_layers=3)
CPU = torch.device("cpu")
ROWS = torch.randint(0, 256, (6, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_tiny_model(tmp_path_factory.mktemp("tiny"), SPEC))


def by_whole_layers(checkpoint: Checkpoint, model: ForwardModel, layer: int) -> list[float]:
    """The same by running the layer again with each expert noisy."""
    x = model.embed(ROWS, checkpoint.tensor("model.embed_tokens.weight"))
    for before in range(layer):
        x = model.decoder_layer(x, ModuleWeights(checkpoint, f"model.layers.{before}."), before)
    weights = dict(ModuleWeights(checkpoint, f"model.layers.{layer}."))
    exact = model.decoder_layer(x, weights, layer).double()
    found = []
    for expert in range(model.num_experts):
        names = [f"mlp.experts.{expert}.{p}_proj.weight" for p in ("gate", "up", "down")]
        noisy = {name: add_noise(weights[name], f"{layer}.{name}") for name in names}
        change = (exact - model.decoder_layer(x, {**weights, **noisy}, layer)).square().sum(-1)
        found.append(float((change / exact.square().sum(-1)).sum()))
    return found


def test_equals_the_streams_error_with_a_noisy_expert(tiny: Checkpoint) -> None:
    model = forward_model(tiny.config)
    found = measure_experts(tiny, model, ROWS, (1, 2), CPU)
    assert list(found) == [(layer, expert) for layer in (1, 2) for expert in range(4)]
    for layer in (1, 2):
        measured = [found[layer, expert] for expert in range(4)]
        assert measured == pytest.approx(by_whole_layers(tiny, model, layer), rel=6e-3)
    only = measure_experts(tiny, model, ROWS, (2,), CPU)
    assert only == {expert: weight for expert, weight in found.items() if expert[0] == 2}


def test_an_expert_without_tokens_weighs_nothing(tiny: Checkpoint) -> None:
    found = measure_experts(tiny, forward_model(tiny.config), ROWS[:1, :1], (1,), CPU)
    assert sum(weight > 0 for weight in found.values()) == 2
    assert sum(weight == 0 for weight in found.values()) == 2


def test_many_rows_are_sampled_evenly(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    model = forward_model(tiny.config)
    monkeypatch.setattr(sensitivity, "MAX_TOKENS", 32)
    sampled = measure_experts(tiny, model, ROWS, (1,), CPU)
    assert sampled == measure_experts(tiny, model, ROWS[::3], (1,), CPU)


def test_noise_has_its_share_and_follows_rows_and_columns() -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    weight[:128] *= 4
    weight[:, :128] *= 3
    error = add_noise(weight, "a") - weight
    share = error.square().sum() / weight.square().sum()
    assert share == pytest.approx(0.04, rel=0.05)
    sizes = error.square()
    assert (sizes[:128].mean() / sizes[128:].mean()).sqrt() == pytest.approx(4, rel=0.05)
    assert (sizes[:, :128].mean() / sizes[:, 128:].mean()).sqrt() == pytest.approx(3, rel=0.05)
    assert torch.equal(add_noise(weight, "a") - weight, error)
    assert not torch.equal(add_noise(weight, "b") - weight, error)


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert not add_noise(torch.zeros(16, 16), "a").any()

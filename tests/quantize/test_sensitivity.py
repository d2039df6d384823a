"""The weight of an expert is its share of the stream's energy, summed over its tokens."""

from __future__ import annotations

import pytest
import torch

from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.models.forward import ForwardModel, forward_model
from exl3kit.models.module_weights import ModuleWeights
from exl3kit.quantize import sensitivity
from exl3kit.quantize.sensitivity import measure_experts
from exl3kit.testing.tiny_model import TinyGlm4Moe, write_tiny_model

SPEC = TinyGlm4Moe(hidden_size=128, moe_intermediate_size=128, num_experts=4, num_layers=3)
ROWS = torch.randint(0, 256, (6, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_tiny_model(tmp_path_factory.mktemp("tiny"), SPEC))


def by_leaving_out(checkpoint: Checkpoint, model: ForwardModel, layer: int) -> list[float]:
    """What the stream loses without each expert, computed by muting its down projection."""
    x = model.embed(ROWS, checkpoint.tensor("model.embed_tokens.weight"))
    for before in range(layer):
        x = model.decoder_layer(x, ModuleWeights(checkpoint, f"model.layers.{before}."), before)
    weights = dict(ModuleWeights(checkpoint, f"model.layers.{layer}."))
    whole = model.decoder_layer(x, weights, layer).double()
    found = []
    for expert in range(model.num_experts):
        name = f"mlp.experts.{expert}.down_proj.weight"
        muted = {**weights, name: torch.zeros_like(weights[name])}
        change = (whole - model.decoder_layer(x, muted, layer)).square().sum(-1)
        found.append(float((change / whole.square().sum(-1)).sum()))
    return found


def test_equals_what_the_stream_loses_without_the_expert(tiny: Checkpoint) -> None:
    model = forward_model(tiny.config)
    found = measure_experts(tiny, model, ROWS, (1, 2))
    assert list(found) == [(layer, expert) for layer in (1, 2) for expert in range(4)]
    for layer in (1, 2):
        measured = [found[layer, expert] for expert in range(4)]
        assert measured == pytest.approx(by_leaving_out(tiny, model, layer), rel=6e-3)
    only = measure_experts(tiny, model, ROWS, (2,))
    assert only == {expert: weight for expert, weight in found.items() if expert[0] == 2}


def test_many_rows_are_sampled_evenly(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    model = forward_model(tiny.config)
    monkeypatch.setattr(sensitivity, "MAX_TOKENS", 32)
    assert measure_experts(tiny, model, ROWS, (1,)) == measure_experts(tiny, model, ROWS[::3], (1,))


def test_progress_counts_the_layers_it_needs(tiny: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    model = forward_model(tiny.config)
    measure_experts(tiny, model, ROWS[:1], (1,), lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]

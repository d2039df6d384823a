"""Jobs whose matrices differ in bits: a mean shared out over experts, groups and rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.checkpoint.verify import verify_checkpoint
from exl3kit.errors import CheckpointError
from exl3kit.models.forward import forward_model
from exl3kit.models.registry import model_map
from exl3kit.quantize.allocate import allocate
from exl3kit.quantize.calibration import calibration_rows
from exl3kit.quantize.job import quantize_checkpoint
from exl3kit.quantize.preflight import QuantizeOptions
from exl3kit.quantize.recipe import Rule
from exl3kit.quantize.sensitivity import measure_experts
from exl3kit.quantize.store import Step
from exl3kit.testing.tiny_model import TinyGlm4Moe, write_tiny_model
from tests.quantize import quick

SPEC = TinyGlm4Moe(
    hidden_size=128,
    intermediate_size=128,
    moe_intermediate_size=128,
    num_experts=4,
    num_layers=3,
    mtp_layers=1,
    num_heads=2,
    num_kv_heads=1,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("source"), SPEC)


@pytest.fixture(autouse=True)
def quick_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    quick.install(monkeypatch)


def bits_of(checkpoint: Checkpoint, name: str) -> float:
    return checkpoint.infos[f"{name}.trellis"].shape[2] / 16


def test_a_mean_is_shared_out_by_measured_weights(source: Path, tmp_path: Path) -> None:
    options = QuantizeOptions(bits=2.5, tp=1, rows=8, cols=64, mtp="trellis")
    report = quantize_checkpoint(source, tmp_path / "out", options)
    plain = open_checkpoint(source)
    model = forward_model(plain.config)
    rows = calibration_rows(source, model.vocab_size, rows=8, cols=64).rows
    weights = measure_experts(plain, model, rows, (1, 2), torch.device("cpu"))
    expected = allocate(weights, 2.5, "mcg")
    assert sorted(expected.values()) == [2] * 4 + [3] * 4
    expected |= {(3, expert): 2 for expert in range(4)}  # the next-token layer

    made = open_checkpoint(tmp_path / "out")
    assert made.manifest is not None and made.manifest.k_values == (2, 3)
    for (layer, expert), bits in expected.items():
        assert made.manifest.layer_bits[layer][expert] == bits
        for name in ("gate", "up", "down"):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.rank0"
            assert bits_of(made, prefix) == bits
    table = json.loads((tmp_path / "out" / "tier_bitmap.json").read_text())
    assert table["1"]["k"] == [expected[1, expert] for expert in range(4)]
    assert verify_checkpoint(tmp_path / "out", model_map).is_ok
    allocation = report.to_json()["allocation"]
    assert allocation == {
        "mean_bits": 2.5,
        "expert_weights": {
            str(layer): [weights[layer, expert] for expert in range(4)] for layer in (1, 2)
        },
    }


def test_an_ordinary_file_of_mean_bits(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "out", QuantizeOptions(bits=3.5, rows=4, cols=64))
    made = open_checkpoint(tmp_path / "out")
    names = [f"model.layers.{x}.mlp.experts.{e}.up_proj" for x in (1, 2) for e in range(4)]
    bits = [bits_of(made, name) for name in names]
    assert sorted(bits) == [3] * 4 + [4] * 4 and len(set(bits[:4])) == 1
    assert made.bits == 3.5
    config = made.config["quantization_config"]
    assert (config["bits"], config["codebook"]) == (3.5, "mcg")
    assert verify_checkpoint(tmp_path / "out", model_map).is_ok


def test_a_resumed_job_keeps_its_plan(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = QuantizeOptions(bits=2.5, tp=1, rows=4, cols=64)

    class Stopped(Exception): ...

    def stop(step: Step) -> None:
        if step.done == 5:
            raise Stopped

    with pytest.raises(Stopped):
        quantize_checkpoint(source, tmp_path / "out", options, progress=stop)
    with pytest.raises(CheckpointError, match=r"mean_bits: begun with 2\.5, now 2\.75"):
        quantize_checkpoint(source, tmp_path / "out", replace(options, bits=2.75))
    with monkeypatch.context() as patch:
        patch.setattr("exl3kit.quantize.job.measure_experts", None)
        resumed = quantize_checkpoint(source, tmp_path / "out", options)
    assert resumed == quantize_checkpoint(source, tmp_path / "whole", options)


def test_groups_and_rules_in_an_ordinary_file(source: Path, tmp_path: Path) -> None:
    rules = (Rule("*.layers.1.mlp.experts.*", 4), Rule("*.0.self_attn.o_proj", None))
    options = QuantizeOptions(
        bits=2.5, codebook="mul1", rows=4, cols=64, dense={"attention": 5}, rules=rules
    )
    report = quantize_checkpoint(source, tmp_path / "out", options)
    made = open_checkpoint(tmp_path / "out")
    assert bits_of(made, "model.layers.2.mlp.experts.3.up_proj") == 2.5
    assert bits_of(made, "model.layers.1.mlp.experts.3.up_proj") == 4
    assert bits_of(made, "model.layers.1.self_attn.o_proj") == 5
    assert made.has("model.layers.0.self_attn.o_proj.weight")
    assert "allocation" not in report.to_json()


def test_coverage_lists_the_tokens_of_every_expert(source: Path, tmp_path: Path) -> None:
    options = QuantizeOptions(bits=2, tp=1, rows=4, cols=64)
    report = quantize_checkpoint(source, tmp_path / "out", options)
    tokens = report.to_json()["tokens_by_expert"]
    assert list(tokens) == ["1", "2"]
    assert all(len(counts) == 4 and sum(counts) == 2 * 4 * 64 for counts in tokens.values())

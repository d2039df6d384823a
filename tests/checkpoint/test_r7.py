"""The r7 dialect: whole experts, shared vectors, a rate for each projection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.checkpoint.r7 import BLOCK_KEY, R7Manifest, r7_bits
from exl3kit.errors import CheckpointError
from exl3kit.models.base import ShardKind
from exl3kit.slicing.apply import cut_exl3
from exl3kit.testing.checkpoints import write_r7, write_unaligned
from exl3kit.testing.tiny_configs import tiny_config_of

STEM = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config_of("glm4_moe", num_experts=3, mtp_layers=1)
    return write_r7(tmp_path_factory.mktemp("r7") / "m", config)


def test_opens(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.dialect, checkpoint.tp, checkpoint.manifest) == ("r7", None, None)
    assert checkpoint.r7 == R7Manifest(1, 2, (3, 4, 5))
    assert checkpoint.r7 is not None
    bits = r7_bits(checkpoint.r7, checkpoint.infos)
    assert len(bits) == 2 * 3 * 3
    assert [bits[1, 0, proj] for proj in ("gate_proj", "up_proj", "down_proj")] == [3, 4, 5]


def test_shared_vectors_are_resolved(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.has(f"{STEM}.2.up_proj.suh")
    shared = checkpoint.tensor(f"{STEM}.r7_shared.gate_up_suh")
    for proj in ("gate_proj", "up_proj"):
        assert torch.equal(checkpoint.exl3(f"{STEM}.2.{proj}").suh, shared)
    down = checkpoint.exl3(f"{STEM}.2.down_proj")
    assert torch.equal(down.svh, checkpoint.tensor(f"{STEM}.r7_shared.down_svh"))
    assert torch.equal(down.suh, checkpoint.tensor(f"{STEM}.2.down_proj.suh"))


def test_experts_are_cut_like_any_linear(folder: Path) -> None:
    """Streaming cuts at multiples of 128; the ranks' products add up to the whole."""
    down = open_checkpoint(folder).exl3(f"{STEM}.0.down_proj")
    x = torch.randn(3, 256, dtype=torch.float64)
    parts = [
        x[:, r.start : r.stop] @ cut_exl3(down, ShardKind.ROW, r).dequantize(torch.float64)
        for r in (range(128), range(128, 256))
    ]
    torch.testing.assert_close(sum(parts), x @ down.dequantize(torch.float64))


VALID = R7Manifest(1, 2, (3, 4)).to_config()
WRONG: list[tuple[Any, str]] = [
    ("x", "must be an object"),
    ({}, "missing keys: bits, codebook, k_values, moe_layers, schema"),
    (VALID | {"schema": "r8"}, "schema must be 'r7-complete-v2-checkpoint-v1', got 'r8'"),
    (VALID | {"codebook": "mul1"}, "codebook must be 'mcg'"),
    (VALID | {"bits": 3}, "bits must be 'mixed_tensor', got 3"),
    (VALID | {"moe_layers": [2, 1]}, r"[first, last]"),
    (VALID | {"moe_layers": [0, True]}, r"[first, last]"),
    (VALID | {"moe_layers": [0, 10**9]}, r"[first, last]"),
    (VALID | {"k_values": []}, "list out of [3, 4, 5]"),
    (VALID | {"k_values": [3, 6]}, "list out of [3, 4, 5]"),
    (VALID | {"k_values": [3.0]}, "list out of [3, 4, 5]"),
]


@pytest.mark.parametrize("block, text", WRONG)
def test_wrong_blocks_are_named(block: Any, text: str) -> None:
    with pytest.raises(CheckpointError) as error:
        R7Manifest.from_config({"quantization_config": {BLOCK_KEY: block}})
    assert text in str(error.value) and BLOCK_KEY in str(error.value)


def test_round_trip_and_absence() -> None:
    assert R7Manifest.from_config({"quantization_config": {BLOCK_KEY: VALID}}) == R7Manifest(
        1, 2, (3, 4)
    )
    assert R7Manifest.from_config({}) is R7Manifest.from_config({"quantization_config": 3}) is None


def changed(
    folder: Path, out: Path, drop: str = "", added: dict[str, torch.Tensor] | None = None
) -> Path:
    """The checkpoint with a tensor less or more."""
    source = open_checkpoint(folder)
    tensors = {name: source.tensor(name) for name in source.names() if name != drop}
    out.mkdir()
    write_unaligned(out / "model.safetensors", tensors | (added or {}))
    (out / "config.json").write_text(json.dumps(source.config))
    return out


@pytest.mark.parametrize(
    "name",
    [
        f"{STEM}.1.up_proj.mcg",
        f"{STEM}.1.up_proj.trellis",
        f"{STEM}.r7_shared.down_svh",
        "model.layers.2.mlp.experts.r7_shared.gate_up_suh",
    ],
)
def test_missing_tensors_are_named(folder: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(changed(folder, tmp_path / "m", drop=name))


def test_vector_stored_twice(folder: Path, tmp_path: Path) -> None:
    name = f"{STEM}.1.gate_proj.suh"
    added = {name: torch.ones(256, dtype=torch.float16)}
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(changed(folder, tmp_path / "m", added=added))


@pytest.mark.parametrize("words, text", [(96, "6 bits"), (50, "got 50")])
def test_undeclared_rate(folder: Path, tmp_path: Path, words: int, text: str) -> None:
    name = f"{STEM}.0.gate_proj.trellis"
    added = {name: torch.zeros(16, 16, words, dtype=torch.int16)}
    with pytest.raises(CheckpointError, match=name) as error:
        open_checkpoint(changed(folder, tmp_path / "m", added=added))
    assert text in str(error.value)


def test_experts_with_a_gap(folder: Path, tmp_path: Path) -> None:
    name = f"{STEM}.999999.gate_proj.trellis"
    added = {name: torch.zeros(16, 16, 48, dtype=torch.int16)}
    with pytest.raises(CheckpointError, match="numbered from 0"):
        open_checkpoint(changed(folder, tmp_path / "m", added=added))

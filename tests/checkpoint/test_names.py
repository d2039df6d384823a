from __future__ import annotations

import pytest
import torch

from exl3kit.checkpoint.manifest import RankSlicedManifest, make_manifest
from exl3kit.checkpoint.names import (
    TensorRule,
    check_complete,
    check_rank_sliced_marker,
    check_rule,
    expert_rules,
    layer_index,
    normalise_name,
    shared_h_name,
)
from exl3kit.errors import CheckpointError, FormatError

BASE = "model.layers.1.mlp.experts"


def manifest(layout: str = "per_expert_v1", tp: int = 2) -> RankSlicedManifest:
    return make_manifest(tp, {1: (3, 4, 3, 3), 2: (3,) * 4}, rotation_layout=layout)


@pytest.mark.parametrize("field", ["trellis", "suh", "svh", "mcg", "mul1"])
def test_the_rank_is_taken_off_and_told(field: str) -> None:
    name = f"{BASE}.3.gate_proj.rank1.{field}"
    assert normalise_name(name, manifest()) == (f"{BASE}.3.gate_proj.{field}", 1)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.gate.weight",
        f"{BASE}.3.gate_proj.weight",
        f"{BASE}.3.gate_proj.rank1.trellis.extra",
        f"{BASE}.3.gate_proj.rank1.weight",
        f"{BASE}.3.gate_proj.rankx.trellis",
        f"{BASE}.3.gate_proj.rank1.trellis\n",
        f"{BASE}.3.gate_proj.rank\u0661.trellis",
    ],
)
def test_other_names_are_unchanged(name: str) -> None:
    assert normalise_name(name, manifest()) == (name, None)


@pytest.mark.parametrize("rank", ["00", "01", "2", "17", "9" * 5000])
def test_ranks_that_cannot_be(rank: str) -> None:
    """R16: leading zeros, and ranks of a file made for more ranks."""
    name = f"{BASE}.0.up_proj.rank{rank}.suh"
    with pytest.raises(CheckpointError) as error:
        normalise_name(name, manifest())
    assert repr(name) in str(error.value)


def test_shared_vector_becomes_that_of_expert_0() -> None:
    shared = manifest("shared_h_v1")
    for proj, field in (("gate_proj", "suh"), ("up_proj", "suh"), ("down_proj", "svh")):
        name = f"{BASE}.shared_h.{proj}.rank0.{field}"
        assert normalise_name(name, shared) == (f"{BASE}.0.{proj}.{field}", 0)
    own = f"{BASE}.2.gate_proj.rank0.svh"
    assert normalise_name(own, shared) == (f"{BASE}.2.gate_proj.svh", 0)


@pytest.mark.parametrize(
    "layout, name",
    [
        ("per_expert_v1", "shared_h.gate_proj.rank0.suh"),
        ("shared_h_v1", "shared_h.gate_proj.rank0.svh"),
        ("shared_h_v1", "shared_h.down_proj.rank0.suh"),
        ("shared_h_v1", "shared_h.gate_proj.rank0.trellis"),
        ("shared_h_v1", "shared_h.gate_proj.suh"),
        ("shared_h_v1", "0.gate_proj.rank0.suh"),
        ("shared_h_v1", "3.down_proj.rank1.svh"),
    ],
)
def test_shared_names_the_layout_does_not_allow(layout: str, name: str) -> None:
    """R20: the tensor and the layout are named."""
    with pytest.raises(CheckpointError) as error:
        normalise_name(f"{BASE}.{name}", manifest(layout))
    assert repr(f"{BASE}.{name}") in str(error.value)
    assert "shared_h" in str(error.value)


@pytest.mark.parametrize(
    "name, text",
    [
        ("model.layers.9.mlp.experts.0.up_proj.rank0.suh", "outside moe_layers [1, 2]"),
        (f"{BASE}.4.up_proj.rank0.suh", "expert must be 0..3"),
        (f"{BASE}.x.up_proj.rank0.suh", "expert must be 0..3"),
        (f"{BASE}.0.w1.rank0.suh", "gate_proj, up_proj, down_proj"),
        ("model.mlp.experts.0.up_proj.rank0.suh", "layer index"),
    ],
)
def test_sliced_tensors_the_manifest_does_not_declare(name: str, text: str) -> None:
    with pytest.raises(CheckpointError) as error:
        normalise_name(name, manifest())
    assert text in str(error.value) and repr(name) in str(error.value)


def test_layer_index() -> None:
    assert layer_index("model.layers.78.mlp") == 78
    assert layer_index("layers.3") == 3
    with pytest.raises(CheckpointError, match=r"model.mtp.mlp"):  # R22
        layer_index("model.mtp.mlp")


@pytest.mark.parametrize(
    "layout, count, expert_bytes",
    [("per_expert_v1", 12_288, 14_315_568), ("shared_h_v1", 9_228, 14_168_112)],
)
def test_published_shapes_and_counts(layout: str, count: int, expert_bytes: int) -> None:
    """GLM-5.2 at TP4: the table of the format, H = 6144, I = 2048, 256 experts."""
    big = make_manifest(4, {3: (3,) * 256}, rotation_layout=layout)
    rules = dict(expert_rules(big, 3, 6144, 2048))
    assert len(rules) == count
    own = [rule for name, rule in rules.items() if ".experts.7." in name]
    nbytes = sum(rule.dtype.itemsize * torch.Size(rule.shape).numel() for rule in own)
    assert nbytes == expert_bytes
    prefix = "model.layers.3.mlp.experts.7"
    assert rules[f"{prefix}.up_proj.rank3.trellis"].shape == (384, 32, 48)
    assert rules[f"{prefix}.down_proj.rank3.trellis"].shape == (32, 384, 48)
    vector = "model.layers.3.mlp.experts.shared_h.down_proj.rank0.svh"
    assert (vector in rules) == (layout == "shared_h_v1")


def test_shared_h_name() -> None:
    assert shared_h_name(f"{BASE}.3.up_proj.rank1", "suh") == f"{BASE}.shared_h.up_proj.rank1.suh"
    assert shared_h_name(f"{BASE}.3.up_proj.rank1", "svh") is None
    assert shared_h_name("model.layers.0.mlp.up_proj", "suh") is None


def test_rule_names_tensor_expected_and_got() -> None:
    rule = TensorRule(torch.int16, (16, 8, 48))
    check_rule("x.trellis", torch.int16, (16, 8, 48), rule)
    with pytest.raises(CheckpointError) as error:  # R18: four bits where the map says three
        check_rule("x.trellis", torch.int16, (16, 8, 64), rule)
    assert all(text in str(error.value) for text in ("'x.trellis'", "[16, 8, 48]", "[16, 8, 64]"))
    with pytest.raises(CheckpointError, match=r"int16.*got torch.float16"):
        check_rule("x.trellis", torch.float16, (16, 8, 48), rule)
    check_rule("x.mcg", torch.int32, (1,), TensorRule(torch.int32, ()))
    with pytest.raises(CheckpointError, match=r"x.mcg"):
        check_rule("x.mcg", torch.int32, (2,), TensorRule(torch.int32, ()))


def test_marker_must_be_mcg_with_its_exact_value() -> None:
    """R19: the tensor and the value in hex."""
    check_rank_sliced_marker("x.mcg", torch.tensor([-877912083], dtype=torch.int32))
    with pytest.raises(FormatError, match=r"x.mcg.*0xCBAC1FED.*0x00000001"):
        check_rank_sliced_marker("x.mcg", torch.tensor(1, dtype=torch.int32))
    with pytest.raises(CheckpointError, match=r"x.mul1.*0x83DCD12D"):
        check_rank_sliced_marker("x.mul1", torch.tensor(-2082680531, dtype=torch.int32))


def test_missing_tensors_after_loading() -> None:
    """R17: the layer, the first 32 names and the total."""
    check_complete(3, [])
    with pytest.raises(CheckpointError) as error:
        check_complete(3, [f"t{i:03d}" for i in range(40)])
    message = str(error.value)
    assert "layer 3: 40 tensors" in message
    assert "t031, ..." in message and "t032" not in message

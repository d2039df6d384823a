"""The tensor stream of one rank: filter, names, drafts, and what is refused before reading."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.errors import CheckpointError, FormatError
from exl3kit.format.spec import Codebook
from exl3kit.format.tensors import make_marker
from exl3kit.integrations.vllm import compat
from exl3kit.integrations.vllm.config import Exl3Config
from exl3kit.integrations.vllm.facts import CheckpointFacts, read_facts
from exl3kit.integrations.vllm.loader import Exl3Loader, check_methods, check_same, local_weights
from exl3kit.testing.generate import make_rank_sliced
from tests.integrations.vllm.conftest import LAYER, SIZES


def names(stored: dict[str, Any], facts: CheckpointFacts, rank: int = 0) -> list[str]:
    return [name for name, _ in local_weights(stored.items(), facts, range(rank, rank + 1))]


def test_each_rank_sees_its_own_slices_and_all_other_tensors(
    sliced: Path, facts: CheckpointFacts
) -> None:
    checkpoint = open_checkpoint(sliced)
    stored = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    for rank in range(2):
        kept = dict(local_weights(stored.items(), facts, range(rank, rank + 1)))
        own = {name for name in stored if f".rank{rank}." in name}
        rest = {name for name in stored if ".rank" not in name}
        assert set(kept) == {name.replace(f".rank{rank}", "") for name in own} | rest
        name = f"{LAYER}.3.down_proj.rank{rank}.trellis"
        assert torch.equal(kept[f"{LAYER}.3.down_proj.trellis"], stored[name].flatten(1))


def test_only_the_own_slice_is_read_as_a_copy(sliced: Path, facts: CheckpointFacts) -> None:
    """Other ranks' tensors are dropped by name, whatever they hold."""
    name = f"{LAYER}.0.up_proj.rank{{}}.suh"
    stored = {name.format(0): torch.ones(1), name.format(1): None}
    assert names(stored, facts) == [f"{LAYER}.0.up_proj.suh"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{LAYER}.0.up_proj.rank2.suh", "below the checkpoint's tp = 2"),
        (f"{LAYER}.0.up_proj.rank01.suh", "leading zeros"),
        ("model.layers.0.mlp.experts.0.up_proj.rank0.suh", "outside moe_layers"),
        (f"{LAYER}.shared_h.up_proj.rank0.suh", "not allowed with rotation_layout"),
    ],
)
def test_names_the_manifest_does_not_have(facts: CheckpointFacts, name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        names({name: torch.ones(1)}, facts)


def test_markers_of_the_own_rank_are_checked(facts: CheckpointFacts) -> None:
    name = f"{LAYER}.0.up_proj.rank0"
    with pytest.raises(CheckpointError, match="mul1 0x83DCD12D"):
        names({f"{name}.mul1": torch.tensor(-2082680531, dtype=torch.int32)}, facts)
    with pytest.raises(FormatError, match="0x00000003"):
        names({f"{name}.mcg": torch.tensor(3, dtype=torch.int32)}, facts)
    assert names({f"{name}.mcg": make_marker(Codebook.MCG)}, facts) == [f"{LAYER}.0.up_proj.mcg"]


def test_shared_vectors_load_as_those_of_expert_0(plain: Path, tmp_path: Path) -> None:
    path = make_rank_sliced(plain, tmp_path / "s", 3, 2, (1, 2), rotation_layout="shared_h_v1")
    facts = read_facts(path, SIZES)
    stored = {f"{LAYER}.shared_h.down_proj.rank1.svh": torch.ones(128)}
    assert names(stored, facts, rank=1) == [f"{LAYER}.0.down_proj.svh"]
    with pytest.raises(CheckpointError, match="under shared_h"):
        names({f"{LAYER}.1.down_proj.rank1.svh": torch.ones(128)}, facts)


def test_a_quantised_draft_head_is_dropped(facts: CheckpointFacts) -> None:
    """vLLM's drafts take the target's head; a plain copy is left to vLLM."""
    head = "model.layers.3.shared_head.head"
    stored = {f"{head}.trellis": torch.ones(1), f"{head}.weight": torch.ones(1)}
    assert names(stored, facts) == [f"{head}.weight"]


def test_rank_names_without_a_manifest(facts: CheckpointFacts) -> None:
    unsliced = dataclasses.replace(facts, manifest=None)
    with pytest.raises(CheckpointError, match=r"config\.json has no hybrid_tr3_tail"):
        names({f"{LAYER}.0.up_proj.rank0.suh": torch.ones(1)}, unsliced)


def make_model(facts: CheckpointFacts | None, method: Any) -> torch.nn.Module:
    """A draft whose next-token layer (index 3) has routed experts."""
    experts = compat.ExpertsLayer.__new__(compat.ExpertsLayer)
    torch.nn.Module.__init__(experts)
    experts.quant_method, experts.quant_config = method, Exl3Config()
    experts.quant_config.facts = facts
    model = torch.nn.Module()
    model.add_module("layers", torch.nn.ModuleDict({"3": torch.nn.ModuleDict({"mlp": experts})}))
    return model


def test_a_draft_that_missed_the_config_is_refused(facts: CheckpointFacts) -> None:
    inside = dataclasses.replace(facts, experts={**facts.experts, 3: facts.experts[1]})
    model = make_model(inside, method=object())
    with pytest.raises(CheckpointError, match=r"layers\.3\.mlp: .* EXL3 .* built with object"):
        check_methods(model, inside)
    check_methods(model, facts)  # the layer lies outside moe_layers: vLLM's own method is right


def test_a_changed_checkpoint_is_refused(
    facts: CheckpointFacts, sliced: Path, plain: Path, tmp_path: Path
) -> None:
    check_same(facts, sliced)
    other = make_rank_sliced(plain, tmp_path / "four", 4, 2, (1, 2))
    with pytest.raises(CheckpointError, match="start a new engine"):
        check_same(facts, other)


def test_the_loader_checks_before_it_reads(
    monkeypatch: pytest.MonkeyPatch, facts: CheckpointFacts, sliced: Path, tmp_path: Path
) -> None:
    stream = [("model.norm.weight", torch.ones(1))]
    monkeypatch.setattr(
        compat.DefaultModelLoader, "get_all_weights", lambda *_: (item for item in stream)
    )
    loader = Exl3Loader.__new__(Exl3Loader)
    config = SimpleNamespace(model=str(sliced), revision=None, quantization="exl3")
    assert list(loader.get_all_weights(config, make_model(facts, None))) == stream
    config.model = str(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="gone"):
        loader.get_all_weights(config, make_model(facts, None))


def test_other_models_load_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = iter([("weight", torch.ones(1))])
    monkeypatch.setattr(compat.DefaultModelLoader, "get_all_weights", lambda *_: stream)
    loader, model = Exl3Loader.__new__(Exl3Loader), torch.nn.Linear(1, 1)
    config = SimpleNamespace(model="m", revision=None, quantization=None)
    assert loader.get_all_weights(config, model) is stream
    config.quantization = "exl3"
    with pytest.raises(CheckpointError, match="built unquantised"):
        loader.get_all_weights(config, model)

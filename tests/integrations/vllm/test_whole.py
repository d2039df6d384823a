"""Experts that are stored whole are cut while they load: ordinary EXL3, packed signs, and r7."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.errors import CheckpointError, SliceError
from exl3kit.integrations.vllm.facts import CheckpointFacts, read_facts
from exl3kit.slicing.job import slice_checkpoint
from exl3kit.slicing.plan import SliceOptions
from exl3kit.testing.checkpoints import OrdinaryOptions, write_ordinary, write_r7
from exl3kit.testing.compare import assert_three_gates
from exl3kit.testing.tiny_model import tiny_config
from tests.integrations.vllm.conftest import (
    LAYER,
    SIZES,
    SPEC,
    FakeMoE,
    FakeParallel,
    build_experts,
    make_layer,
)
from tests.integrations.vllm.loading import Tensors, dense_experts, load, loaded_rank, route, stored


def assert_right(path: Path, tp_size: int) -> None:
    """The ranks' sums add up to the decoded experts."""
    x, weights, ids = route(SPEC.num_experts)
    parts = [loaded_rank(path, rank, tp_size) for rank in range(tp_size)]
    found = sum(method.apply(layer, x, weights, ids) for method, layer in parts)
    expected = dense_experts(path, x, weights, ids)
    assert isinstance(found, torch.Tensor)
    assert_three_gates(found, expected, "float32")


@pytest.fixture(scope="module")
def r7(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rates in turn, expert by expert: 3 4 3 and 4 3 4 bits, so gate and up always differ."""
    return write_r7(tmp_path_factory.mktemp("whole") / "r7", tiny_config(SPEC), (3, 4))


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("has_packed_signs", [False, True])
def test_ordinary(tmp_path: Path, tp_size: int, has_packed_signs: bool) -> None:
    options = OrdinaryOptions(bits=3, codebook="3inst", has_packed_signs=has_packed_signs)
    path = write_ordinary(tmp_path / "m", tiny_config(SPEC), options)
    is_packed = open_checkpoint(path).has(f"{LAYER}.0.up_proj.su")
    assert is_packed == has_packed_signs
    assert_right(path, tp_size)


def test_a_cut_inside_a_block_is_refused(tmp_path: Path, parallel: SimpleNamespace) -> None:
    path = write_ordinary(tmp_path / "m", tiny_config(SPEC), OrdinaryOptions(bits=3))
    parallel.tp_size = 4
    moe = FakeMoE(moe_parallel_config=FakeParallel(4))
    with pytest.raises(SliceError, match=r"256 / tp 4 = 64 .* tp values that work: 1, 2"):
        build_experts(read_facts(path, SIZES), moe, make_layer())


@pytest.mark.parametrize("tp_size", [1, 2])
def test_r7_with_rates_of_each_projection(r7: Path, tp_size: int) -> None:
    rates = read_facts(r7, SIZES).experts[1].rates
    assert rates == ((3, 4, 3), (4, 3, 4)) * 2
    assert_right(r7, tp_size)


@pytest.mark.parametrize("k_values", [(4,), (3, 4, 5)])
def test_r7_of_one_tier(tmp_path: Path, k_values: tuple[int, ...]) -> None:
    assert_right(write_r7(tmp_path / "m", tiny_config(SPEC), k_values), 2)


def test_a_missing_shared_vector_goes_by_its_name(r7: Path) -> None:
    facts, layer = read_facts(r7, SIZES), make_layer()
    method = build_experts(facts, FakeMoE(), layer)
    tensors = stored(open_checkpoint(r7))
    name = f"{LAYER}.r7_shared.gate_up_suh"
    del tensors[name]
    load(layer, tensors, facts)
    with pytest.raises(CheckpointError, match=f"1 tensors are missing: {name}"):
        method.process_weights_after_loading(layer)


class Narrow(FakeMoE):
    """192 channels an expert: 96 on each of two ranks, as vLLM counts."""

    @property
    def intermediate_size_per_partition(self) -> int:
        return 192 // self.tp_size


def test_padded_width(tmp_path: Path) -> None:
    """A width of 192 is stored as 256: two ranks of 128, half of the second one padding."""
    config = tiny_config(replace(SPEC, moe_intermediate_size=192))
    path = write_ordinary(tmp_path / "m", config, OrdinaryOptions(bits=3))
    facts = read_facts(path, replace(SIZES, moe_intermediate_size=192))
    x, weights, ids = route(SPEC.num_experts)
    found = torch.zeros_like(x)
    for rank in range(2):
        method = build_experts(facts, Narrow(tp_rank=rank), layer := make_layer())
        load(layer, stored(open_checkpoint(path)), facts)
        method.process_weights_after_loading(layer)
        assert method.fields["w2_suh"].tensors[0]["w2"].local == (128,)
        found += method.apply(layer, x, weights, ids)
    assert_three_gates(found, dense_experts(path, x, weights, ids), "float32")


def load_rank(moe: FakeMoE, facts: CheckpointFacts, tensors: Tensors) -> None:
    method = build_experts(facts, moe, layer := make_layer())
    load(layer, tensors, facts, method.ranks)
    method.process_weights_after_loading(layer)


@pytest.mark.parametrize("tp_size", [2, 1])
def test_padding_that_is_not_zero_is_refused(
    tmp_path: Path, parallel: SimpleNamespace, tp_size: int
) -> None:
    """Nothing is cropped between up and down: it would reach the output without a word."""
    config = tiny_config(replace(SPEC, moe_intermediate_size=192))
    options = OrdinaryOptions(bits=3, codebook="mcg", head_bits=None)
    whole = write_ordinary(tmp_path / "whole", config, options)
    slice_checkpoint(whole, tmp_path / "sliced", SliceOptions(tp=2))
    parallel.tp_size = tp_size
    moe = Narrow(tp_rank=tp_size - 1, moe_parallel_config=FakeParallel(tp_size))
    for path, rank in ((whole, ""), (tmp_path / "sliced", ".rank1")):
        facts = read_facts(path, replace(SIZES, moe_intermediate_size=192))
        tensors = stored(open_checkpoint(path))
        gate, up = (f"{LAYER}.2.{side}_proj{rank}.svh" for side in ("gate", "up"))
        assert not tensors[gate][-64:].any() and not tensors[up][-64:].any()
        tensors[gate] = torch.ones_like(tensors[gate])
        load_rank(moe, facts, tensors)  # a zero in one of the two is enough: they are multiplied
        tensors[up] = torch.ones_like(tensors[up])
        with pytest.raises(CheckpointError, match=rf"{gate}.*{up}.*last 64 channels"):
            load_rank(moe, facts, tensors)

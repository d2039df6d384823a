"""Experts of several rates in one layer, whatever the split."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.errors import CheckpointError, FormatError
from exl3kit.format.spec import words_per_tile
from exl3kit.integrations.vllm.facts import read_facts
from exl3kit.integrations.vllm.loader import check_same
from exl3kit.integrations.vllm.moe import Exl3MoEMethod
from exl3kit.testing.generate import make_ordinary, make_rank_sliced
from tests.integrations.vllm.conftest import LAYER, SIZES, SPEC, FakeMoE, build_experts, make_layer
from tests.integrations.vllm.loading import (
    SHARDS,
    dense_experts,
    load,
    loaded_rank,
    route,
    rows,
    stored,
)

SINGLE = [3, 4, 3, 3]
THREE = [2, 6, 4, 2]


def write(plain: Path, out: Path, bits: Sequence[int], layout: str = "per_expert_v1") -> Path:
    """Layer 1 with `bits`, layer 2 with the reverse, for two ranks."""
    layers = {1: bits, 2: bits[::-1]}
    return make_rank_sliced(plain, out, layers, 2, (1, 2), rotation_layout=layout)


@pytest.mark.parametrize("layout", ["per_expert_v1", "shared_h_v1"])
@pytest.mark.parametrize("tp_size", [2, 1])
@pytest.mark.parametrize("bits", [SINGLE, THREE])
def test_ranks_sum_to_the_decoded_experts(
    plain: Path, tmp_path: Path, bits: list[int], tp_size: int, layout: str
) -> None:
    path = write(plain, tmp_path / "m", bits, layout)
    x, weights, ids = route(SPEC.num_experts)
    partial = [
        method.apply(layer, x, weights, ids)
        for method, layer in (loaded_rank(path, rank, tp_size) for rank in range(tp_size))
    ]
    expected = dense_experts(path, x, weights, ids)
    torch.testing.assert_close(sum(partial), expected.float(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("expert", range(4))
def test_all_routes_to_one_expert(plain: Path, tmp_path: Path, expert: int) -> None:
    """The experts of other rates get none."""
    path = write(plain, tmp_path / "m", THREE)
    x, weights, ids = route(SPEC.num_experts)
    ids = torch.full_like(ids, expert)
    parts = [loaded_rank(path, rank) for rank in range(2)]
    found = sum(method.apply(layer, x, weights, ids) for method, layer in parts)
    expected = dense_experts(path, x, weights, ids)
    torch.testing.assert_close(found, expected.float(), atol=2e-5, rtol=2e-5)


def test_nothing_is_padded(plain: Path, tmp_path: Path) -> None:
    path = write(plain, tmp_path / "m", SINGLE)
    checkpoint = open_checkpoint(path)
    method, layer = loaded_rank(path, 1)
    for expert in range(SPEC.num_experts):
        for projection, (group, shard) in SHARDS.items():
            for leaf in ("trellis", "suh", "svh", "mcg"):
                (row,) = rows(method, layer, f"{group}_{leaf}", shard, expert)
                name = f"{LAYER}.{expert}.{projection}.rank1.{leaf}"
                assert torch.equal(row, checkpoint.tensor(name)), name
    resident = sum(tensor.nbytes for tensor in layer.parameters())
    own = {name: t for name, t in stored(checkpoint).items() if ".rank1." in name}
    assert resident == sum(tensor.nbytes for tensor in own.values())


def test_nothing_but_the_parameters_is_kept_of_a_layer(plain: Path, tmp_path: Path) -> None:
    """A loader that kept its sources grows by a layer's size with each layer."""
    path = write(plain, tmp_path / "m", THREE)
    facts, layer = read_facts(path, SIZES), make_layer()
    method = build_experts(facts, FakeMoE(), layer)
    tensors = stored(open_checkpoint(path))
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    load(layer, tensors, facts)
    method.process_weights_after_loading(layer)
    kept = [*layer.parameters(), *layer.buffers()]
    assert not storages & {tensor.untyped_storage().data_ptr() for tensor in kept}
    held = [value for value in vars(method).values() if isinstance(value, torch.Tensor)]
    assert [tensor.shape for tensor in held] == [(3, SPEC.num_experts, 2)]


def test_layers_with_splits_of_their_own(plain: Path, tmp_path: Path) -> None:
    """One layer after the other in one process: nothing of a split is kept for the next layer."""
    path = make_rank_sliced(plain, tmp_path / "m", {1: SINGLE, 2: [4] * 4}, 2, (1, 2))
    facts = read_facts(path, SIZES)
    assert facts.experts[1].rates == tuple((bits,) * 3 for bits in SINGLE)
    assert facts.experts[2].rates == ((4, 4, 4),) * 4
    x, weights, ids = route(SPEC.num_experts)
    for bits in (SINGLE, SINGLE[::-1], [4] * 4):
        other = make_rank_sliced(plain, tmp_path / f"{bits}", {1: bits}, 2, (1, 1))
        parts = [loaded_rank(other, rank) for rank in range(2)]
        assert all((m.matrices is None) == (len(set(bits)) == 1) for m, _ in parts)
        found = sum(method.apply(layer, x, weights, ids) for method, layer in parts)
        expected = dense_experts(other, x, weights, ids)
        torch.testing.assert_close(found, expected.float(), atol=2e-5, rtol=2e-5)


def test_a_trellis_of_another_rate_is_refused(plain: Path, tmp_path: Path) -> None:
    path = write(plain, tmp_path / "m", SINGLE)
    facts, layer = read_facts(path, SIZES), make_layer()
    build_experts(facts, FakeMoE(), layer)
    tensors = stored(open_checkpoint(path))
    name = f"{LAYER}.{{}}.up_proj.rank0.trellis"
    tensors[name.format(0)] = tensors[name.format(1)]
    words = words_per_tile(4)
    with pytest.raises(FormatError, match=rf"tiles of 48 words, got rows of {8 * words}") as error:
        load(layer, tensors, facts)
    assert name.format(0) in str(error.value)


def test_a_reload_with_another_split_is_refused(plain: Path, tmp_path: Path) -> None:
    facts = read_facts(write(plain, tmp_path / "first", SINGLE), SIZES)
    with pytest.raises(CheckpointError, match="start a new engine"):
        check_same(facts, write(plain, tmp_path / "second", SINGLE[::-1]))


def test_the_table_is_there_again_after_a_reload(plain: Path, tmp_path: Path) -> None:
    """Sleep of level 2 discards what is no parameter or buffer; graphs still read from there."""
    path = write(plain, tmp_path / "m", THREE)
    method, layer = loaded_rank(path, 0, 1)
    x, weights, ids = route(SPEC.num_experts)
    expected = method.apply(layer, x, weights, ids)
    table = method.matrices
    assert table is not None
    for tensor in [table, *layer.parameters()]:
        tensor.zero_()
    load(layer, stored(open_checkpoint(path)), read_facts(path, SIZES), method.ranks)
    method.process_weights_after_loading(layer)
    assert torch.equal(method.apply(layer, x, weights, ids), expected)
    assert method.matrices is table, "graphs hold its address"


def test_whole_experts_of_several_rates(plain: Path, tmp_path: Path) -> None:
    """An ordinary EXL3 file, cut while it loads."""
    path = make_ordinary(plain, tmp_path / "whole", THREE, "mul1")
    checkpoint = open_checkpoint(path)
    for tp_size in (1, 2):
        for rank in range(tp_size):
            method, layer = loaded_rank(path, rank, tp_size)
            width = SPEC.moe_intermediate_size // tp_size
            name = f"{LAYER}.2.down_proj.suh"
            expected = checkpoint.tensor(name)[rank * width : (rank + 1) * width]
            assert torch.equal(rows(method, layer, "w2_suh", "w2", 2)[0], expected)


def test_vectors_of_a_layer_are_held_once(plain: Path, tmp_path: Path) -> None:
    """In the layout shared_h_v1 the hidden side has one for each slice, not for each expert."""
    for layout, count in (("per_expert_v1", SPEC.num_experts), ("shared_h_v1", 1)):
        path = write(plain, tmp_path / layout, [3] * 4, layout)
        for tp_size, slices in ((2, 1), (1, 2)):
            _, layer = loaded_rank(path, 0, tp_size)
            for name, sides in (("w13_suh", 2), ("w2_svh", 1)):
                held = getattr(layer, name).numel()
                assert held == sides * count * slices * SPEC.hidden_size, (layout, name)


def test_gate_and_up_of_different_rates(plain: Path, tmp_path: Path) -> None:
    """Also where every expert has the same two."""
    path = make_ordinary(plain, tmp_path / "whole", [3] * 4)
    facts, layer = read_facts(path, SIZES), make_layer()
    odd = dataclasses.replace(facts.experts[1], rates=((3, 4, 3),) * 4)
    method = Exl3MoEMethod(FakeMoE(), odd, LAYER)
    method.create_weights(layer, 4, SPEC.hidden_size, 128, torch.float32)
    assert rows(method, layer, "w13_trellis", "w1", 2).shape[-1] == words_per_tile(3)
    assert rows(method, layer, "w13_trellis", "w3", 2).shape[-1] == words_per_tile(4)
    assert method.matrices is not None and method.matrices[1, :, 1].tolist() == [8] * 4

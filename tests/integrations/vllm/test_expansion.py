"""A file cut for two ranks on one: every slice an expert of its own."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exl3kit import log
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.errors import CheckpointError, FormatError
from exl3kit.integrations.vllm import loader
from exl3kit.integrations.vllm.facts import CheckpointFacts, read_facts
from exl3kit.integrations.vllm.loader import local_weights, ranks_here
from exl3kit.integrations.vllm.moe import Exl3MoEMethod
from exl3kit.integrations.vllm.slices import SliceJoiner
from exl3kit.testing.generate import make_rank_sliced
from tests.integrations.vllm.conftest import (
    LAYER,
    SIZES,
    SPEC,
    FakeMoE,
    FakeParallel,
    build_experts,
    make_layer,
)
from tests.integrations.vllm.loading import (
    SHARDS,
    dense_experts,
    load,
    loaded_rank,
    route,
    rows,
    stored,
)

BOTH = range(2)
ONE_RANK = FakeMoE(moe_parallel_config=FakeParallel(1))


@pytest.fixture(autouse=True)
def one_rank(parallel: SimpleNamespace) -> SimpleNamespace:
    parallel.tp_size = 1
    return parallel


def build_one(facts: CheckpointFacts, layer: torch.nn.Module) -> Exl3MoEMethod:
    """Parameters of layer 1 for an engine of one rank."""
    return build_experts(facts, ONE_RANK, layer)


def test_every_slice_has_a_row_and_nothing_else_is_kept(sliced: Path) -> None:
    checkpoint = open_checkpoint(sliced)
    method, layer = loaded_rank(sliced, 0, tp_size=1)
    assert method.ranks == BOTH
    for expert in range(SPEC.num_experts):
        for projection, (group, shard) in SHARDS.items():
            for leaf in ("trellis", "suh", "svh", "mcg"):
                block = rows(method, layer, f"{group}_{leaf}", shard, expert)
                for rank in BOTH:
                    name = f"{LAYER}.{expert}.{projection}.rank{rank}.{leaf}"
                    assert torch.equal(block[rank], checkpoint.tensor(name)), name
    resident = sum(tensor.nbytes for tensor in layer.parameters())
    assert resident == sum(tensor.nbytes for tensor in stored(checkpoint).values())


@pytest.mark.parametrize("rotation_layout", ["per_expert_v1", "shared_h_v1"])
def test_one_rank_gives_the_sum_of_two(plain: Path, tmp_path: Path, rotation_layout: str) -> None:
    path = make_rank_sliced(plain, tmp_path / "s", 3, 2, (1, 2), rotation_layout=rotation_layout)
    x, weights, ids = route(SPEC.num_experts)
    method, layer = loaded_rank(path, 0, tp_size=1)
    expected = dense_experts(path, x, weights, ids)
    found = method.apply(layer, x, weights, ids)
    torch.testing.assert_close(found, expected.float(), atol=2e-5, rtol=2e-5)


def test_the_stream_has_each_expert_tensor_once(sliced: Path, facts: CheckpointFacts) -> None:
    checkpoint = open_checkpoint(sliced)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    found = list(local_weights(tensors.items(), facts, BOTH))
    names = [name for name, _ in found]
    assert len(set(names)) == len(names)
    assert set(names) == {name for name, _ in local_weights(tensors.items(), facts, range(1))}
    name = f"{LAYER}.3.down_proj"
    parts = [tensors[f"{name}.rank{rank}.svh"] for rank in BOTH]
    assert torch.equal(dict(found)[f"{name}.svh"], torch.cat(parts))


def test_slices_in_any_order_and_a_reused_buffer(sliced: Path, facts: CheckpointFacts) -> None:
    """All of rank 1 before rank 0, each tensor in a buffer that the next one overwrites."""
    tensors = stored(open_checkpoint(sliced))
    buffer = torch.empty(1 << 20, dtype=torch.uint8)

    def borrowed() -> Any:
        for name in sorted(tensors, key=lambda name: (".rank0." in name, name)):
            view = buffer[: tensors[name].nbytes].view(tensors[name].dtype)
            yield name, view.view(tensors[name].shape).copy_(tensors[name])
            buffer.fill_(0x55)

    layer = make_layer()
    method = build_one(facts, layer)
    load(layer, SimpleNamespace(items=borrowed), facts, BOTH)  # type: ignore[arg-type]
    method.process_weights_after_loading(layer)
    _, expected = loaded_rank(sliced, 0, tp_size=1)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, getattr(expected, name)), name


def test_a_slice_that_never_comes_is_named(facts: CheckpointFacts, sliced: Path) -> None:
    layer = make_layer()
    build_one(facts, layer)
    tensors = stored(open_checkpoint(sliced))
    gone = f"{LAYER}.2.up_proj.rank1.suh"
    del tensors[gone]
    with pytest.raises(CheckpointError, match="1 tensors are missing") as error:
        load(layer, tensors, facts, BOTH)
    assert gone in str(error.value) and ".rank0." not in str(error.value)


def test_missing_experts_name_all_owned_ranks(facts: CheckpointFacts) -> None:
    method = build_one(facts, layer := make_layer())
    with pytest.raises(CheckpointError, match="96 tensors are missing") as error:
        method.process_weights_after_loading(layer)
    assert all(str(error.value).count(f".rank{rank}.") == 16 for rank in BOTH)


def test_missing_shared_vectors_go_by_their_stored_name(plain: Path, tmp_path: Path) -> None:
    path = make_rank_sliced(plain, tmp_path / "s", 3, 2, (1, 2), rotation_layout="shared_h_v1")
    facts, layer = read_facts(path, SIZES), make_layer()
    method = build_one(facts, layer)
    tensors = stored(open_checkpoint(path))
    names = [f"{LAYER}.shared_h.up_proj.rank{rank}.suh" for rank in BOTH]
    for name in names:
        del tensors[name]
    load(layer, tensors, facts, BOTH)
    with pytest.raises(CheckpointError, match="2 tensors are missing") as error:
        method.process_weights_after_loading(layer)
    assert ", ".join(names) in str(error.value)


def test_a_wrong_slice_is_refused_by_name(facts: CheckpointFacts, sliced: Path) -> None:
    layer = make_layer()
    build_one(facts, layer)
    name = f"{LAYER}.2.up_proj.rank1.{{}}"
    tensors = stored(open_checkpoint(sliced))
    bad = name.format("suh")
    with pytest.raises(CheckpointError, match=r"float16 \[128\] as in the other slices") as error:
        load(layer, tensors | {bad: torch.zeros(64, dtype=torch.float16)}, facts, BOTH)
    assert bad in str(error.value)
    bad = name.format("mcg")
    with pytest.raises(FormatError, match="0x00000005") as error:
        load(layer, tensors | {bad: torch.tensor(5, dtype=torch.int32)}, facts, BOTH)
    assert bad in str(error.value)


def test_both_slices_of_a_wrong_shape(facts: CheckpointFacts, sliced: Path) -> None:
    layer = make_layer()
    build_one(facts, layer)
    wrong = {
        f"{LAYER}.2.up_proj.rank{rank}.trellis": torch.zeros(8, 8, 64, dtype=torch.int16)
        for rank in BOTH
    }
    with pytest.raises(FormatError, match="tiles of 48 words, got rows of 512") as error:
        load(layer, stored(open_checkpoint(sliced)) | wrong, facts, BOTH)
    assert f"{LAYER}.2.up_proj.rank0.trellis" in str(error.value)


def test_ranks_beyond_the_file_are_refused_as_ever(facts: CheckpointFacts) -> None:
    stream = {f"{LAYER}.0.up_proj.rank2.suh": torch.ones(1)}
    with pytest.raises(CheckpointError, match="below the checkpoint's tp = 2"):
        list(local_weights(stream.items(), facts, BOTH))


def test_the_joiner_keeps_copies_in_rank_order() -> None:
    joiner, part = SliceJoiner(range(4, 6)), torch.tensor([1, 2])
    assert joiner.add("experts.0.up_proj.rank5.suh", 5, part) is None
    part += 10
    joined = joiner.add("experts.0.up_proj.rank4.suh", 4, part)
    assert joined is not None and joined.tolist() == [11, 12, 1, 2]
    joiner.check_done()


def test_it_is_logged_once_by_the_first_rank(
    facts: CheckpointFacts,
    one_rank: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log, "_warned", set())
    monkeypatch.setattr(loader, "_logger", logging.getLogger("test_expansion"))
    caplog.set_level(logging.INFO)
    for _ in range(2):
        assert ranks_here(facts.manifest) == BOTH
    (record,) = caplog.records
    assert "cut for 2 ranks and run on 1: each rank takes 2 slices" in record.getMessage()
    one_rank.tp_size, one_rank.tp_rank = 2, 1
    assert ranks_here(facts.manifest) == range(1, 2) and ranks_here(None) == range(1)
    assert len(caplog.records) == 1

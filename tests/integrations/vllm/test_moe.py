"""Routed experts without an engine: parameters, loading, refusals, forward."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.errors import CheckpointError, Exl3Error, FormatError, SliceError, UnsupportedError
from exl3kit.integrations.vllm.facts import CheckpointFacts
from exl3kit.integrations.vllm.moe import Exl3MoEMethod
from exl3kit.testing.generate import make_rank_sliced
from tests.integrations.vllm.conftest import (
    LAYER,
    SPEC,
    FakeMoE,
    FakeParallel,
    build_experts,
    make_layer,
)
from tests.integrations.vllm.loading import (
    SHARDS,
    Tensors,
    dense_experts,
    load,
    loaded_rank,
    route,
    rows,
    stored,
)


def test_parameters_hold_the_stored_bytes(sliced: Path) -> None:
    checkpoint = open_checkpoint(sliced)
    method, layer = loaded_rank(sliced, 1)
    for expert in range(SPEC.num_experts):
        for projection, (group, shard) in SHARDS.items():
            for leaf in ("trellis", "suh", "svh", "mcg"):
                name = f"{LAYER}.{expert}.{projection}.rank1.{leaf}"
                (row,) = rows(method, layer, f"{group}_{leaf}", shard, expert)
                assert torch.equal(row, checkpoint.tensor(name)), name


def test_trellis_is_the_only_resident_copy(sliced: Path) -> None:
    method, layer = loaded_rank(sliced, 0)
    tensors = [*layer.parameters(), *layer.buffers()]
    resident = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    packed = sum(2 * getattr(layer, name).numel() for name in ("w13_trellis", "w2_trellis"))
    assert resident <= 1.15 * packed
    assert not any(isinstance(value, torch.Tensor) for value in vars(method).values())


def test_ranks_sum_to_the_decoded_experts(sliced: Path) -> None:
    x, weights, ids = route(SPEC.num_experts)
    partial = [
        method.apply(layer, x, weights, ids, "shared experts", shared_experts_input=None)
        for method, layer in (loaded_rank(sliced, rank) for rank in range(2))
    ]
    expected = dense_experts(sliced, x, weights, ids)
    torch.testing.assert_close(sum(partial), expected.float(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_apply_keeps_the_activation_dtype(sliced: Path, dtype: torch.dtype) -> None:
    x, weights, ids = route(SPEC.num_experts)
    method, layer = loaded_rank(sliced, 0)
    exact = method.apply(layer, x.to(dtype).float(), weights, ids)
    narrow = method.apply(layer, x.to(dtype), weights, ids)
    assert narrow.dtype == dtype
    torch.testing.assert_close(narrow.float(), exact.to(dtype).float())


def test_shared_vectors_reach_every_expert(plain: Path, tmp_path: Path) -> None:
    path = make_rank_sliced(plain, tmp_path / "s", 3, 2, (1, 2), rotation_layout="shared_h_v1")
    x, weights, ids = route(SPEC.num_experts)
    partial = [
        method.apply(layer, x, weights, ids)
        for method, layer in (loaded_rank(path, rank) for rank in range(2))
    ]
    expected = dense_experts(path, x, weights, ids)
    torch.testing.assert_close(sum(partial), expected.float(), atol=2e-5, rtol=2e-5)


def test_whole_experts_are_cut_to_the_rank(facts: CheckpointFacts, sliced: Path) -> None:
    """An unsliced file at TP 2 gives each rank exactly the slice a file made for TP 2 holds."""
    slices = stored(open_checkpoint(sliced))
    whole: Tensors = {}
    for name in slices:
        if ".rank0." not in name:
            continue
        pair = [slices[name.replace(".rank0.", f".rank{rank}.")] for rank in range(2)]
        leaf, is_down = name.rpartition(".")[2], "down_proj" in name
        cut = {"trellis": 0 if is_down else 1, ("suh" if is_down else "svh"): 0}.get(leaf)
        shared = pair[0] if cut is None else torch.cat(pair, dim=cut)
        whole[name.replace(".rank0", "")] = shared
    experts = dataclasses.replace(facts.experts[1], manifest=None)
    whole_facts = dataclasses.replace(facts, manifest=None, experts={1: experts})
    layer = make_layer()
    method = build_experts(whole_facts, FakeMoE(tp_rank=1), layer)
    load(layer, whole, whole_facts)
    method.process_weights_after_loading(layer)
    _, expected = loaded_rank(sliced, 1)
    for name in ("w13_trellis", "w13_svh", "w2_trellis", "w2_suh"):
        assert torch.equal(getattr(layer, name), getattr(expected, name)), name


def test_missing_tensors_are_named(facts: CheckpointFacts, sliced: Path) -> None:
    layer = make_layer()
    method = build_experts(facts, FakeMoE(), layer)
    tensors = stored(open_checkpoint(sliced))
    gone = [f"{LAYER}.3.down_proj.rank0.mcg", f"{LAYER}.2.up_proj.rank0.suh"]
    for name in gone:
        del tensors[name]
    load(layer, tensors, facts)
    with pytest.raises(CheckpointError, match="layer 1: 2 tensors are missing") as error:
        method.process_weights_after_loading(layer)
    assert all(name in str(error.value) for name in gone)


def test_missing_list_is_bounded(facts: CheckpointFacts) -> None:
    method = build_experts(facts, FakeMoE(), layer := make_layer())
    with pytest.raises(CheckpointError, match="48 tensors are missing") as error:
        method.process_weights_after_loading(layer)
    assert str(error.value).count(".rank0.") == 32


def test_a_reload_has_to_be_complete_again(facts: CheckpointFacts, sliced: Path) -> None:
    method, layer = loaded_rank(sliced, 0)
    tensors = stored(open_checkpoint(sliced))
    del tensors[f"{LAYER}.0.gate_proj.rank0.trellis"]
    load(layer, tensors, facts)
    with pytest.raises(CheckpointError, match=r"0\.gate_proj\.rank0\.trellis"):
        method.process_weights_after_loading(layer)


def test_loaded_bytes_survive_a_reused_buffer(facts: CheckpointFacts, sliced: Path) -> None:
    """Fast loaders hand out views of a buffer that the next tensor overwrites."""
    checkpoint, layer = open_checkpoint(sliced), make_layer()
    method = build_experts(facts, FakeMoE(), layer)
    buffer = torch.empty(1 << 20, dtype=torch.uint8)

    def borrowed() -> Any:
        for name, tensor in stored(checkpoint).items():
            view = buffer[: tensor.numel() * tensor.element_size()].view(tensor.dtype)
            yield name, view.view(tensor.shape).copy_(tensor)
            buffer.fill_(0x55)

    load(layer, SimpleNamespace(items=borrowed), facts)  # type: ignore[arg-type]
    method.process_weights_after_loading(layer)
    _, expected = loaded_rank(sliced, 0)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, getattr(expected, name)), name


@pytest.mark.parametrize(
    ("leaf", "bad", "message"),
    [
        ("trellis", torch.zeros(8, 8, 64, dtype=torch.int16), "got"),
        ("trellis", torch.zeros(8, 16, 48, dtype=torch.int16), r"got torch\.int16 \[8, 16, 48\]"),
        ("trellis", torch.zeros(8, 8, 48, dtype=torch.float16), r"expected torch\.int16"),
        ("suh", torch.zeros(64, dtype=torch.float16), r"expected torch\.float16 \[128\]"),
        ("svh", torch.zeros(128, dtype=torch.bfloat16), r"got torch\.bfloat16"),
        ("mcg", torch.tensor(0x1234567, dtype=torch.int32), "0x01234567"),
    ],
)
def test_wrong_tensors_are_refused(
    facts: CheckpointFacts, sliced: Path, leaf: str, bad: torch.Tensor, message: str
) -> None:
    layer = make_layer()
    build_experts(facts, FakeMoE(), layer)
    name = f"{LAYER}.2.up_proj.rank0.{leaf}"
    tensors = stored(open_checkpoint(sliced)) | {name: bad}
    with pytest.raises((FormatError, CheckpointError), match=message) as error:
        load(layer, tensors, facts)
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("moe", "attributes", "kind", "message"),
    [
        (FakeMoE(moe_parallel_config=FakeParallel(1, ep_size=2)), {}, UnsupportedError, "expert p"),
        (
            FakeMoE(moe_parallel_config=FakeParallel(enable_eplb=True)),
            {},
            UnsupportedError,
            "EPLB",
        ),
        (FakeMoE(moe_parallel_config=FakeParallel(4)), {}, UnsupportedError, "data parallelism"),
        (FakeMoE(has_bias=True), {}, UnsupportedError, "bias"),
        (FakeMoE(num_experts=8), {}, CheckpointError, "has 4 a layer, the model has 8"),
        (FakeMoE(hidden_dim=192), {}, SliceError, "192"),
        (FakeMoE(), {"activation": "gelu"}, UnsupportedError, "gelu"),
        (FakeMoE(), {"swiglu_limit": 7.0}, UnsupportedError, "'silu clipped at 7.0'"),
        (FakeMoE(), {"apply_router_weight_on_input": True}, UnsupportedError, "router weight"),
        (FakeMoE(), {"expert_map": torch.zeros(4)}, UnsupportedError, "expert_map"),
    ],
)
def test_layouts_that_cannot_run_are_refused(
    facts: CheckpointFacts,
    moe: FakeMoE,
    attributes: dict[str, Any],
    kind: type[Exl3Error],
    message: str,
) -> None:
    with pytest.raises(kind, match=message):
        build_experts(facts, moe, make_layer(**attributes))


def test_wrong_tp_names_both_numbers_and_what_works(
    facts: CheckpointFacts, parallel: SimpleNamespace
) -> None:
    parallel.tp_size = 4
    with pytest.raises(SliceError, match="cut for 2 ranks, the engine runs 4") as error:
        build_experts(facts, FakeMoE(moe_parallel_config=FakeParallel(4)), make_layer())
    assert "--tensor-parallel-size 1, 2" in str(error.value)


def test_activation_dtype_and_token_budget(
    facts: CheckpointFacts, parallel: SimpleNamespace
) -> None:
    with pytest.raises(CheckpointError, match="float64"):
        build_experts(facts, FakeMoE(), make_layer(), torch.float64)
    parallel.tokens = None
    with pytest.raises(CheckpointError, match="max_num_batched_tokens"):
        build_experts(facts, FakeMoE(), make_layer())


def test_meta_device_is_refused(facts: CheckpointFacts) -> None:
    with torch.device("meta"), pytest.raises(CheckpointError, match="meta device"):
        build_experts(facts, FakeMoE(), make_layer())


def test_different_bits_in_different_layers_are_fine(facts: CheckpointFacts) -> None:
    for bits in (3, 5):
        experts = dataclasses.replace(facts.experts[1], rates=((bits, bits, bits),) * 4)
        module = make_layer()
        method = Exl3MoEMethod(FakeMoE(), experts, LAYER)
        method.create_weights(module, 4, 128, 128, torch.float32)
        assert rows(method, module, "w2_trellis", "w2", 3).shape == (1, 8, 8, 16 * bits)

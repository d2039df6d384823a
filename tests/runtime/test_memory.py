"""Memory of each rank: GLM-5.2's published totals, and small models counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from exl3kit.checkpoint.inventory import by_kind, by_layer, stored_tensors
from exl3kit.checkpoint.modules import exl3_parts
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.errors import CheckpointError, SliceError
from exl3kit.models.registry import model_map
from exl3kit.runtime.memory import (
    Deployment,
    moe_shape,
    plan_memory,
    planned_tensors,
    rank_bytes,
)
from exl3kit.testing.checkpoints import write_ordinary, write_plain
from exl3kit.testing.generate import make_rank_sliced
from exl3kit.testing.tiny_configs import tiny_config_of
from tests.runtime.glm52 import GLM_52


def is_expert(module: str) -> bool:
    return ".mlp.experts." in module


def at(tp: int, **changes: object) -> Deployment:
    return Deployment(**{"tp": tp, "file_tp": None, "is_exl3": is_expert, **changes})  # type: ignore[arg-type]


def test_glm_52_at_tp4_has_the_published_totals() -> None:
    """76 layers with trellis experts, the next-token layer included; 3 bits everywhere.

    The publisher counts 316,304,795,648 bytes of tensors in the whole checkpoint.
    """
    model = model_map(GLM_52)
    (experts, *others) = by_kind(by_layer(planned_tensors(model, 3, 4)))
    assert sum(row.num_bytes for row in others) == 37_781_104_640
    assert experts.kind == "routed experts" and len(model.moe_layers) == 76
    assert experts.num_tensors == 933_888
    assert experts.num_bytes == 278_523_691_008
    assert experts.rates == {3.0: 76 * 256 * 12}
    weights = rank_bytes(model, planned_tensors(model, 3, 4), at(4))
    assert weights["routed experts"] == 278_523_691_008 // 4


@pytest.mark.parametrize(
    "bits, of_an_expert",
    [(2, 9_596_976), (3, 14_315_568), (4, 19_034_160), (5, 23_752_752), (6, 28_471_344)],
)
def test_glm_52_bytes_of_one_expert(bits: int, of_an_expert: int) -> None:
    (experts, *_) = by_kind(by_layer(planned_tensors(model_map(GLM_52), bits, 4)))
    assert experts.num_bytes == 76 * 256 * of_an_expert


def test_glm_52_plan() -> None:
    model = model_map(GLM_52)
    tensors = planned_tensors(model, 3, 4)
    plan = plan_memory(model, tensors, at(4, vram=92 * 2**30))
    assert f"{plan.decode_arena / 2**20:.2f} {plan.prefill_arena / 2**20:.2f}" == "33.51 1054.16"
    assert plan.num_arenas == 2  # the draft has its own
    assert plan.kv_bytes_per_token == 79 * 576 * 2 + 22 * 132  # 57 layers share an indexer
    assert f"{plan.decode_scratch / 2**20:.1f} {plan.prefill_scratch / 2**20:.1f}" == "106.4 386.4"
    left = 92 * 2**30 - sum(plan.weights.values()) - plan.scratch
    assert plan.kv_bytes == left and plan.kv_tokens == left // plan.kv_bytes_per_token
    fp8 = plan_memory(model, tensors, at(4, has_fp8_cache=True))
    assert fp8.kv_bytes_per_token == 79 * 656 + 22 * 132 and fp8.kv_tokens is None


def test_key_value_heads_are_cut_then_repeated() -> None:
    model = model_map(tiny_config_of("llama"))  # 2 heads of 64, 2 layers
    tensors = planned_tensors(model, 3, 1)
    sizes = [plan_memory(model, tensors, at(tp)).kv_bytes_per_token for tp in (1, 2, 4)]
    assert sizes == [2 * 2 * 2 * 64 * 2, 2 * 2 * 64 * 2, 2 * 2 * 64 * 2]
    attention = [rank_bytes(model, tensors, at(tp))["attention"] for tp in (1, 2, 4)]
    query_and_out, keys = 2 * 256 * 256 * 2, 2 * 128 * 256 * 2
    assert attention == [2 * (query_and_out // tp + keys // min(tp, 2)) for tp in (1, 2, 4)]


def test_dense_models_have_no_arena() -> None:
    model = model_map(tiny_config_of("qwen3"))
    plan = plan_memory(model, planned_tensors(model, 3, 1), at(1))
    assert (plan.arena, plan.num_arenas) == (0, 0)


def test_ordinary_file_cut_while_loading(tmp_path: Path) -> None:
    """suh goes to both ranks of a column cut, svh to both of a row cut; trellises are halved."""
    checkpoint = open_checkpoint(write_ordinary(tmp_path / "m", tiny_config_of("llama")))
    model, tensors = model_map(checkpoint.config), stored_tensors(checkpoint)
    deployment = at(2, is_exl3=lambda module: bool(exl3_parts(checkpoint, module)))
    found = rank_bytes(model, tensors, deployment)["dense MLP"]
    trellis, side = 3 * 256 * 512 // 8, (256 + 512 // 2) * 2 + 4
    assert found == 2 * 3 * (trellis // 2 + side)


def test_expansion_runs_each_slice_as_an_expert(tmp_path: Path) -> None:
    config = tiny_config_of("glm4_moe", num_experts=2)
    plain = write_plain(tmp_path / "plain", config)
    checkpoint = open_checkpoint(make_rank_sliced(plain, tmp_path / "m", 3, 2, (1, 1)))
    model, tensors = model_map(checkpoint.config), stored_tensors(checkpoint)
    whole, half = (at(tp, file_tp=2) for tp in (1, 2))
    assert moe_shape(model, whole).num_experts == 4 and moe_shape(model, whole).top_k == 4
    assert moe_shape(model, whole).slice_size == moe_shape(model, half).slice_size == 128
    one, two = (rank_bytes(model, tensors, d)["routed experts"] for d in (whole, half))
    assert one == 2 * two == sum(t.num_bytes for t in tensors if is_expert(t.name))


def test_draft_layers_that_are_not_stored_do_not_count(tmp_path: Path) -> None:
    model = model_map(GLM_52)
    tensors = [t for t in planned_tensors(model, 3, 4) if ".layers.78." not in t.name]
    plan = plan_memory(model, tensors, at(4))
    assert plan.num_arenas == 1 and plan.kv_bytes_per_token == 78 * 576 * 2 + 21 * 132


def test_files_without_a_layer_cannot_be_planned() -> None:
    """As when only the shard of the embedding has arrived: no cache, and no tokens to count."""
    model = model_map(GLM_52)
    tensors = [t for t in planned_tensors(model, 3, 4) if ".layers." not in t.name]
    with pytest.raises(CheckpointError, match="decoder layers: expected tensors"):
        plan_memory(model, tensors, at(4, vram=2**30))


def test_impossible_slices_are_refused() -> None:
    with pytest.raises(SliceError, match="tp values that work: 1, 2, 4, 8, 16"):
        planned_tensors(model_map(GLM_52), 3, 3)

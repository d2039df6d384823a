"""Sources other than the usual: r7, padded widths, packed signs, slices, row tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.nn.functional import silu

from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.checkpoint.verify import verify_checkpoint
from exl3kit.errors import CheckpointError, SliceError
from exl3kit.models.registry import model_map
from exl3kit.slicing.apply import cut_exl3
from exl3kit.slicing.axes import rank_range
from exl3kit.slicing.job import slice_checkpoint
from exl3kit.slicing.plan import SliceOptions
from exl3kit.slicing.prove import source_faults
from exl3kit.testing.checkpoints import OrdinaryOptions, write_ordinary, write_plain, write_r7
from exl3kit.testing.compare import assert_bitwise_equal
from exl3kit.testing.generate import make_ordinary
from exl3kit.testing.tiny_configs import tiny_config_of
from tests.slicing.conftest import rewrite

EXPERT = "model.layers.1.mlp.experts.1"
MCG = OrdinaryOptions(3, "mcg")
PADDED: dict[str, Any] = {"moe_intermediate_size": 320}  # stored as 384


def config_of(name: str = "glm4_moe", **keys: Any) -> dict[str, Any]:
    return tiny_config_of(name, num_experts=2) | keys


def cut(
    source: Path, out: Path, tp: int, layout: Literal["per_expert", "shared_h"] | None = None
) -> Checkpoint:
    """The slice, after both proofs."""
    slice_checkpoint(source, out, SliceOptions(tp, layout))
    assert verify_checkpoint(out, model_map).faults == ()
    sliced = open_checkpoint(out)
    assert source_faults(sliced, open_checkpoint(source)) == []
    return sliced


def check_experts(sliced: Checkpoint, source: Checkpoint, width: int) -> None:
    """Each slice, vectors resolved, is the cut of the source's linear of `width` channels."""
    assert sliced.tp is not None
    model = model_map(source.config)
    for spec in (s for expert in range(2) for s in model.expert_linears(1, expert)):
        for rank in range(sliced.tp):
            channels = rank_range("I", width, sliced.tp, rank)
            expected = cut_exl3(source.exl3(spec.name), spec.shard, channels)
            found = sliced.exl3(f"{spec.name}.rank{rank}")
            for field, tensor in expected.tensors().items():
                assert_bitwise_equal(found.tensors()[field], tensor.contiguous(), field)


@pytest.mark.parametrize("layout", [None, "shared_h", "per_expert"])
def test_r7(tmp_path: Path, layout: Literal["per_expert", "shared_h"] | None) -> None:
    """One vector for gate and up of all experts becomes one for each projection and rank."""
    source = write_r7(tmp_path / "r7", config_of(), (4,))
    sliced = cut(source, tmp_path / "o", 2, layout)
    check_experts(sliced, open_checkpoint(source), 256)
    is_shared = sliced.has("model.layers.1.mlp.experts.shared_h.up_proj.rank1.suh")
    assert is_shared == (layout != "per_expert")
    assert not any("r7_shared" in name for name in sliced.names())
    assert sliced.dialect == "rank-sliced" and "r7_routed_experts" not in str(
        sliced.config["quantization_config"]
    )


def test_r7_with_rates_that_differ_within_an_expert(tmp_path: Path) -> None:
    source = write_r7(tmp_path / "r7", config_of(), (3, 4, 5))
    text = r"experts\.0: a rank-sliced expert has one bitrate, got gate_proj 3, up_proj 4, down_pr"
    with pytest.raises(SliceError, match=text):
        slice_checkpoint(source, tmp_path / "o", SliceOptions(2))


@pytest.mark.parametrize("tp", [1, 3])
def test_padded_width(tmp_path: Path, tp: int) -> None:
    source = write_ordinary(tmp_path / "m", config_of(**PADDED), MCG)
    sliced, whole = cut(source, tmp_path / "o", tp), open_checkpoint(source)
    check_experts(sliced, whole, 384)

    def mlp(checkpoint: Checkpoint, x: torch.Tensor, suffix: str, width: int) -> torch.Tensor:
        gate, up, down = (
            checkpoint.exl3(f"{EXPERT}.{proj}_proj{suffix}").dequantize(torch.float64)
            for proj in ("gate", "up", "down")
        )
        return (silu(x @ gate) * (x @ up))[:, :width] @ down[:width]

    x = torch.randn(3, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = sum(mlp(sliced, x, f".rank{rank}", 384) for rank in range(tp))
    torch.testing.assert_close(parts, mlp(whole, x, "", 320))  # the padding comes to nothing
    again = cut(tmp_path / "o", tmp_path / "again", 4 - tp)  # 1 to 3 and back
    check_experts(again, whole, 384)


def test_padded_width_that_is_no_multiple(tmp_path: Path) -> None:
    source = write_ordinary(tmp_path / "m", config_of(**PADDED), MCG)
    text = r"moe_intermediate_size 320, padded to 384 / tp 2 = 192 must be .* 128; .* work: 1, 3"
    with pytest.raises(SliceError, match=text):
        slice_checkpoint(source, tmp_path / "o", SliceOptions(2))


def test_padding_that_is_not_zero(tmp_path: Path) -> None:
    """One of gate and up is enough; with both, down would be given what does not exist."""
    source = write_ordinary(tmp_path / "m", config_of(**PADDED), MCG)
    names = [f"{EXPERT}.{proj}_proj.svh" for proj in ("gate", "up")]
    one = rewrite(source, tmp_path / "one", lambda t: t[names[0]].fill_(1))
    cut(one, tmp_path / "o1", 3)
    both = rewrite(one, tmp_path / "both", lambda t: t[names[1]][-1:].fill_(1))
    with pytest.raises(CheckpointError, match=rf"{names[0]}', '{names[1]}'.*last 64 channels"):
        slice_checkpoint(both, tmp_path / "o2", SliceOptions(3))
    (fault,) = verify_checkpoint(both, model_map).faults
    assert names[0] in fault and names[1] in fault and "padding" in fault
    last = [name.replace(".svh", ".rank2.svh") for name in names]
    sliced = rewrite(tmp_path / "o1", tmp_path / "bad", lambda t: t[last[1]].fill_(1))
    (fault,) = verify_checkpoint(sliced, model_map).faults
    assert last[0] in fault and last[1] in fault and "padding" in fault


@pytest.mark.parametrize("dialect", ["r7", "packed signs"])
def test_padding_of_whole_experts(tmp_path: Path, dialect: str) -> None:
    """Engines hand all stored channels of gate and up on to down; signs are never 0."""
    config, folder = config_of(**PADDED), tmp_path / "m"
    if dialect == "r7":
        whole = write_r7(folder, config, (4,))
        assert verify_checkpoint(whole, model_map).faults == ()
        ones = torch.ones(384).half()
        changes = {f"{EXPERT}.{proj}_proj.svh": ones for proj in ("gate", "up")}
        whole = rewrite(whole, tmp_path / "bad", lambda t: t.update(changes))
    else:
        whole = write_ordinary(folder, config, OrdinaryOptions(3, "mcg", has_packed_signs=True))
    faults = verify_checkpoint(whole, model_map).faults
    assert len(faults) == (1 if dialect == "r7" else 2)
    assert all("gate_proj.svh" in fault and "are padding" in fault for fault in faults)
    with pytest.raises(CheckpointError, match="which are padding"):
        slice_checkpoint(whole, tmp_path / "o", SliceOptions(3))


def test_padded_vector_of_another_shape_is_one_fault(tmp_path: Path) -> None:
    source = write_ordinary(tmp_path / "m", config_of(**PADDED), MCG)
    name = f"{EXPERT}.gate_proj.svh"
    slice_checkpoint(source, tmp_path / "o", SliceOptions(3))
    bad = rewrite(source, tmp_path / "bad", lambda t: t.update({name: torch.tensor(1).half()}))
    (fault,) = verify_checkpoint(bad, model_map).faults
    assert name in fault and "[384]" in fault
    (fault,) = source_faults(open_checkpoint(tmp_path / "o"), open_checkpoint(bad))
    assert fault == f"tensor {name!r}: expected a matrix or vector, got torch.float16 []"


def test_hidden_size_cannot_be_padded(tmp_path: Path) -> None:
    source = write_ordinary(tmp_path / "m", config_of(hidden_size=320), MCG)
    with pytest.raises(SliceError, match="hidden_size 320 / tp 1"):
        slice_checkpoint(source, tmp_path / "o", SliceOptions(1))


def test_packed_signs_become_vectors(tmp_path: Path) -> None:
    """The first versions' `su` and `sv`: exact as fp16; outside the experts they stay packed."""
    options = OrdinaryOptions(3, "mcg", has_packed_signs=True, version="0.0.1")
    source = write_ordinary(tmp_path / "m", config_of(), options)
    sliced = cut(source, tmp_path / "o", 2)
    check_experts(sliced, open_checkpoint(source), 256)
    assert sliced.has("model.layers.0.self_attn.q_proj.su")
    assert not any(name.endswith(".su") for name in sliced.names() if ".experts." in name)


def test_other_forms_are_copied(tmp_path: Path) -> None:
    options = OrdinaryOptions(3, "mcg", embedding_bits=4, slice_width=384)
    source = write_ordinary(tmp_path / "m", config_of(), options)
    sliced, whole = cut(source, tmp_path / "o", 2), open_checkpoint(source)
    for name in ("model.embed_tokens.trellis", "model.layers.0.mlp.up_proj.slice.1.trellis"):
        assert_bitwise_equal(sliced.tensor(name), whole.tensor(name))


def test_fp8_linears_are_copied_with_their_block_size(tmp_path: Path) -> None:
    """Of blocks of 64 x 128 there are twice as many scales as of 128 x 128."""
    fp8 = write_plain(tmp_path / "fp8", config_of("deepseek_v3"), fp8=True)
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"

    def halve(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.endswith("weight_scale_inv")]:
            rows = -(-tensors[key.replace("_scale_inv", "")].shape[0] // 64)
            tensors[key] = tensors[key].repeat_interleave(2, dim=0)[:rows]

    whole = make_ordinary(fp8, tmp_path / "whole", 3)
    assert verify_checkpoint(whole, model_map).faults == ()
    block = {"quant_method": "exl3", "weight_block_size": [64, 128]}
    source = rewrite(whole, tmp_path / "m", halve, {"quantization_config": block})
    sliced = cut(source, tmp_path / "o", 2)
    assert_bitwise_equal(sliced.tensor(name), open_checkpoint(source).tensor(name))
    slice_checkpoint(tmp_path / "o", tmp_path / "one", SliceOptions(1, shim="modelopt"))
    assert verify_checkpoint(tmp_path / "one", model_map).faults == ()


def test_model_without_experts(tmp_path: Path) -> None:
    source = write_ordinary(tmp_path / "m", tiny_config_of("llama"), MCG)
    with pytest.raises(SliceError, match="no routed experts, so there is nothing to cut; engines"):
        slice_checkpoint(source, tmp_path / "o", SliceOptions(2))


def test_expert_in_slices(tmp_path: Path) -> None:
    source = write_ordinary(tmp_path / "m", config_of(), MCG)
    up = f"{EXPERT}.up_proj"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for field in ("trellis", "suh", "svh", "mcg"):
            tensors[f"{up}.slice.0.{field}"] = tensors.pop(f"{up}.{field}")

    sliced = rewrite(source, tmp_path / "s", change)
    with pytest.raises(SliceError, match=rf"'{up}.slice.0.trellis': an expert in slices"):
        slice_checkpoint(sliced, tmp_path / "o", SliceOptions(2))


def test_layers_between_dense_ones(tmp_path: Path) -> None:
    """moe_layers is one range: a single layer of experts fits, two with a gap do not."""
    keys = {"num_hidden_layers": 4, "mlp_only_layers": [0, 2, 3]}
    source = write_ordinary(tmp_path / "m", config_of("qwen3_moe", **keys), MCG)
    check_experts(cut(source, tmp_path / "o", 2), open_checkpoint(source), 256)
    keys["mlp_only_layers"] = [0, 2]
    gap = write_ordinary(tmp_path / "gap", config_of("qwen3_moe", **keys), MCG)
    with pytest.raises(SliceError, match="got 1 to 3 without 2; serve the file as it is"):
        slice_checkpoint(gap, tmp_path / "o2", SliceOptions(2))
    assert json.loads((tmp_path / "o" / "config.json").read_text())["mlp_only_layers"] == [0, 2, 3]

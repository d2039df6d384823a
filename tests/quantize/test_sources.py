"""Sources in every dtype and of every architecture: quantise, verify, open, decode."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3kit.checkpoint.modules import dense_weight
from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.checkpoint.verify import verify_checkpoint
from exl3kit.errors import CheckpointError, UnsupportedError
from exl3kit.models.registry import model_map
from exl3kit.quantize.bit_plan import is_kept
from exl3kit.quantize.job import quantize_checkpoint
from exl3kit.quantize.preflight import QuantizeOptions
from exl3kit.testing.checkpoints import write_plain
from exl3kit.testing.tiny_configs import MODEL_TYPES, MOE_TYPES, MTP_TYPES, tiny_config_of
from exl3kit.testing.tiny_model import write_tokenizer
from tests.quantize import quick

DENSE = {"attention": 4, "mlp": 4, "shared_experts": 4, "head": 4}


pytestmark = pytest.mark.usefixtures("one_thread")


def plain(
    folder: Path, model_type: str, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Path:
    """A random checkpoint of a tiny model that can be calibrated."""
    mtp = 1 if model_type in MTP_TYPES else 0
    config = tiny_config_of(model_type, num_layers=2, num_experts=2, mtp_layers=mtp)
    write_plain(folder, config, dtype, **options)
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_linear_that_may_be_exl3_is(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick.install(monkeypatch)
    src = plain(tmp_path / "src", model_type)
    mtp = "trellis" if model_type in MTP_TYPES else "bf16"
    options = QuantizeOptions(4, rows=2, cols=64, dense=DENSE, mtp=mtp, jobs=2)
    report = quantize_checkpoint(src, tmp_path / "out", options)
    assert not verify_checkpoint(tmp_path / "out", model_map).faults
    source, checkpoint = open_checkpoint(src), open_checkpoint(tmp_path / "out")
    expected = {name for name in linears(source) if not is_kept(name)} | {"lm_head"}
    assert set(checkpoint.exl3_prefixes()) == expected
    assert {result.name for result in report.results} == expected
    assert all(result.coverage != "none" for result in report.results)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_architecture_by_the_real_encoder(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts and next-token experts, or a dense model's attention: within the rate's error."""
    monkeypatch.setattr("exl3kit.quantize.experts.search_scale", lambda *_: 0.9)  # 2/3 of the time
    src = plain(tmp_path / "src", model_type)
    mtp = "trellis" if model_type in MTP_TYPES else "bf16"
    dense = {} if model_type in MOE_TYPES else {"attention": 4}
    options = QuantizeOptions(4, rows=2, cols=64, dense=dense, mtp=mtp, jobs=2)
    quantize_checkpoint(src, tmp_path / "out", options)
    assert not verify_checkpoint(tmp_path / "out", model_map).faults
    source, checkpoint = open_checkpoint(src), open_checkpoint(tmp_path / "out")
    assert checkpoint.exl3_prefixes()
    for name in checkpoint.exl3_prefixes():
        weight, decoded = dense_weight(source, name), dense_weight(checkpoint, name)
        error = (decoded - weight).square().mean() / weight.square().mean()
        assert error < 0.02, name  # 4 bits on Gaussian weights: 0.0045 and what feedback adds


def linears(source: Checkpoint) -> set[str]:
    """All linears of the model that the source has."""
    model = model_map(source.config)
    names = {spec.name for layer in model.layers for spec in model.linears(layer)}
    for layer in model.moe_layers:
        for expert in range(model.num_experts):
            names |= {spec.name for spec in model.expert_linears(layer, expert)}
    return {name for name in names if source.has(f"{name}.weight")}


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_dense_models_need_dense(model_type: str, tmp_path: Path) -> None:
    src = plain(tmp_path / "src", model_type)
    with pytest.raises(UnsupportedError, match=r"has routed experts to quantise; .* by --dense"):
        quantize_checkpoint(src, tmp_path / "out", QuantizeOptions(4))
    with pytest.raises(UnsupportedError, match="which a rank-sliced checkpoint needs"):
        quantize_checkpoint(src, tmp_path / "out", QuantizeOptions(4, tp=1, dense=DENSE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_float_sources_keep_their_dtype_where_they_are_copied(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick.install(monkeypatch)
    src = plain(tmp_path / "src", "glm4_moe", dtype)
    quantize_checkpoint(src, tmp_path / "out", QuantizeOptions(3, tp=2, rows=2, cols=64))
    out = open_checkpoint(tmp_path / "out")
    assert out.info("model.layers.0.self_attn.q_proj.weight").dtype == dtype
    expected = {torch.float16: "F16", torch.float32: "F32"}[dtype]
    assert out.config["hybrid_tr3_tail"]["source_format"] == expected


@pytest.mark.parametrize("tp", [None, 2])
@pytest.mark.parametrize("model_type", MOE_TYPES)
def test_fp8_sources_become_bf16_where_they_are_copied(
    model_type: str,
    tp: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick.install(monkeypatch)
    src = plain(tmp_path / "src", model_type, torch.bfloat16, fp8=True)
    quantize_checkpoint(src, tmp_path / "out", QuantizeOptions(3, tp=tp, rows=2, cols=64))
    assert not verify_checkpoint(tmp_path / "out", model_map).faults
    source, out = open_checkpoint(src), open_checkpoint(tmp_path / "out")
    name = "model.layers.0.self_attn.o_proj"
    assert source.info(f"{name}.weight").dtype == torch.float8_e4m3fn
    assert torch.equal(out.tensor(f"{name}.weight"), dense_weight(source, name).bfloat16())
    assert not any(name.endswith("weight_scale_inv") for name in out.names())
    quantization, original = out.config["quantization_config"], source.config["quantization_config"]
    assert quantization["quant_method"] == "exl3"
    if tp is None:
        assert quantization["original_quantization_config"] == original
    else:
        assert out.config["source_quantization_config"] == original
        assert out.config["hybrid_tr3_tail"]["source_format"] == "FP8"


def test_an_fp8_matrix_without_its_scales_is_named(tmp_path: Path) -> None:
    src = plain(tmp_path / "src", MOE_TYPES[0], torch.bfloat16, fp8=True)
    scale = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    shard = open_checkpoint(src).info(scale).file
    tensors = load_file(shard)
    del tensors[scale]
    save_file(tensors, shard)
    index = src / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    del table["weight_map"][scale]
    index.write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=re.escape(scale)):
        quantize_checkpoint(src, tmp_path / "out", QuantizeOptions(3, rows=2, cols=64))
    assert not (tmp_path / "out").exists()


def test_layers_with_a_gap_make_no_rank_sliced_file(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    config = tiny_config_of("qwen3_moe", num_layers=4, num_experts=2, mtp_layers=0)
    config["mlp_only_layers"] = [0, 2]
    write_plain(folder, config, torch.bfloat16)
    write_tokenizer(folder)
    options = QuantizeOptions(3, tp=2, rows=2, cols=64)
    with pytest.raises(CheckpointError, match=r"got \[1, 3\]; .* leave out --tp"):
        quantize_checkpoint(folder, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()

"""FP8 sources: weights with a scale for each 128 x 128 block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from exl3kit.checkpoint.fp8 import block_size, dequantize_blocks
from exl3kit.checkpoint.modules import dense_weight
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.errors import CheckpointError
from exl3kit.testing.checkpoints import to_fp8, write_plain
from exl3kit.testing.tiny_configs import tiny_config_of


@pytest.mark.parametrize("shape", [(128, 256), (200, 130), (1, 1), (128, 384)])
def test_blocks_by_the_definition(shape: tuple[int, int]) -> None:
    weight, scale = to_fp8(torch.randn(shape))
    found = dequantize_blocks(weight, scale, (128, 128), "s")
    for i in range(0, shape[0], 37):
        for j in range(0, shape[1], 41):
            assert found[i, j] == weight[i, j].float() * scale[i // 128, j // 128]


def test_checkpoint_reads_close_to_its_source(tmp_path: Path) -> None:
    config = tiny_config_of("deepseek_v3", num_experts=2)
    source = open_checkpoint(write_plain(tmp_path / "bf16", config))
    fp8 = open_checkpoint(write_plain(tmp_path / "fp8", config, fp8=True))
    assert fp8.dialect == source.dialect == "plain"
    for module in ("model.layers.1.self_attn.kv_a_proj_with_mqa", "model.layers.1.mlp.gate"):
        expected = dense_weight(source, module)
        found = dense_weight(fp8, module)
        assert found.dtype == torch.float32
        assert (found - expected).norm() / expected.norm() < 0.04  # e4m3 has 3 bits of fraction
    assert fp8.has("model.layers.1.self_attn.o_proj.weight_scale_inv")
    assert not fp8.has("lm_head.weight_scale_inv")


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (1,), (0, 1)])
def test_wrong_scale_is_named(shape: tuple[int, ...]) -> None:
    weight = torch.zeros(128, 128).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"m.weight_scale_inv.*\[1, 1\], got"):
        dequantize_blocks(weight, torch.ones(shape), (128, 128), "m.weight_scale_inv")


@pytest.mark.parametrize("value", [128, [128], [128, 0], [True, 128], ["a", 1]])
def test_wrong_block_size_is_named(value: Any) -> None:
    with pytest.raises(CheckpointError, match="weight_block_size"):
        block_size({"quantization_config": {"weight_block_size": value}})


def test_missing_scale_is_named(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "m", tiny_config_of("llama"), fp8=True)
    checkpoint = open_checkpoint(path)
    name = "model.layers.0.mlp.up_proj"
    infos = {n: i for n, i in checkpoint.infos.items() if n != f"{name}.weight_scale_inv"}
    object.__setattr__(checkpoint, "infos", infos)
    with pytest.raises(CheckpointError, match=f"{name}.weight_scale_inv"):
        dense_weight(checkpoint, name)

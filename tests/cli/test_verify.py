"""`verify` on every dialect: exit codes 0, 1 and 2, and all faults of a damaged file at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from exl3kit.checkpoint.manifest import SHARED_H
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.cli.app import app
from exl3kit.slicing.job import slice_checkpoint
from exl3kit.slicing.plan import SliceOptions
from exl3kit.testing.checkpoints import (
    OrdinaryOptions,
    write_ordinary,
    write_plain,
    write_r7,
    write_unaligned,
)
from exl3kit.testing.generate import make_rank_sliced
from exl3kit.testing.tiny_configs import tiny_config_of

MOE = tiny_config_of("glm4_moe", num_experts=2, mtp_layers=1)
LEGACY = OrdinaryOptions(codebook="3inst", has_packed_signs=True, version="0.0.1")
OTHERS = OrdinaryOptions(bits=2.5, embedding_bits=4, slice_width=384)


def sliced(out: Path, bits: int | tuple[int, int], layout: str = "per_expert_v1") -> Path:
    plain = write_plain(out.parent / "plain", MOE)
    return make_rank_sliced(plain, out, bits, 2, (1, 2), rotation_layout=layout)


def cut(out: Path) -> Path:
    source = write_ordinary(out.parent / "whole", MOE, OrdinaryOptions(codebook="mcg"))
    return slice_checkpoint(source, out, SliceOptions(2, shim="modelopt")).path


DIALECTS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "bf16": ("plain", lambda out: write_plain(out, MOE)),
    "fp16": ("plain", lambda out: write_plain(out, MOE, torch.float16)),
    "fp8": ("plain", lambda out: write_plain(out, tiny_config_of("deepseek_v3"), fp8=True)),
    "ordinary": ("ordinary", lambda out: write_ordinary(out, MOE)),
    "legacy": ("ordinary", lambda out: write_ordinary(out, tiny_config_of("llama"), LEGACY)),
    "other forms": ("ordinary", lambda out: write_ordinary(out, tiny_config_of("qwen3"), OTHERS)),
    "r7": ("r7", lambda out: write_r7(out, MOE)),
    "uniform": ("rank-sliced", lambda out: sliced(out, 3)),
    "mixed": ("rank-sliced", lambda out: sliced(out, (3, 4))),
    "shared_h": ("rank-sliced", lambda out: sliced(out, 2, SHARED_H)),
    "cut": ("rank-sliced", cut),
}


@pytest.mark.parametrize("dialect, write", DIALECTS.values(), ids=DIALECTS)
def test_exit_codes(
    runner: CliRunner, tmp_path: Path, dialect: str, write: Callable[[Path], Path]
) -> None:
    path = write(tmp_path / "m")
    command = ["verify", "--json", "--jobs", "2", str(path)]
    result = runner.invoke(app, command)
    report = json.loads(result.stdout)
    assert (result.exit_code, report["faults"], report["dialect"]) == (0, [], dialect)
    _damage(path)
    result = runner.invoke(app, command)
    faults = "\n".join(json.loads(result.stdout)["faults"])
    assert result.exit_code == 1
    for text in ("'model.norm.weight': 1 of", "input_layernorm.weight", "not have: stray.weight"):
        assert text in faults, faults
    (path / "config.json").unlink()
    result = runner.invoke(app, command)
    assert result.exit_code == 2 and "config.json is missing" in result.stderr


def _damage(path: Path) -> None:
    """A value that is not finite, a tensor less and one more; no index or digests to notice."""
    checkpoint = open_checkpoint(path)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    tensors["model.norm.weight"][3] = torch.nan
    del tensors["model.layers.0.input_layernorm.weight"]
    tensors["stray.weight"] = torch.ones(2)
    for file in path.iterdir():
        if file.suffix != ".json" or "index" in file.name:
            file.unlink()
    write_unaligned(path / "model.safetensors", tensors)

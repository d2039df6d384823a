from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.checkpoint.writer import CheckpointWriter
from exl3kit.testing.generate import make_ordinary
from exl3kit.testing.tiny_model import TinyGlm4Moe, write_tiny_model

EXPERTS = 3
MIXED_BITS = (3, 4, 3)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One dense layer, one MoE layer, one MTP layer; experts 512 wide: tp 1, 2, 4."""
    spec = TinyGlm4Moe(moe_intermediate_size=512, num_experts=EXPERTS, num_layers=2, mtp_layers=1)
    return write_tiny_model(tmp_path_factory.mktemp("plain") / "model", spec)


@pytest.fixture(scope="session")
def ordinary(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary EXL3 checkpoint with experts of 3 and 4 bits and dense linears of 4."""
    return make_ordinary(plain, tmp_path_factory.mktemp("ordinary") / "m", MIXED_BITS, dense_bits=4)


def rewrite(
    source: Path,
    out: Path,
    change: Callable[[Tensors], object] = lambda tensors: None,
    config: dict[str, Any] | None = None,
) -> Path:
    """A copy of the checkpoint `source` with other tensors and config keys."""
    checkpoint = open_checkpoint(source)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    change(tensors)
    with CheckpointWriter(out) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.copy_side_files(source)
        if (table := source / "tier_bitmap.json").exists():
            writer.write_json(table.name, json.loads(table.read_text()))
        writer.finish(checkpoint.config | (config or {}))
    return out


def same_folders(one: Path, other: Path) -> bool:
    """True if both hold the same files with the same bytes."""
    files = [{f.name: f.read_bytes() for f in folder.iterdir()} for folder in (one, other)]
    return files[0] == files[1]

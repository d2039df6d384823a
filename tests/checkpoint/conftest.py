from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from exl3kit.testing.generate import make_rank_sliced
from exl3kit.testing.tiny_model import TinyGlm4Moe, write_tiny_model

EXPERTS = 4
MIXED_BITS = (3, 4, 3, 5)


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BF16 checkpoint: one dense layer, two MoE layers, one MTP layer; do not change it."""
    spec = TinyGlm4Moe(num_experts=EXPERTS, mtp_layers=1)
    return write_tiny_model(tmp_path_factory.mktemp("plain") / "model", spec)


@pytest.fixture(scope="session")
def _sliced_folder(plain_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sliced") / "model"
    return make_rank_sliced(plain_folder, out, MIXED_BITS, 2, (1, 3), shard_bytes=1_000_000)


@pytest.fixture
def sliced_folder(_sliced_folder: Path, tmp_path: Path) -> Path:
    """A mixed-bits checkpoint for two ranks in several shards; a copy for this test alone."""
    return Path(shutil.copytree(_sliced_folder, tmp_path / "sliced"))

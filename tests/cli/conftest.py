from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from exl3kit.testing.generate import make_rank_sliced
from exl3kit.testing.tiny_model import TinyGlm4Moe, write_tiny_model

_SMALLEST = TinyGlm4Moe(
    hidden_size=128,
    intermediate_size=128,
    moe_intermediate_size=128,
    num_experts=2,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model that quantises in seconds; not to be changed."""
    return write_tiny_model(tmp_path_factory.mktemp("source"), _SMALLEST)


@pytest.fixture(scope="session")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    plain = write_tiny_model(folder / "plain", TinyGlm4Moe(num_experts=2))
    return make_rank_sliced(plain, folder / "sliced", 3, 2, (1, 2))


@pytest.fixture
def checkpoint(_made: Path, tmp_path: Path) -> Path:
    """A good rank-sliced checkpoint; a copy for this test alone."""
    return Path(shutil.copytree(_made, tmp_path / "checkpoint"))


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()

"""`quantize --recipe`: the file is followed, options win over it, and coverage is printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.cli.app import app
from exl3kit.testing.tiny_model import TinyGlm4Moe, write_tiny_model
from tests.quantize import quick

SPEC = TinyGlm4Moe(
    hidden_size=128,
    intermediate_size=128,
    moe_intermediate_size=128,
    num_experts=4,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
)
RECIPE = """
experts = 2.5

[dense]
head = 5

[calibration]
files = ["text.txt"]
rows = 4
cols = 64

[[rules]]
modules = "*.experts.3"
bits = 6
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    quick.install(monkeypatch)
    (tmp_path / "text.txt").write_text(" ".join(f"{i * i}" for i in range(300)))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    write_tiny_model(tmp_path / "source", SPEC)
    return tmp_path / "recipe.toml"


def quantized(runner: CliRunner, recipe: Path, *options: str) -> tuple[list[float], str]:
    """Bits of layer 1's experts, and what was printed."""
    source, out = recipe.parent / "source", recipe.parent / "out"
    asked = ["quantize", str(source), str(out), "--recipe", str(recipe), "--tp", "1", *options]
    result = runner.invoke(app, asked)
    assert result.exit_code == 0, result.stderr
    infos = open_checkpoint(out).infos
    names = [f"model.layers.1.mlp.experts.{e}.up_proj.rank0.trellis" for e in range(4)]
    assert infos["lm_head.trellis"].shape[2] == 5 * 16
    return [infos[name].shape[2] / 16 for name in names], result.stdout


def test_the_recipe_is_followed(runner: CliRunner, recipe: Path) -> None:
    bits, printed = quantized(runner, recipe)
    assert sorted(bits[:3]) == [2, 2, 3] and bits[3] == 6
    assert "Hessians mostly of the layer's tokens: 4 of 4, only: 0" in printed
    tokens = printed.partition("layer 1: ")[2].split()
    assert 0 < int(tokens[0]) < int(tokens[2]) < 256


def test_options_win(runner: CliRunner, recipe: Path) -> None:
    bits, printed = quantized(runner, recipe, "--bits", "4", "--route-all")
    assert bits == [4, 4, 4, 6]
    assert "Hessians mostly" not in printed


def test_bits_have_to_come_from_somewhere(runner: CliRunner, recipe: Path) -> None:
    source, out = recipe.parent / "source", recipe.parent / "out"
    result = runner.invoke(app, ["quantize", str(source), str(out)])
    assert result.exit_code == 2
    assert "expected --bits, or experts = ... in a --recipe" in result.stderr

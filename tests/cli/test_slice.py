from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from exl3kit.cli.app import app
from exl3kit.testing.generate import make_ordinary
from exl3kit.testing.tiny_model import TinyGlm4Moe, write_tiny_model


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ordinary")
    plain = write_tiny_model(folder / "plain", TinyGlm4Moe(num_experts=2, num_layers=2))
    return make_ordinary(plain, folder / "whole", 3)


def test_slice_verify_and_prove(runner: CliRunner, ordinary: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "two")
    result = runner.invoke(app, ["slice", str(ordinary), out, "--tp", "2", "--shim", "modelopt"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{out}: tp 2, per_expert_v1, layers 1 to 1: 12 slices" in result.stdout
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "modelopt"
    result = runner.invoke(app, ["verify", out, "--source", str(ordinary), "--jobs", "2"])
    assert result.exit_code == 0 and result.stdout.startswith("ok: rank-sliced")


def test_other_source_is_a_fault_in_json(runner: CliRunner, ordinary: Path, tmp_path: Path) -> None:
    plain = ordinary.parent / "plain"
    other = make_ordinary(plain, tmp_path / "other", 3, dense_bits=4)
    out = str(tmp_path / "two")
    assert runner.invoke(app, ["slice", str(other), out, "--tp", "2"]).exit_code == 0
    result = runner.invoke(app, ["verify", out, "--source", str(ordinary), "--json"])
    faults = json.loads(result.stdout)["faults"]
    assert result.exit_code == 1
    assert any("q_proj.trellis': the source has none of that name" in fault for fault in faults)
    assert any("q_proj.weight' of the source is missing" in fault for fault in faults)


def test_broken_slice_is_not_compared(runner: CliRunner, ordinary: Path, tmp_path: Path) -> None:
    out = tmp_path / "two"
    runner.invoke(app, ["slice", str(ordinary), str(out), "--tp", "2"])
    (shard,) = out.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    result = runner.invoke(app, ["verify", str(out), "--source", str(ordinary)])
    assert result.exit_code == 1
    assert "truncated" in result.stderr and "not compared with" in result.stderr


def test_faults_are_listed_where_nothing_can_be_compared(
    runner: CliRunner, ordinary: Path, tmp_path: Path
) -> None:
    """Experts that the model does not have: a fault of the slice, and no reason to exit with 2."""
    out = tmp_path / "two"
    runner.invoke(app, ["slice", str(ordinary), str(out), "--tp", "2"])
    config = json.loads((out / "config.json").read_text()) | {"n_routed_experts": 3}
    (out / "config.json").write_text(json.dumps(config))
    result = runner.invoke(app, ["verify", str(out), "--source", str(ordinary)])
    assert result.exit_code == 1
    assert "sha256" in result.stderr and "not compared with" in result.stderr
    result = runner.invoke(app, ["verify", str(out), "--source", str(tmp_path / "nowhere")])
    assert result.exit_code == 2  # before hours of reading, and not after them
    assert (
        "nowhere: expected a checkpoint folder" in result.stderr and "sha256" not in result.stderr
    )


def test_folder_whose_name_is_markup(runner: CliRunner, ordinary: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "x[red]y[")
    result = runner.invoke(app, ["slice", str(ordinary), out, "--tp", "2"])
    assert result.exit_code == 0 and result.stdout.startswith(f"{out}: tp 2")
    closing = f"{tmp_path / 'x'}[/y]"
    assert runner.invoke(app, ["slice", str(ordinary), closing, "--tp", "2"]).exit_code == 0


@pytest.mark.parametrize("command", ["verify", "inspect", "slice", "slice to", "report"])
def test_system_error_is_one_line_and_2(
    runner: CliRunner, ordinary: Path, tmp_path: Path, command: str
) -> None:
    """A name that is too long is an error of stat itself, which pathlib hands on."""
    bad = str(tmp_path / ("a" * 300))
    folders = {"slice": [bad, str(tmp_path / "o"), "--tp", "2"]}
    folders["slice to"] = [str(ordinary), bad, "--tp", "2"]
    result = runner.invoke(app, [command.split()[0], *folders.get(command, [bad])])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {bad}") and "File name too long" in result.stderr


def test_refusals_are_one_line_and_2(runner: CliRunner, ordinary: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "o")
    result = runner.invoke(app, ["slice", str(ordinary), out, "--tp", "3"])
    assert result.exit_code == 2 and not (tmp_path / "o").exists()
    assert result.stderr.startswith("error: moe_intermediate_size 256 / tp 3")
    result = runner.invoke(app, ["verify", str(ordinary), "--source", str(tmp_path / "x")])
    assert result.exit_code == 2 and "expected a checkpoint folder" in result.stderr

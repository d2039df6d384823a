from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from exl3kit import __version__
from exl3kit.cli.app import app
from exl3kit.cli.console import format_bytes
from exl3kit.cli.env import collect
from exl3kit.errors import CheckpointError

SHARD = "model-00001-of-00001.safetensors"


def test_verify_passes(runner: CliRunner, checkpoint: Path) -> None:
    result = runner.invoke(app, ["verify", str(checkpoint)])
    assert result.exit_code == 0
    assert result.stdout.startswith("ok: rank-sliced") and "24 EXL3 linears" in result.stdout


def test_verify_lists_faults_and_exits_1(runner: CliRunner, checkpoint: Path) -> None:
    shard = checkpoint / SHARD
    shard.write_bytes(shard.read_bytes()[:-3])
    result = runner.invoke(app, ["verify", str(checkpoint)])
    assert result.exit_code == 1
    assert f"{shard}: truncated" in result.stderr
    assert "faults: rank-sliced" in result.stdout


def test_verify_json(runner: CliRunner, checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    result = runner.invoke(app, ["verify", "--json", str(checkpoint)])
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and report["is_ok"] is False
    assert ["tokenizer.json" in fault for fault in report["faults"]] == [True]


def test_unreadable_checkpoint_is_one_red_line_and_2(runner: CliRunner, tmp_path: Path) -> None:
    for command in ("verify", "inspect"):
        result = runner.invoke(app, [command, str(tmp_path / "[x]")])
        assert result.exit_code == 2
        assert result.stderr == f"error: {tmp_path}/[x]: expected a checkpoint folder, found none\n"


def test_debug_keeps_the_exception(runner: CliRunner, tmp_path: Path) -> None:
    result = runner.invoke(app, ["--debug", "verify", str(tmp_path / "x")])
    assert isinstance(result.exception, CheckpointError)


def test_inspect_table_and_json(runner: CliRunner, checkpoint: Path) -> None:
    table = runner.invoke(app, ["inspect", str(checkpoint)])
    assert table.exit_code == 0
    assert "rank-sliced" in table.stdout and "routed experts" in table.stdout
    summary = json.loads(runner.invoke(app, ["inspect", "--json", str(checkpoint)]).stdout)
    assert (summary["tp"], summary["exl3_bits"], summary["exl3_moe_layers"]) == (2, 3.0, [1, 2])
    assert summary["bytes"] == sum(row["bytes"] for row in summary["kinds"])
    assert summary["tensors"] == sum(row["tensors"] for row in summary["kinds"])
    (experts,) = [row for row in summary["kinds"] if row["kind"] == "routed experts"]
    assert experts["weights"] == 2 * 2 * 3 * 256 * 256
    assert 3.0 < experts["bits_per_weight"] < 3.3  # 3 bits and the scale vectors


def test_env_survives_broken_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exl3kit.cli.env._kernel_tier", lambda: 1 / 0)
    monkeypatch.setenv("EXL3KIT_CXX", "/no/such/compiler")
    facts = collect()
    assert facts["cpu kernels"].startswith("ZeroDivisionError")
    assert "/no/such/compiler" in facts["compiler"]
    assert facts["EXL3KIT_CXX"] == "'/no/such/compiler'"
    assert facts["exl3kit"] == __version__


def test_version_and_help(runner: CliRunner) -> None:
    assert runner.invoke(app, ["--version"]).stdout == f"{__version__}\n"
    for arguments in (["--help"], ["verify", "--help"], ["inspect", "--help"], ["env", "--help"]):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 0 and "Usage" in result.stdout


def test_as_a_program(tmp_path: Path) -> None:
    code = "from exl3kit.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "config.json is missing" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "count, text", [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 * 2**40, "3.00 TiB")]
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text

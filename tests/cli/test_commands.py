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
from tests.runtime.glm52 import GLM_52

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


def test_inspect_layers_and_possible_tp(runner: CliRunner, checkpoint: Path) -> None:
    summary = json.loads(runner.invoke(app, ["inspect", "--json", str(checkpoint)]).stdout)
    rows = {(row["layer"], row["kind"]): row for row in summary["layers"]}
    assert sum(row["bytes"] for row in rows.values()) == summary["bytes"]
    experts = rows[1, "routed experts"]
    assert experts["matrices_by_bits"] == {"3": 2 * 3 * 2} and experts["trellis_bits"] == 3.0
    assert rows[0, "dense MLP"]["trellis_bits"] is None
    assert (rows[None, "embedding and head"]["tensors"], summary["possible_tp"]) == (2, [1, 2])
    assert "cut it finer" in summary["impossible_tp"]["4"][-1] and "plan" not in summary


def test_inspect_plan(runner: CliRunner, checkpoint: Path) -> None:
    arguments = ["inspect", str(checkpoint), "--tp", "2", "--vram", "1", "--max-model-len", "4096"]
    shown = runner.invoke(app, arguments)
    assert shown.exit_code == 0 and "each of 2 GPUs" in shown.stdout
    plan = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)["plan"]
    assert plan["kv_bytes_per_token"] == 3 * 2 * 64 * 2  # layers, key and value, head_dim, BF16
    used = plan["weights_bytes"] + plan["decode_scratch_bytes"] + plan["prefill_scratch_bytes"]
    assert plan["kv_bytes"] == 2**30 - used
    assert plan["sequences_that_fit"] == plan["kv_tokens"] // 4096 and plan["fits"]
    none_left = json.loads(runner.invoke(app, [*arguments, "--json", "--vram", "0"]).stdout)
    assert (none_left["plan"]["kv_tokens"], none_left["plan"]["fits"]) == (0, False)


def test_inspect_names_what_forbids_a_tp(runner: CliRunner, checkpoint: Path) -> None:
    result = runner.invoke(app, ["inspect", str(checkpoint), "--tp", "4"])
    assert result.exit_code == 2
    assert "key-value" not in result.stderr and "stored for 2 ranks" in result.stderr
    assert "tp values that work: 1, 2" in result.stderr


def test_inspect_from_a_config_alone(runner: CliRunner, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GLM_52))
    arguments = ["inspect", str(path), "--bits", "3", "--tp", "4", "--vram", "92"]
    summary = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    (experts,) = [row for row in summary["kinds"] if row["kind"] == "routed experts"]
    assert (experts["tensors"], experts["bytes"]) == (933_888, 278_523_691_008)
    assert summary["bytes"] == 316_304_795_648
    assert f"{summary['plan']['prefill_arena_bytes'] / 2**20:.2f}" == "1054.16"
    table = runner.invoke(app, arguments).stdout
    assert "3-4, ..." in table and "933,888" in table and "33.51 MiB" in table


@pytest.mark.parametrize("bits", [[], ["--bits", "7"]])
def test_inspect_of_a_config_needs_bits(runner: CliRunner, tmp_path: Path, bits: list[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GLM_52))
    result = runner.invoke(app, ["inspect", str(path), *bits])
    assert result.exit_code == 2 and "--bits 2 to 6" in result.stderr


def test_inspect_takes_no_bits_for_a_folder(runner: CliRunner, checkpoint: Path) -> None:
    result = runner.invoke(app, ["inspect", str(checkpoint), "--bits", "3"])
    assert result.exit_code == 2 and "only with a config.json" in result.stderr


def test_inspect_lists_an_unknown_architecture(runner: CliRunner, checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["architectures"] = ["[bold]OddForCausalLM"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    result = runner.invoke(app, ["inspect", str(checkpoint), "--tp", "2"])
    assert result.exit_code == 0 and "routed experts" in result.stdout
    assert "[bold]OddForCausalLM" in result.stdout and "nothing can be planned" in result.stdout


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

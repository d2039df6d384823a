"""`inspect` of what most public EXL3 files are: ordinary ones of dense models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.cli.app import app
from exl3kit.testing.checkpoints import OrdinaryOptions, write_ordinary
from exl3kit.testing.tiny_configs import tiny_config_of


@pytest.mark.parametrize("name, norms", [("llama", 0), ("qwen3", 2)])
def test_dense_model(runner: CliRunner, tmp_path: Path, name: str, norms: int) -> None:
    """Two layers: four attention and three MLP linears of 3 bits each, and a head of 6."""
    path = write_ordinary(tmp_path / "m", tiny_config_of(name))
    arguments = ["inspect", str(path), "--tp", "1", "--vram", "1", "--max-model-len", "1024"]
    summary = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    kinds = {row["kind"]: row for row in summary["kinds"]}
    assert (summary["dialect"], summary["exl3_linears"]) == ("ordinary", 2 * 7 + 1)
    assert kinds["dense MLP"]["matrices_by_bits"] == {"3": 6}
    assert kinds["attention"]["tensors"] == 2 * (4 * 4 + norms)
    assert kinds["embedding and head"]["matrices_by_bits"] == {"6": 1}
    assert kinds["embedding and head"]["trellis_bits"] == 6
    weights, trellis = 2 * 3 * 256 * 512, 2 * 3 * 256 * 512 * 3 // 8
    vectors = 2 * 3 * (2 * (256 + 512) + 4)
    mlp = kinds["dense MLP"]
    assert (mlp["bytes"], mlp["trellis_bits"]) == (trellis + vectors, 3)
    assert mlp["bits_per_weight"] == round(8 * (trellis + vectors) / weights, 3)
    checkpoint = open_checkpoint(path)
    plan = summary["plan"]
    assert plan["weights_bytes"] == sum(checkpoint.info(n).nbytes for n in checkpoint.names())
    assert plan["decode_arena_bytes"] == plan["prefill_arena_bytes"] == 0
    assert plan["kv_bytes_per_token"] == 2 * 2 * 2 * 64 * 2  # layers, K and V, heads, BF16
    assert plan["kv_tokens"] == (2**30 - plan["weights_bytes"]) // plan["kv_bytes_per_token"]
    table = runner.invoke(app, arguments).stdout
    assert "8 x 3" in table and "MoE arena" not in table and "exl3_bits" in table
    assert f"{summary['exl3_bits']:.3f}" in table


def test_sizes_that_cannot_be_say_why(runner: CliRunner, tmp_path: Path) -> None:
    """Two heads of 64 are one block of 128; a padded width is cut by its padded size."""
    config = tiny_config_of("qwen3_moe") | {"num_key_value_heads": 4, "num_attention_heads": 12}
    sizes = {"moe_intermediate_size": 320, "head_dim": 128, "vocab_size": 384}
    path = write_ordinary(tmp_path / "m", config | sizes, OrdinaryOptions(3, "mcg"))
    summary = json.loads(runner.invoke(app, ["inspect", str(path), "--json"]).stdout)
    assert summary["possible_tp"] == [1]
    reasons = summary["impossible_tp"]
    assert reasons["2"] == [
        "mlp.experts.*.gate_proj: 320, stored as 384, / 2 = 192 is not a multiple of 128"
    ]
    assert reasons["3"] == ["4 key-value heads can be neither divided by 3 nor repeated"]
    assert "12 attention heads cannot be divided by 5" in reasons["5"]
    shown = runner.invoke(app, ["inspect", str(path)]).stdout
    assert "tensor-parallel sizes that work: 1\n" in shown
    assert "not 2: mlp.experts.*.gate_proj: 320, stored as 384, / 2 = 192" in shown


def test_text_of_a_config_cannot_steer_the_terminal(runner: CliRunner, tmp_path: Path) -> None:
    """An escape sequence, and a lone surrogate, which no encoder takes."""
    path = write_ordinary(tmp_path / "m", tiny_config_of("llama"))
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["Mine\x1b[2J\ud800"]
    (path / "config.json").write_text(json.dumps(config))
    result = runner.invoke(app, ["inspect", str(path)])
    assert result.exit_code == 0
    assert "Mine\\x1b[2J\\ud800" in result.stdout and "\x1b" not in result.stdout


@pytest.mark.parametrize(
    "options, option, needed",
    [
        (["--vram", "1"], "--vram", "--tp"),
        (["--num-sms", "132"], "--num-sms", "--tp"),
        (["--max-num-batched-tokens", "8"], "--max-num-batched-tokens", "--tp"),
        (["--fp8-kv-cache"], "--fp8-kv-cache", "--tp"),
        (["--tp", "1", "--max-model-len", "64"], "--max-model-len", "--vram"),
        (["--tp", "1", "--vram", "1", "--max-num-seqs", "2"], "--max-num-seqs", "--max-model-len"),
    ],
)
def test_option_without_effect(
    runner: CliRunner, tmp_path: Path, options: list[str], option: str, needed: str
) -> None:
    result = runner.invoke(app, ["inspect", str(tmp_path), *options])
    shown = " ".join(result.stderr.split())
    assert result.exit_code == 2
    assert f"{option}: has no effect without {needed}" in shown, shown


def test_file_that_is_no_config(runner: CliRunner, tmp_path: Path) -> None:
    path = write_ordinary(tmp_path / "m", tiny_config_of("llama")) / "model.safetensors"
    result = runner.invoke(app, ["inspect", str(path), "--bits", "3"])
    assert result.exit_code == 2
    assert f"{path}: expected a checkpoint folder or a config.json" in result.stderr


def test_memory_without_end_is_a_usage_error(runner: CliRunner, tmp_path: Path) -> None:
    result = runner.invoke(app, ["inspect", str(tmp_path), "--tp", "1", "--vram", "inf"])
    assert result.exit_code == 2 and "--vram" in result.stderr

"""`quantize` and `eval` from the command line: one real run, and a refusal in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from exl3kit.cli.app import app


def test_quantize_then_verify_then_eval(runner: CliRunner, source: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("Call me Ishmael. Some years ago, never mind how long precisely. " * 20)
    arguments = ["--bits", "4", "--tp", "1", "--calibration", str(text), "--cols", "64"]
    result = runner.invoke(app, ["quantize", str(source), str(out), *arguments])
    assert result.exit_code == 0, result.stderr
    assert "gate_proj" in result.stdout and "mean proxy error" in result.stdout
    assert runner.invoke(app, ["verify", str(out)]).exit_code == 0
    table = runner.invoke(app, ["report", str(out)]).stdout
    assert table and table in result.stdout
    lines = json.loads(runner.invoke(app, ["report", str(out), "--json"]).stdout)
    assert [line["module"] for line in lines] == ["gate_proj", "up_proj", "down_proj"]

    reached = {}
    for folder in (source, out):
        asked = ["eval", str(folder), "--text", str(text), "--window", "64", "--json"]
        reached[folder] = json.loads(runner.invoke(app, asked).stdout)["perplexity"]
    assert reached[out] == pytest.approx(reached[source], rel=0.05)
    assert reached[out] != reached[source]


def test_refusal_is_one_line_and_exit_code_2(
    runner: CliRunner, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = runner.invoke(app, ["quantize", str(source), str(out), "--bits", "3", "--tp", "2"])
    assert result.exit_code == 2
    assert "tp values that work: 1" in result.stderr
    assert "Traceback" not in result.stderr
    assert not out.exists()


def test_report_needs_a_log(runner: CliRunner, source: Path) -> None:
    result = runner.invoke(app, ["report", str(source)])
    assert result.exit_code == 2
    assert "quantization_log.jsonl: expected the log" in " ".join(result.stderr.split())

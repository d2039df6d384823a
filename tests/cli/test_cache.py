"""`exl3kit cache`: compiles without a GPU, says what it made, lists what there is."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from exl3kit.cli.app import app


def test_build_and_show(runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL3KIT_CACHE_DIR", str(tmp_path))
    build = ["cache", "build", "--arch", "sm_90a", "--match", "rows_to_tiles"]
    result = runner.invoke(app, build)
    assert result.exit_code == 0
    head, line = result.stdout.splitlines()
    assert head.split() == ["arch", "kernel", "registers", "shared", "stack", "spilled", "seconds"]
    arch, kernel, registers, *_ = line.split()
    assert (arch, kernel) == ("sm_90a", "exl3::rows_to_tiles") and int(registers) > 0
    (cubin,) = (tmp_path / "cuda" / "sm_90a").glob("rows_to_tiles-*.cubin")
    made = cubin.stat().st_mtime_ns
    assert runner.invoke(app, build).exit_code == 0
    assert cubin.stat().st_mtime_ns == made
    shown = runner.invoke(app, ["cache", "show"]).stdout
    assert str(tmp_path) in shown.replace("\n", "") and "cuda/sm_90a: 3 files" in shown


def test_unknown_architecture_is_refused(runner: CliRunner) -> None:
    result = runner.invoke(app, ["cache", "build", "--arch", "sm_9x", "--match", "rows_to_tiles"])
    assert result.exit_code == 2
    assert "expected a target such as sm_80" in result.stderr and "'sm_9x'" in result.stderr


def test_a_name_that_no_kernel_has_is_refused(runner: CliRunner) -> None:
    result = runner.invoke(app, ["cache", "build", "--arch", "sm_90a", "--match", "liner"])
    assert result.exit_code == 2
    assert (
        "--match: expected part of a kernel's name" in result.stderr and "'liner'" in result.stderr
    )

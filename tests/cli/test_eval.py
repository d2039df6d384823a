"""`eval` from the command line: one checkpoint alone, and against the model it was made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from exl3kit.cli.app import app
from exl3kit.testing.generate import make_rank_sliced


def test_alone_and_against_a_reference(runner: CliRunner, source: Path, tmp_path: Path) -> None:
    text, plot = tmp_path / "text.txt", tmp_path / "kld.png"
    text.write_text(" ".join(f"{i * i}" for i in range(120))[:513])
    sliced = str(make_rank_sliced(source, tmp_path / "sliced", (3, 4), 1, (1, 1)))
    asked = ["eval", sliced, "--text", str(text), "--window", "64"]
    alone = json.loads(runner.invoke(app, [*asked, "--json"]).stdout)
    assert alone["checkpoint"] == sliced and alone["text"] == str(text)
    assert (alone["windows"], alone["predicted_tokens"]) == (8, 8 * 63)
    assert alone["interval"][0] < alone["perplexity"] < alone["interval"][1]
    words = runner.invoke(app, asked).stdout
    assert words.startswith(f"perplexity {alone['perplexity']:.4f} (95 % interval ")

    pytest.importorskip("matplotlib")
    asked += ["--reference", str(source)]
    found = json.loads(runner.invoke(app, [*asked, "--json", "--plot", str(plot)]).stdout)
    assert found["perplexity"] == alone["perplexity"]
    assert found["perplexity_ratio"] == pytest.approx(
        found["perplexity"] / found["reference_perplexity"]
    )
    assert 0 < found["kld_median"] < found["kld_p99"] < found["kld_max"]
    assert found["intervals"]["kld_mean"][0] < found["kld_mean"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    words = runner.invoke(app, asked).stdout
    assert f"| {sliced} | {found['perplexity']:.4f} |" in words
    assert f"against {source} on 504 tokens (8 windows of 64) of {text}" in words


def test_an_infinite_perplexity_is_null_in_json(
    runner: CliRunner, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hopeless(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.full((len(targets),), 1000.0, dtype=torch.float64)

    monkeypatch.setattr("exl3kit.evaluate.perplexity.token_nll", hopeless)
    asked = ["eval", str(source), "--window", "64"]
    found = json.loads(runner.invoke(app, [*asked, "--json"]).stdout)
    assert (found["nll"], found["perplexity"], found["interval"]) == (1000, None, [None, None])
    words = runner.invoke(app, asked).stdout
    assert words.startswith("perplexity inf (95 % interval inf to inf) ")


def test_a_device_that_is_not_there(runner: CliRunner, source: Path) -> None:
    result = runner.invoke(app, ["eval", str(source), "--device", "cuda:99"])
    assert result.exit_code == 2
    assert "device: expected one of" in result.stderr


def test_a_plot_needs_a_reference(runner: CliRunner, source: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["eval", str(source), "--plot", str(tmp_path / "a.png")])
    assert result.exit_code == 2
    assert "--plot: expected a --reference" in result.stderr


def test_a_plot_without_a_folder_is_refused_before_the_work(
    runner: CliRunner, source: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "absent" / "a.png"
    asked = ["eval", str(source), "--reference", "nowhere", "--plot", str(plot)]
    result = runner.invoke(app, asked)
    assert result.exit_code == 2
    assert f"{plot}: expected a folder" in result.stderr


def test_a_seed_below_zero(runner: CliRunner, source: Path) -> None:
    result = runner.invoke(app, ["eval", str(source), "--seed", "-1"])
    assert result.exit_code == 2
    assert "--seed" in result.stderr and "Traceback" not in result.stderr


def test_a_text_that_cannot_be_read_is_named(runner: CliRunner, source: Path) -> None:
    result = runner.invoke(app, ["eval", str(source), "--text", "absent.txt"])
    assert result.exit_code == 2
    assert "absent.txt: cannot be read" in result.stderr

"""Tables and plots of quality figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from exl3kit.errors import UnsupportedError
from exl3kit.evaluate.metrics import Quality, TokenMetrics, summarize
from exl3kit.evaluate.plot import plot_divergence, plot_rates
from exl3kit.evaluate.report import quality_table

PNG = b"\x89PNG\r\n"


def make_quality(scale: float, windows: int = 4) -> Quality:
    kld = torch.rand(windows, 50, generator=torch.Generator().manual_seed(0)).double() * scale
    nll = torch.full_like(kld, 2.0)
    return summarize(TokenMetrics(nll + scale / 10, nll, kld, (kld < 0.1).double()))


def test_table_has_a_line_a_checkpoint_with_intervals() -> None:
    quality = make_quality(0.2)
    table = quality_table({"a": quality, "b": make_quality(0.1, 1)})
    head, rule, first, second = table.splitlines()
    assert head.count("|") == rule.count("|") == first.count("|") == second.count("|") == 9
    low, high = quality.intervals["kld_mean"]
    assert f"| {quality.kld_mean:.5f} ({low:.5f} to {high:.5f}) |" in first
    assert f"{quality.top1_agreement:.2%}" in first
    assert " to " not in second


def test_plots_are_png_and_repeat(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = {2.0: make_quality(0.2), 2.5: make_quality(0.1), 3.0: make_quality(0.05, 1)}
    contents = []
    for name in ("a", "b"):
        plot_rates(rows, "demo", tmp_path / name)
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1] and contents[0].startswith(PNG)
    kld = torch.tensor([[0.0, 1e-3], [2e-3, 0.5]], dtype=torch.float64)
    plot_divergence(kld, "demo", tmp_path / "c")
    assert (tmp_path / "c").read_bytes().startswith(PNG)


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'exl3kit\[report\]'"):
        plot_divergence(torch.ones(3), "demo", tmp_path / "a.png")

"""PNG of proxy errors by layer; matplotlib comes with the `report` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from exl3kit.checkpoint.atomic import disk_errors
from exl3kit.errors import UnsupportedError
from exl3kit.quantize.report import ModuleSummary

_SIZE, _DPI = (9, 5), 150


def plot_errors(lines: Sequence[ModuleSummary], title: str, path: Path) -> None:
    """One curve a linear: its mean proxy error over the layers, and a mark at the worst matrix.

    The head is a level line. UnsupportedError without matplotlib, CheckpointError where the file
    cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError(
            "plot: matplotlib is not installed; pip install 'exl3kit[report]'"
        ) from None
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    for number, module in enumerate(dict.fromkeys(line.module for line in lines)):
        own = [line for line in lines if line.module == module]
        colour = f"C{number % 10}"
        means = [line.mean_proxy_error for line in own]
        layers = [line.layer for line in own if line.layer is not None]
        if not layers:
            axes.axhline(means[0], color=colour, linestyle=":", label=module)
            continue
        axes.semilogy(layers, means, marker="o", color=colour, label=module)
        worst = [line.max_proxy_error for line in own]
        axes.semilogy(layers, worst, marker="_", linestyle="", color=colour)
    axes.set_xlabel("layer")
    axes.set_ylabel("proxy error")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    with disk_errors(path.parent):
        figure.savefig(path, dpi=_DPI, format="png", metadata={"Software": None})

"""PNG plots of quality; matplotlib comes with the `report` extra."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from exl3kit.checkpoint.atomic import disk_errors
from exl3kit.errors import CheckpointError, UnsupportedError
from exl3kit.evaluate.metrics import Quality

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 150


def check_plot(path: Path) -> None:
    """Refuse, before the work, a plot that could not be written to `path` after it.

    UnsupportedError without matplotlib, CheckpointError without the folder.
    """
    _figure(1, 1)
    if not path.parent.is_dir():
        raise CheckpointError(f"{path}: expected a folder to write to, found no {path.parent}")


def plot_divergence(kld: Tensor, title: str, path: Path) -> None:
    """How the KL divergence of a text's tokens (any shape) is spread, as a PNG at `path`.

    Each point: the share of tokens whose divergence is larger. UnsupportedError without matplotlib.
    """
    values = np.sort(kld.flatten().numpy())
    share = 1 - np.arange(len(values)) / len(values)
    figure = _figure(7, 4.5)
    axes = figure.subplots()
    axes.loglog(np.maximum(values, 1e-8), share, color="tab:blue")
    marks = {"median": np.median(values), "mean": values.mean(), "p99": np.quantile(values, 0.99)}
    for (name, value), style in zip(marks.items(), (":", "-", "--"), strict=True):
        axes.axvline(max(value, 1e-8), color="gray", linestyle=style, label=f"{name} {value:.3g}")
    _label(axes, "KL divergence of a token, nats", "share of tokens above", title)
    axes.legend()
    _save(figure, path)


def plot_rates(rows: Mapping[float, Quality], title: str, path: Path) -> None:
    """Divergence, agreement and perplexity over the mean bits (keys of `rows`), as a PNG."""
    bits, found = list(rows), list(rows.values())
    figure = _figure(14, 4.2)
    left, middle, right = figure.subplots(1, 3)
    for name in ("kld_max", "kld_p99", "kld_mean", "kld_median"):
        values = [getattr(q, name) for q in found]
        left.semilogy(bits, values, marker="o", label=name.removeprefix("kld_"))
    left.legend()
    _label(left, "bits", "KL divergence of a token, nats", title)
    _with_bars(middle, bits, found, "top1_agreement")
    _label(middle, "bits", "top-1 agreement", "likeliest next token unchanged")
    _with_bars(right, bits, found, "perplexity_ratio")
    _label(right, "bits", "perplexity / reference", "perplexity")
    _save(figure, path)


def _with_bars(axes: Any, bits: list[float], found: list[Quality], name: str) -> None:
    values = [getattr(q, name) for q in found]
    intervals = [q.intervals.get(name, (v, v)) for q, v in zip(found, values, strict=True)]
    # bootstrap intervals need not hold the value itself
    bars = [
        [max(0.0, v - low) for v, (low, _) in zip(values, intervals, strict=True)],
        [max(0.0, high - v) for v, (_, high) in zip(values, intervals, strict=True)],
    ]
    axes.errorbar(bits, values, yerr=bars, marker="o", capsize=3)


def _label(axes: Any, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)


def _figure(width: float, height: float) -> Figure:
    """An empty figure of that many inches, drawn without a display."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError(
            "plot: matplotlib is not installed; pip install 'exl3kit[report]'"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    with disk_errors(path.parent):
        figure.savefig(path, dpi=_DPI, format="png", metadata={"Software": None})

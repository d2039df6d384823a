"""Figures of checkpoints against a reference as a Markdown table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from exl3kit.evaluate.metrics import Quality

_HEADINGS: dict[str, Callable[[Quality], str]] = {
    "perplexity": lambda q: f"{q.perplexity:.4f}",
    "x reference": lambda q: _with_interval(q, "perplexity_ratio", ".4f"),
    "mean KLD": lambda q: _with_interval(q, "kld_mean", ".5f"),
    "median": lambda q: f"{q.kld_median:.5f}",
    "p99": lambda q: f"{q.kld_p99:.4f}",
    "max": lambda q: f"{q.kld_max:.3f}",
    "top-1 agreement": lambda q: _with_interval(q, "top1_agreement", ".2%"),
}


def quality_table(rows: Mapping[str, Quality], label: str = "checkpoint") -> str:
    """A Markdown table with one line a checkpoint, named by `rows`' keys; KLD in nats a token."""
    lines = [f"| {' | '.join([label, *_HEADINGS])} |", "| --- " * (len(_HEADINGS) + 1) + "|"]
    for name, quality in rows.items():
        cells = [name, *(cell(quality) for cell in _HEADINGS.values())]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _with_interval(quality: Quality, name: str, form: str) -> str:
    value = format(getattr(quality, name), form)
    if name not in quality.intervals:
        return value
    low, high = quality.intervals[name]
    return f"{value} ({low:{form}} to {high:{form}})"

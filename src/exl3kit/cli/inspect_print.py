"""The tables of `exl3kit inspect`."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.table import Table

from exl3kit.cli.console import format_bytes, out, plain

_HEADINGS = ("tensors", "size", "bits", "trellis", "matrices")
_TABLES = ("kinds", "layers", "bytes", "bytes_by_dtype", "possible_tp", "impossible_tp", "plan")


def print_summary(summary: dict[str, Any]) -> None:
    """Facts, the bytes by kind and by layer, the possible tp values and the plan."""
    facts = Table.grid(padding=(0, 2))
    for key, value in summary.items():
        if key not in _TABLES and value is not None:
            facts.add_row(key, plain(f"{value:.3f}" if isinstance(value, float) else str(value)))
    if "bytes_by_dtype" in summary:
        sizes = summary["bytes_by_dtype"].items()
        facts.add_row("bytes", ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes))
    out.print(facts)
    out.print()
    out.print(_kinds(summary))
    out.print()
    out.print(_layers(summary["layers"]))
    if "possible_tp" in summary:
        out.print()
        _print_tp(summary)
    if "plan" in summary:
        out.print()
        out.print(_plan(summary["plan"]))


def _table(names: tuple[str, ...], *headings: str) -> Table:
    """A table without lines: columns of names to the left, of numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in names:
        table.add_column(heading, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=heading != headings[-1])
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    trellis = row["trellis_bits"]
    rates = row["matrices_by_bits"].items()
    return [
        f"{row['tensors']:,}",
        format_bytes(row["bytes"]),
        f"{row['bits_per_weight']:.2f}",
        "" if trellis is None else f"{trellis:.2f}",
        ", ".join(f"{count:,} x {bits}" for bits, count in rates),
    ]


def _kinds(summary: dict[str, Any]) -> Table:
    table = _table(("kind",), *_HEADINGS)
    for row in summary["kinds"]:
        table.add_row(row["kind"], *_cells(row))
    table.add_row("all", f"{summary['tensors']:,}", format_bytes(summary["bytes"]))
    return table


def _layers(rows: list[dict[str, Any]]) -> Table:
    """One block of lines for all layers that look alike; matrices as `count x bits`."""
    table = _table(("layers", "kind"), *_HEADINGS)
    alike: dict[str, tuple[list[int | None], list[list[str]]]] = {}
    for layer, members in groupby(rows, key=itemgetter("layer")):
        lines = [[row["kind"], *_cells(row)] for row in members]
        alike.setdefault(repr(lines), ([], lines))[0].append(layer)
    for layers, lines in alike.values():
        for number, line in enumerate(lines):
            table.add_row("" if number else _layer_names(layers), *line)
    return table


def _layer_names(layers: list[int | None]) -> str:
    """`3-77`, `0, 4-6`, `3-5, ...` for more runs, or `rest` for what lies outside the layers."""
    runs: list[list[int]] = []
    for layer in layers:
        if layer is None:
            return "rest"
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    names = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(names if len(names) <= 2 else [names[0], "..."])


def _print_tp(summary: dict[str, Any]) -> None:
    works = ", ".join(map(str, summary["possible_tp"])) or "none"
    out.print(f"tensor-parallel sizes that work: {works}")
    for tp, faults in summary["impossible_tp"].items():
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        out.print(f"  not {tp}: {plain(faults[0])}{more}", style="dim", soft_wrap=True)


def _plan(plan: dict[str, Any]) -> Table:
    table = _table((f"each of {plan['tp']} GPUs",), "size")
    for kind, size in plan["weights"].items():
        table.add_row(kind, format_bytes(size))
    table.add_row("all weights", format_bytes(plan["weights_bytes"]))
    for name in ("decode", "prefill"):
        if size := plan[f"{name}_scratch_bytes"]:
            table.add_row(f"MoE scratch, {name}", format_bytes(size))
    times = f" x {plan['arenas']}" if plan["arenas"] > 1 else ""
    if plan["arenas"]:
        sizes = (format_bytes(plan[f"{name}_arena_bytes"]) for name in ("decode", "prefill"))
        table.add_row(f"(other engine's arenas{times})", f"({' + '.join(sizes)})")
    table.add_row("KV cache of a token", format_bytes(plan["kv_bytes_per_token"]))
    if plan["kv_bytes"] is None:
        return table
    table.add_row("left for the KV cache", format_bytes(max(plan["kv_bytes"], 0)))
    table.add_row("tokens of KV cache", f"{plan['kv_tokens']:,}")
    if plan["max_model_len"]:
        claim = f"sequences of {plan['max_model_len']:,} tokens that fit"
        table.add_row(claim, f"{plan['sequences_that_fit']:,}")
    table.add_row("fits", "yes" if plan["fits"] else "[red]no[/red]")
    return table

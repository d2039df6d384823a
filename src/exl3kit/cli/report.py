"""`exl3kit report`: what a quantisation has reached, from its log; while it runs, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli.console import out, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from exl3kit.quantize.report import ModuleSummary


def report(
    folder: Annotated[
        Path, typer.Argument(help="Output folder of a `quantize` run, finished or not.")
    ],
    plot: Annotated[Path | None, typer.Option(help="PNG of the errors by layer.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the lines as JSON.")] = False,
) -> None:
    """Proxy errors of a quantised checkpoint by layer and linear, as table, JSON and PNG."""
    from exl3kit.quantize.journal import read_log
    from exl3kit.quantize.plot import plot_errors
    from exl3kit.quantize.report import summarise

    lines = summarise(read_log(folder))
    if plot is not None:
        plot_errors(lines, folder.name, plot)
    if json:
        print_json([asdict(line) for line in lines])
    else:
        out.print(error_table(lines))


def error_table(lines: Sequence[ModuleSummary]) -> Table:
    """One row a layer and linear."""
    from rich.table import Table

    table = Table("layer", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(
        "linear", no_wrap=True, min_width=max((len(x.module) for x in lines), default=0)
    )
    for heading in ("bits", "scale g", "mean error", "max error"):
        table.add_column(heading, justify="right")
    for line in lines:
        layer = "" if line.layer is None else str(line.layer)
        errors = f"{line.mean_proxy_error:.5f}", f"{line.max_proxy_error:.5f}"
        table.add_row(layer, line.module, f"{line.bits:g}", f"{line.scale:.3f}", *errors)
    return table

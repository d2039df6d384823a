"""`exl3kit quantize`: a BF16 MoE checkpoint to a rank-sliced EXL3 one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from exl3kit.cli.console import err, out

if TYPE_CHECKING:
    from rich.progress import Progress

    from exl3kit.quantize.report import QuantizeReport


def quantize(
    source: Annotated[Path, typer.Argument(help="Folder of the BF16 checkpoint.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    bits: Annotated[int, typer.Option(help="Bits per weight of the routed experts, 2 to 6.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks to cut the experts for.")],
    calibration: Annotated[
        Path | None, typer.Option(help="UTF-8 text to calibrate on; a bundled text if not given.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Calibration rows.")] = 64,
    cols: Annotated[int, typer.Option(help="Tokens of a calibration row.")] = 512,
    seed: Annotated[int, typer.Option(help="Draws the rows and the sign vectors.")] = 0,
    mtp: Annotated[
        Literal["bf16", "trellis"],
        typer.Option(help="Experts of next-token layers: copy them, or quantise uncalibrated."),
    ] = "bf16",
    shim: Annotated[
        Literal["modelopt"] | None,
        typer.Option(help="Write this quant_method, for tools that do not know exl3."),
    ] = None,
) -> None:
    """Quantise the routed experts of a Glm4Moe checkpoint, cut for --tp ranks; copy the rest."""
    from exl3kit.quantize.job import quantize_checkpoint
    from exl3kit.quantize.preflight import QuantizeOptions

    options = QuantizeOptions(bits, tp, rows, cols, seed, mtp, shim)
    with _progress() as bar:
        task = bar.add_task("reading", total=None)

        def show(done: int, total: int, name: str) -> None:
            layer = name.removeprefix("model.").partition(".mlp")[0]
            bar.update(task, completed=done, total=total, description=layer)

        report = quantize_checkpoint(source, output, options, calibration, show)
    _print(report, output)


def _progress() -> Progress:
    """Layer, bar, slices done, time gone and time left, on stderr."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=err,
    )


def _print(report: QuantizeReport, output: Path) -> None:
    from rich.table import Table

    from exl3kit.quantize.report import REPORT_NAME

    table = Table("layer", "projection", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("scale g", "mean proxy error", "max proxy error"):
        table.add_column(heading, justify="right")
    for line in report.summaries():
        errors = f"{line.mean_proxy_error:.5f}", f"{line.max_proxy_error:.5f}"
        table.add_row(str(line.layer), line.projection, f"{line.scale:.3f}", *errors)
    out.print(table)
    out.print(f"{output}: mean proxy error {report.mean_proxy_error:.5f}; see {REPORT_NAME}")

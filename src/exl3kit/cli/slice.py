"""`exl3kit slice`: cut the experts of an EXL3 checkpoint for tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from exl3kit.cli.console import bytes_progress, format_bytes, out


def slice_(
    source: Annotated[Path, typer.Argument(help="Folder of the EXL3 checkpoint.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks to cut the experts for.")],
    layout: Annotated[
        Literal["per_expert", "shared_h"] | None,
        typer.Option(help="Store hidden-side vectors per expert or per layer; as the source does."),
    ] = None,
    shim: Annotated[
        Literal["modelopt"] | None,
        typer.Option(help="Write this quant_method, for tools that do not know exl3."),
    ] = None,
) -> None:
    """Cut, cut finer or merge the routed experts for --tp ranks; nothing is quantised again."""
    from exl3kit.slicing.job import slice_checkpoint
    from exl3kit.slicing.plan import SliceOptions

    with bytes_progress("slicing") as show:
        report = slice_checkpoint(source, output, SliceOptions(tp, layout, shim), show)
    first, last = report.moe_layers
    out.print(
        f"{report.path}: tp {report.tp}, {report.rotation_layout}, layers {first} to {last}: "
        f"{report.num_slices} slices, {report.num_copied} tensors copied, "
        f"{format_bytes(report.num_bytes)}",
        markup=False,
        soft_wrap=True,
    )

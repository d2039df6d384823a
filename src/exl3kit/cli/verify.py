"""`exl3kit verify`: prove a checkpoint's structure, markers, scales and digests; no GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli.console import bytes_progress, format_bytes, out, print_error, print_json

if TYPE_CHECKING:
    from exl3kit.checkpoint.open import Checkpoint
    from exl3kit.checkpoint.verify import VerifyReport


def verify(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    source: Annotated[
        Path | None,
        typer.Option(help="Prove that every byte is that of this checkpoint, which it was cut of."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Files to read at a time.")] = 4,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check every name, shape, dtype, marker, value and digest of a checkpoint, without a GPU.

    Exit code 0: no fault. 1: faults, all of them listed. 2: it cannot be read as a checkpoint.
    """
    from exl3kit.checkpoint.open import open_checkpoint
    from exl3kit.checkpoint.verify import verify_checkpoint
    from exl3kit.models.registry import model_map

    origin = None if source is None else open_checkpoint(source)  # a wrong path is told of at once
    with _one_torch_thread(), bytes_progress("verifying") as show:
        report = verify_checkpoint(checkpoint, model_map, jobs, show)
    if origin is not None:
        report = dataclasses.replace(report, faults=report.faults + _proof(report, origin, jobs))
    if json:
        print_json({**dataclasses.asdict(report), "path": str(report.path), "is_ok": report.is_ok})
    else:
        _print(report)
    if not report.is_ok:
        raise typer.Exit(1)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Jobs are threads; a pool of torch's own below each costs 3.3 in place of 1.4 processor
    seconds a GB.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _proof(report: VerifyReport, source: Checkpoint, jobs: int) -> tuple[str, ...]:
    """Faults of the comparison with `source`; those found already are shown where there is none."""
    from exl3kit.checkpoint.open import open_checkpoint
    from exl3kit.errors import Exl3Error
    from exl3kit.slicing.prove import source_faults

    try:
        checkpoint = open_checkpoint(report.path)
        with bytes_progress("comparing with the source") as show:
            return tuple(source_faults(checkpoint, source, jobs, show))
    except Exl3Error as err:
        if report.is_ok:
            raise
        return (f"{report.path}: not compared with {source.path}: {err}",)


def _print(report: VerifyReport) -> None:
    for fault in report.faults:
        print_error(fault)
    digests = f"{report.num_digests} digests" if report.num_digests else "no digests to compare"
    verdict = "[green]ok[/green]" if report.is_ok else f"[red]{len(report.faults)} faults[/red]"
    out.print(
        f"{verdict}: {report.dialect}, {report.num_tensors} tensors in {report.num_files} files, "
        f"{report.num_exl3_linears} EXL3 linears, {format_bytes(report.num_bytes)}, {digests}",
        soft_wrap=True,
    )

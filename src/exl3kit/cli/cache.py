"""`exl3kit cache`: compile the CUDA kernels ahead of time, without a GPU; show what there is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from exl3kit import env
from exl3kit.cli.console import err, format_bytes, out
from exl3kit.errors import UnsupportedError
from exl3kit.jit.spec import ARCHES, KernelSpec, check_arch

app = typer.Typer(no_args_is_help=True, help="Compiled kernels: build them ahead, list them.")

_COLUMNS = ("arch", "kernel", "registers", "shared", "stack", "spilled", "seconds")


@app.command()
def build(
    arch: Annotated[
        list[str] | None,
        typer.Option(help=f"Target, may be repeated; default: {' '.join(ARCHES)}."),
    ] = None,
    match: Annotated[str, typer.Option(help="Only kernels whose name contains this.")] = "",
) -> None:
    """Compile every CUDA kernel that the cache lacks; print registers, shared bytes and spills."""
    from exl3kit.kernels.catalogue import all_specs

    wanted = [
        (spec, target)
        for target in map(check_arch, arch or ARCHES)
        for spec in all_specs()
        if spec.is_for(target) and match in spec.expression
    ]
    if not wanted:
        raise UnsupportedError(
            f"--match: expected part of a kernel's name, such as linear_product, got {match!r}"
        )
    out.print("  ".join(_COLUMNS), markup=False)
    with err.status(f"compiling {len(wanted)} kernels"), ThreadPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(_build_one, wanted):
            out.print(line, markup=False, soft_wrap=True)


def _build_one(wanted: tuple[KernelSpec, str]) -> str:
    import time

    from exl3kit.jit.cache import load_or_compile

    spec, arch = wanted
    begin = time.monotonic()
    used = load_or_compile(spec, arch).resources
    numbers = used.registers, used.shared_bytes, used.stack_bytes, used.spill_bytes
    seconds = time.monotonic() - begin
    return "  ".join((arch, spec.expression, *map(str, numbers), f"{seconds:.1f}"))


@app.command()
def show() -> None:
    """List the folders of the cache with the number of files and bytes in each."""
    root = env.cache_dir()
    folders = sorted(path for path in root.glob("*/*") if path.is_dir())
    out.print(f"{root}", markup=False, soft_wrap=True)
    for folder in folders:
        files = [path for path in folder.rglob("*") if path.is_file()]
        out.print(f"  {_summary(folder.relative_to(root), files)}", markup=False, soft_wrap=True)


def _summary(name: Path, files: Sequence[Path]) -> str:
    return f"{name}: {len(files)} files, {format_bytes(sum(f.stat().st_size for f in files))}"

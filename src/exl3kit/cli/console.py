"""What the commands print with: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def plain(text: str) -> str:
    """Text of a file's for a terminal: no markup, and control characters and lone surrogates, which
    steer or break the output, as backslash escapes.
    """
    return escape("".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text))


def print_error(message: str) -> None:
    """One red line on stderr; text of the message is shown as it is."""
    err.print(f"[red]error:[/red] {plain(message)}", soft_wrap=True)


def print_json(value: Any) -> None:
    """A result for programs: indented JSON, never wrapped or coloured."""
    out.print(json.dumps(value, indent=2), markup=False, soft_wrap=True)


def format_bytes(count: int) -> str:
    """`count` in the largest binary unit that keeps it above 1."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.2f} {units[0]}"


@contextmanager
def bytes_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, if that is a terminal; call what this yields with bytes done and in all."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = "{task.description}", BarColumn(), DownloadColumn(True), TimeRemainingColumn()
    is_shown = err.is_terminal
    with Progress(*columns, console=err, transient=True, disable=not is_shown) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

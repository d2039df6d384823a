"""`exl3kit inspect`: what is in a checkpoint, from its metadata and headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl3kit.cli.console import format_bytes, out, print_json

if TYPE_CHECKING:
    from exl3kit.checkpoint.open import Checkpoint


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show dialect, architecture, ranks, bits, and where the bytes go."""
    from exl3kit.checkpoint.open import open_checkpoint

    summary = summarise(open_checkpoint(checkpoint))
    if json:
        print_json(summary)
    else:
        _print(summary)


def summarise(checkpoint: Checkpoint) -> dict[str, Any]:
    """The facts of a checkpoint as JSON values: one entry a fact, and a row a kind of tensor."""
    from exl3kit.checkpoint.inventory import inventory

    manifest = checkpoint.manifest
    layers = [manifest.first_layer, manifest.last_layer] if manifest else None
    rows = inventory(checkpoint)
    return {
        "path": str(checkpoint.path),
        "dialect": checkpoint.dialect,
        "architecture": checkpoint.architecture,
        "num_hidden_layers": checkpoint.config.get("num_hidden_layers"),
        "num_mtp_layers": checkpoint.config.get("num_nextn_predict_layers") or 0,
        "tp": checkpoint.tp,
        "exl3_moe_layers": layers,
        "experts_per_layer": manifest.experts_per_layer if manifest else None,
        "rotation_layout": manifest.rotation_layout if manifest else None,
        "exl3_linears": len(checkpoint.exl3_prefixes()),
        "exl3_bits": checkpoint.bits,
        "tensors": sum(row.num_tensors for row in rows),
        "bytes": sum(row.num_bytes for row in rows),
        "kinds": [
            {
                "kind": row.kind,
                "tensors": row.num_tensors,
                "bytes": row.num_bytes,
                "weights": row.num_weights,
                "bits_per_weight": round(row.bits_per_weight, 4),
            }
            for row in rows
        ],
    }


def _print(summary: dict[str, Any]) -> None:
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    for key, value in summary.items():
        if key not in ("kinds", "bytes") and value is not None:
            facts.add_row(key, str(value))
    out.print(facts)
    table = Table("kind", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("tensors", "size", "weights", "bits/weight"):
        table.add_column(heading, justify="right")
    for row in summary["kinds"]:
        table.add_row(
            row["kind"],
            f"{row['tensors']:,}",
            format_bytes(row["bytes"]),
            f"{row['weights']:,}",
            f"{row['bits_per_weight']:.2f}",
        )
    table.add_row("all", f"{summary['tensors']:,}", format_bytes(summary["bytes"]))
    out.print()
    out.print(table)

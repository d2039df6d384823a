"""The last step of a job: complete shards become a checkpoint.

Side files first, then the shards' final names, the index, SHA256SUMS and, last of all, config.json,
without which no loader takes the folder for a model. Every step may be repeated, so a run killed
in the middle is finished by the next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl3kit.checkpoint.atomic import disk_errors, sync_path, write_file
from exl3kit.checkpoint.index import INDEX_NAME
from exl3kit.checkpoint.jsonfile import json_bytes
from exl3kit.checkpoint.shard import Entry, final_name, part_name
from exl3kit.checkpoint.writer import CHECKSUMS_NAME


@dataclass(frozen=True)
class FinishedShard:
    """A shard that is complete on the disk: its tensors and its SHA-256."""

    entries: Sequence[Entry]
    digest: str


def publish(
    out: Path,
    shards: Sequence[FinishedShard],
    files: Mapping[str, bytes],
    config: Mapping[str, Any],
) -> None:
    """Make `out` a checkpoint of `shards`, in the order of their numbers, and side files."""
    with disk_errors(out):
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        for name, data in files.items():
            write_file(out / name, data)
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            name = final_name(number, len(shards))
            part = out / part_name(number)
            if part.exists():
                part.rename(out / name)
            digests[name] = shard.digest
            weight_map |= {entry.name: name for entry in shard.entries}
        sync_path(out)
        size = sum(entry.nbytes for shard in shards for entry in shard.entries)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        texts = {INDEX_NAME: json_bytes(index), "config.json": json_bytes(config)}
        digests |= {name: hashlib.sha256(data).hexdigest() for name, data in texts.items()}
        sums = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
        write_file(out / INDEX_NAME, texts[INDEX_NAME])
        write_file(out / CHECKSUMS_NAME, sums.encode())
        write_file(out / "config.json", texts["config.json"])

"""Did the shards of a folder change since it was opened? Size and time of change of each tell.

A job that reads for hours finds its source downloaded again, or still being downloaded, with a
header that no longer fits or, worse, with one that does.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from exl3kit.checkpoint.index import weight_files
from exl3kit.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Stamp:
    """A file's size in bytes and its time of last change in nanoseconds."""

    num_bytes: int
    changed_ns: int


def read_stamps(folder: Path) -> dict[str, Stamp]:
    """The stamp of every `*.safetensors` in `folder` that is there, by file name."""
    found = {}
    for file in weight_files(folder):
        with suppress(OSError):  # a link to nowhere, or a file gone since it was listed
            status = file.stat()
            found[file.name] = Stamp(status.st_size, status.st_mtime_ns)
    return found


def check_stamps(folder: Path, before: Mapping[str, Stamp]) -> None:
    """CheckpointError, with every file that changed, went or came, unless all is as `before`."""
    now = read_stamps(folder)
    faults = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old is None or new is None:
            faults.append(f"{name} {'is new' if old is None else 'is gone'}")
        elif old.num_bytes != new.num_bytes:
            faults.append(f"{name} had {old.num_bytes} bytes, now {new.num_bytes}")
        elif old != new:
            faults.append(f"{name} was written to")
    if faults:
        raise CheckpointError(
            f"{folder}: expected files that stay as they were when opened, got: "
            f"{'; '.join(faults[:8])}; start again when nothing writes to them"
        )

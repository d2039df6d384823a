"""Files that appear whole or not at all, and disk errors with words a user can act on."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from exl3kit.errors import CheckpointError


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to a temporary neighbour, sync it, rename it to `path`, sync the folder."""
    temporary = part_of(path)
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_path(path.parent)


def part_of(path: Path) -> Path:
    """Where `write_file` writes `path` until it is whole."""
    return path.with_name(f".{path.name}.part")


def sync_path(path: Path) -> None:
    """Make a file's writes, or the renames in a folder, survive a power cut.

    An error of a write before is reported here too.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def read_errors(what: object) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names `what`, a path or a tensor and its path."""
    try:
        yield
    except OSError as err:
        raise CheckpointError(f"{what}: cannot read: {err.strerror}") from None


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError naming `folder`; a full disk says how much is free."""
    try:
        yield
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(folder).free
            raise CheckpointError(
                f"{folder}: disk full ({err.strerror}), {free} bytes are free; free space or write "
                "to another disk"
            ) from err
        raise CheckpointError(f"{folder}: cannot write: {err.strerror or err}") from err


def check_no_contents(folder: Path, names: Iterable[str]) -> None:
    """CheckpointError if an output folder holds any files; `names` are those that it holds."""
    if found := sorted(names):
        raise CheckpointError(
            f"{folder}: expected an empty or new output folder, found {', '.join(found[:5])}"
            f"{', ...' if len(found) > 5 else ''}; name another folder or remove this one"
        )


def check_free_space(out: Path, needed: int) -> None:
    """CheckpointError unless the disk of the folder `out`, which may be new, has `needed` bytes."""
    with disk_errors(out):
        folder = next(path for path in (out, *out.absolute().parents) if path.exists())
        free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{out}: the output needs about {needed} bytes of disk, {free} are free"
        )

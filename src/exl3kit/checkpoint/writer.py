"""A checkpoint written shard by shard, so that a killed run never looks like a complete one.

Shards are `shard-0000i.part` until `finish` gives them their final names, then writes the index,
the checksums and, last of all, config.json: without config.json neither vLLM, transformers nor
exllamav3 takes a folder for a model. `.exl3kit-unfinished` marks a folder whose run did not end and
lists its side files: the next run removes those and its shards, and starts clean. It is locked
while a run is at work, so that a second one into the same folder is refused and does not clear it.

`add` takes tensors as they are made. They go to a spool file, which becomes a shard when it is
full: memory stays at one tensor, at the price of writing every byte twice and of one more shard of
disk. `copy` takes tensors made of stored bytes and streams them, each byte written once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from exl3kit.checkpoint.atomic import (
    check_no_contents,
    disk_errors,
    part_of,
    read_errors,
    sync_path,
    write_file,
)
from exl3kit.checkpoint.index import INDEX_NAME
from exl3kit.checkpoint.jsonfile import is_bare_name, json_bytes
from exl3kit.checkpoint.pieces import PlannedTensor
from exl3kit.checkpoint.shard import (
    AnyEntry,
    Entry,
    check_entry,
    final_name,
    header_bytes,
    in_file_order,
    part_name,
)
from exl3kit.checkpoint.side_files import side_files
from exl3kit.checkpoint.stream import Progress, ShardStream
from exl3kit.errors import CheckpointError

DEFAULT_SHARD_BYTES = 4 * 2**30
CHECKSUMS_NAME = "SHA256SUMS"
UNFINISHED_NAME = ".exl3kit-unfinished"
_OWN = (INDEX_NAME, CHECKSUMS_NAME, "config.json")
_SPOOL_NAME = "spool.part"
_COPY_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class _Spooled(Entry):
    offset: int


class CheckpointWriter:
    """Writes `model-0000i-of-0000n.safetensors`, index, SHA256SUMS and config.json into `path`.

    Use as a context manager: leaving it without `finish`, or through an exception, removes what was
    written. Shards hold at most `shard_bytes` of tensors, or one tensor that is larger by itself.
    """

    def __init__(self, path: Path, shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        """Make or clear `path`. CheckpointError if it holds anything this writer did not leave."""
        if shard_bytes < 1:
            raise CheckpointError(f"shard_bytes must be at least 1, got {shard_bytes}")
        self.path = Path(path)
        self._shard_bytes = shard_bytes
        self._names: set[str] = set()
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        self._pending: list[_Spooled] = []
        self._pending_bytes = 0
        self._digests: dict[str, str] = {}
        self._spool: BinaryIO | None = None
        self._is_open = True
        with disk_errors(self.path):
            self._lock = _claim(self.path)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write `tensor` (any dtype of safetensors, any device) under `name`; copies its bytes out.

        CheckpointError for a name given twice, an unknown dtype, or a full disk; the last removes
        what was written.
        """
        self._check_open()
        self._claim_name(name, tensor.dtype)
        nbytes = tensor.numel() * tensor.element_size()
        try:
            if self._pending and self._pending_bytes + nbytes > self._shard_bytes:
                self._close_shard()
            with disk_errors(self.path):
                self._write_spool(tensor)
        except BaseException:
            self.abort()
            raise
        entry = _Spooled(name, tensor.dtype, tuple(tensor.shape), self._pending_bytes)
        self._pending.append(entry)
        self._pending_bytes += nbytes

    def copy(self, tensors: Iterable[PlannedTensor], progress: Progress | None = None) -> None:
        """Write tensors made of stored bytes, in new shards; `progress` is told of bytes written.

        CheckpointError for a name given twice, a source that cannot be read, or a full disk; what
        was written is then removed.
        """
        self._check_open()
        try:
            self._close_shard()
            with disk_errors(self.path), ShardStream(progress) as stream:
                for shard in _shards(tensors, self._shard_bytes):
                    for entry in shard:
                        self._claim_name(entry.name, entry.dtype)
                    stream.write(self.path / part_name(len(self._shards) + 1), shard)
                    self._count_shard(shard)
                self._digests |= stream.finish()
        except BaseException:
            self.abort()
            raise

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file beside the weights, e.g. the bitrate map a config refers to."""
        self._check_open()
        self._check_side_name(name)
        self._write_digested(name, json_bytes(value))

    def copy_file(self, file: Path) -> None:
        """Copy a small file beside the weights, with its bytes and its name."""
        self._check_open()
        self._check_side_name(file.name)
        with read_errors(file):
            data = file.read_bytes()
        self._write_digested(file.name, data)

    def copy_side_files(self, source: Path) -> list[str]:
        """Copy tokenizer, chat template, generation config and licences; returns their names."""
        with read_errors(source):
            found = side_files(source)
        for file in found.values():
            self.copy_file(file)
        return list(found)

    def finish(self, config: dict[str, Any]) -> Path:
        """Name the shards, write index, checksums and then config.json; returns the folder."""
        self._check_open()
        if not self._names:
            raise CheckpointError(f"{self.path}: expected at least one tensor before finish()")
        try:
            self._close_shard()
            self._drop_spool()
            with disk_errors(self.path):
                weight_map = self._rename_shards()
                metadata = {"total_size": self._total_bytes}
                index = {"metadata": metadata, "weight_map": weight_map}
                self._write_digested(INDEX_NAME, json_bytes(index))
                config_bytes = json_bytes(config)
                self._digests["config.json"] = hashlib.sha256(config_bytes).hexdigest()
                sums = "".join(f"{self._digests[n]}  {n}\n" for n in sorted(self._digests))
                write_file(self.path / CHECKSUMS_NAME, sums.encode())
                write_file(self.path / "config.json", config_bytes)
        except BaseException:
            self.abort()
            raise
        self._is_open = False
        with disk_errors(self.path):
            (self.path / UNFINISHED_NAME).unlink(missing_ok=True)
        self._lock.close()
        return self.path

    def abort(self) -> None:
        """Remove everything written so far; the writer cannot be used afterwards."""
        if not self._is_open:
            return
        self._is_open = False
        if self._spool is not None:
            with suppress(OSError):  # closing flushes, which fails again on a full disk
                self._spool.close()
        with suppress(OSError):  # what stays is marked; the error that led here is the one to tell
            _clear(self.path)
        self._lock.close()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    def _check_open(self) -> None:
        if not self._is_open:
            raise CheckpointError(f"{self.path}: this writer has ended; make a new one")

    def _check_side_name(self, name: str) -> None:
        """CheckpointError for a name that is no name, or is one of those that `finish` writes."""
        if not is_bare_name(name) or name in _OWN or name.endswith((".part", ".safetensors")):
            raise CheckpointError(
                f"{name!r}: expected a bare file name that is not the writer's own"
            )

    def _claim_name(self, name: str, dtype: torch.dtype) -> None:
        if name in self._names:
            raise CheckpointError(f"tensor {name!r}: expected a new name, it was already added")
        check_entry(name, dtype)
        self._names.add(name)

    def _count_shard(self, entries: Iterable[Entry]) -> None:
        entries = list(entries)
        self._shards.append([entry.name for entry in entries])
        self._total_bytes += sum(entry.nbytes for entry in entries)

    def _write_spool(self, tensor: torch.Tensor) -> None:
        if self._spool is None:
            self._spool = (self.path / _SPOOL_NAME).open("w+b")
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            self._spool.write(flat.view(torch.uint8).numpy().data)

    def _drop_spool(self) -> None:
        if self._spool is not None:
            self._spool.close()
            self._spool = None
        (self.path / _SPOOL_NAME).unlink(missing_ok=True)

    def _close_shard(self) -> None:
        """Turn the spool into a shard."""
        if not self._pending:
            return
        assert self._spool is not None
        entries = in_file_order(self._pending)
        part = self.path / part_name(len(self._shards) + 1)
        digest = hashlib.sha256()
        with disk_errors(self.path):
            with part.open("wb") as file:
                for chunk in _spool_chunks(entries, self._spool):
                    file.write(chunk)
                    digest.update(chunk)
                file.flush()
                os.fsync(file.fileno())
            self._spool.seek(0)
            self._spool.truncate()
        self._digests[part.name] = digest.hexdigest()
        self._count_shard(entries)
        self._pending, self._pending_bytes = [], 0

    def _rename_shards(self) -> dict[str, str]:
        weight_map: dict[str, str] = {}
        count = len(self._shards)
        for number, names in enumerate(self._shards, start=1):
            name, part = final_name(number, count), part_name(number)
            (self.path / part).rename(self.path / name)
            self._digests[name] = self._digests.pop(part)
            weight_map |= dict.fromkeys(names, name)
        sync_path(self.path)
        return dict(sorted(weight_map.items()))

    def _write_digested(self, name: str, data: bytes) -> None:
        with disk_errors(self.path):
            with (self.path / UNFINISHED_NAME).open("a") as marker:
                marker.write(f"{name}\n")
            write_file(self.path / name, data)
        self._digests[name] = hashlib.sha256(data).hexdigest()


def _shards(tensors: Iterable[AnyEntry], most_bytes: int) -> Iterator[list[AnyEntry]]:
    """Consecutive tensors that fit a shard together, each group in file order."""
    group: list[AnyEntry] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.nbytes > most_bytes:
            yield in_file_order(group)
            group, size = [], 0
        group.append(tensor)
        size += tensor.nbytes
    if group:
        yield in_file_order(group)


def _spool_chunks(entries: list[_Spooled], spool: BinaryIO) -> Iterator[bytes]:
    """A safetensors file with `entries` in this order, their data read from `spool`."""
    yield header_bytes(entries)
    for entry in entries:
        spool.seek(entry.offset)
        left = entry.nbytes
        while left:
            chunk = spool.read(min(left, _COPY_BYTES))
            left -= len(chunk)
            yield chunk


def _claim(path: Path) -> BinaryIO:
    """Make `path` an empty folder marked unfinished, or refuse to touch it; the marker, locked."""
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path}: expected a folder to write to, found a file")
    path.mkdir(parents=True, exist_ok=True)
    if (path / UNFINISHED_NAME).exists() and not (path / "config.json").exists():
        with _locked_marker(path):
            _clear(path)
    check_no_contents(path, (item.name for item in path.iterdir()))
    marker = _locked_marker(path)
    sync_path(path)
    return marker


def _locked_marker(path: Path) -> BinaryIO:
    """The marker of an unfinished folder; CheckpointError while another run holds its lock."""
    marker = (path / UNFINISHED_NAME).open("ab")
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        marker.close()
        raise CheckpointError(
            f"{path}: another run is writing this folder; wait for it, or name another folder"
        ) from None
    return marker


def _clear(path: Path) -> None:
    """Remove what an unfinished run wrote and nothing else, so that two runs never mix."""
    listed = (path / UNFINISHED_NAME).read_text(errors="replace").splitlines()
    own = {*_OWN, _SPOOL_NAME, *filter(is_bare_name, listed)}
    own |= {part_of(path / name).name for name in own}
    for item in path.iterdir():
        is_shard = any(map(item.match, ("shard-?????.part", "model-?????-of-?????.safetensors")))
        if is_shard or item.name in own:
            item.unlink()
    (path / UNFINISHED_NAME).unlink()

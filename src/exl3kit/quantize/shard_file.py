"""A safetensors file whose tensors are known beforehand and written one by one, each at its place.

A job that takes days cannot keep its results in memory, nor write them twice, nor lose them. The
file is allocated whole, so a full disk shows before the work that would fill it; a tensor's bytes
go where the header says they are, so that a file left behind by a killed run is taken up again.
Which of its tensors are there is not in the file: the job's log says so.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

from exl3kit.checkpoint.atomic import disk_errors
from exl3kit.checkpoint.header import TensorInfo
from exl3kit.checkpoint.reader import read_tensor
from exl3kit.checkpoint.shard import Entry, header_bytes, in_file_order


class ShardFile:
    """The file `path` with `entries`; use as a context manager.

    Disk errors are CheckpointErrors that name the folder. Nothing is removed on an error.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        """Take up `path` where its header and size are those of `entries`, else write it anew."""
        self.path = path
        ordered = in_file_order(entries)
        header = header_bytes(ordered)
        self._infos, end = {}, len(header)
        for entry in ordered:
            start, end = end, end + entry.nbytes
            self._infos[entry.name] = TensorInfo(
                entry.name, entry.dtype, entry.shape, path, start, end
            )
        with disk_errors(path.parent):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._allocate(header, end)
            except BaseException:
                os.close(self._descriptor)
                raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put the tensor `name`, of the entry's dtype and shape and on any device, in its place."""
        info = self._infos[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (info.dtype, info.shape), name
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self.write_bytes(name, 0, flat.view(torch.uint8).numpy().data)

    def write_bytes(self, name: str, offset: int, data: memoryview) -> None:
        """Put `data` at `offset` bytes into the tensor `name`."""
        place = self._infos[name].start + offset
        with disk_errors(self.path.parent):
            while data:
                written = os.pwrite(self._descriptor, data, place)
                place, data = place + written, data[written:]

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name` as the file has it now."""
        return read_tensor(self._infos[name])

    def sync(self) -> None:
        """Wait until the disk has the file."""
        with disk_errors(self.path.parent):
            os.fsync(self._descriptor)

    def digest(self) -> str:
        """SHA-256 of the file as it is now."""
        with disk_errors(self.path.parent), self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def _allocate(self, header: bytes, size: int) -> None:
        is_same = os.fstat(self._descriptor).st_size == size
        if is_same and os.pread(self._descriptor, len(header), 0) == header:
            return
        os.ftruncate(self._descriptor, 0)
        os.posix_fallocate(self._descriptor, 0, size)
        os.pwrite(self._descriptor, header, 0)

"""Shards written in one pass from tensors that are all known beforehand.

Header first, then the data in its order: no byte is written twice. One thread reads and writes
through buffers that stay in the second-level cache, a second one hashes them (SHA-256 takes longer
than the copy), a third waits for the disk to have the finished shards.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

from exl3kit.checkpoint.pieces import PieceReader, PlannedTensor
from exl3kit.checkpoint.shard import header_bytes

Progress = Callable[[int], None]  # bytes written since the last call

_BUFFER_BYTES = 2**20
_NUM_BUFFERS = 16


class ShardStream:
    """Writes whole shards; a context manager that stops its threads and closes its files."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self._reader = PieceReader()
        self._hasher = ThreadPoolExecutor(1)
        self._syncer = ThreadPoolExecutor(1)
        self._free: SimpleQueue[bytearray] = SimpleQueue()
        for _ in range(_NUM_BUFFERS):
            self._free.put(bytearray(_BUFFER_BYTES))
        self._buffer = self._free.get()
        self._used = 0
        self._digests: dict[str, Future[str]] = {}
        self._synced: list[Future[None]] = []

    def write(self, path: Path, tensors: Sequence[PlannedTensor]) -> None:
        """Write `tensors`, in this order, as the safetensors file `path`. OSError for the disk."""
        for done in self._synced:
            if done.done():
                done.result()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            digest = hashlib.sha256()
            self._put(memoryview(header_bytes(tensors)), descriptor, digest)
            for tensor in tensors:
                self._write_tensor(tensor, descriptor, digest)
            self._flush(descriptor, digest)
        except BaseException:
            os.close(descriptor)
            raise
        self._digests[path.name] = self._hasher.submit(digest.hexdigest)
        self._synced.append(self._syncer.submit(_sync_and_close, descriptor))

    def finish(self) -> dict[str, str]:
        """Wait until all shards are on the disk; their SHA-256 by file name."""
        for done in self._synced:
            done.result()
        return {name: digest.result() for name, digest in self._digests.items()}

    def __enter__(self) -> ShardStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hasher.shutdown()
        self._syncer.shutdown()
        self._reader.close()

    def _write_tensor(self, tensor: PlannedTensor, descriptor: int, digest: hashlib._Hash) -> None:
        if tensor.rows != 1:
            self._put(self._reader.rows(tensor).data.cast("B"), descriptor, digest)
            return
        for info, start, stop in self._reader.ranges(tensor):
            while start < stop:
                room = self._room(descriptor, digest)[: stop - start]
                self._reader.read_into(room, info, start)
                self._used += len(room)
                start += len(room)

    def _put(self, data: memoryview, descriptor: int, digest: hashlib._Hash) -> None:
        while data:
            room = self._room(descriptor, digest)[: len(data)]
            room[:] = data[: len(room)]
            self._used += len(room)
            data = data[len(room) :]

    def _room(self, descriptor: int, digest: hashlib._Hash) -> memoryview:
        """The free part of the buffer, at least one byte."""
        if self._used == _BUFFER_BYTES:
            self._flush(descriptor, digest)
        return memoryview(self._buffer)[self._used :]

    def _flush(self, descriptor: int, digest: hashlib._Hash) -> None:
        """Write the buffer, give it to the hashing thread, take another one."""
        full, used = self._buffer, self._used
        data = memoryview(full)[:used]
        self._hasher.submit(self._hash, full, used, digest)
        while data:
            data = data[os.write(descriptor, data) :]
        if self._progress is not None:
            self._progress(used)
        self._buffer, self._used = self._free.get(), 0

    def _hash(self, buffer: bytearray, used: int, digest: hashlib._Hash) -> None:
        digest.update(memoryview(buffer)[:used])
        self._free.put(buffer)


def _sync_and_close(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Shards written in one pass from tensors that are all known beforehand.

Header first, then the data in its order: no byte is read or written twice. A thread makes a shard
block by block, so that a block is still in the second-level cache when it is hashed and written.
SHA-256 is half of the work (0.7 s for a GB on one core with SHA instructions, of 1.5 s in all), and
one digest cannot be split: so shards are made side by side, one a core.
Another thread waits for the disk, which takes a shard while the next ones are being made.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock
from types import TracebackType

from exl3kit.checkpoint.atomic import sync_path
from exl3kit.checkpoint.pieces import (
    PieceReader,
    PlannedTensor,
    check_finite,
    is_scale_vector,
)
from exl3kit.checkpoint.shard import header_bytes

Progress = Callable[[int], None]  # bytes written since the last call

_BLOCK_BYTES = 2**19  # with the source's bytes half of a second-level cache of 2 MiB
_MAX_THREADS = 8  # 8 GB/s of SHA-256, more than one disk takes


class ShardStream:
    """Writes whole shards; a context manager that waits for its threads, or stops them early."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self._lock = Lock()
        self._stop = Event()
        self._threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._makers = ThreadPoolExecutor(self._threads)
        self._syncer = ThreadPoolExecutor(1)
        self._running: deque[tuple[str, Future[str]]] = deque()
        self._syncing: list[Future[None]] = []
        self._digests: dict[str, str] = {}

    def write(self, path: Path, tensors: Sequence[PlannedTensor]) -> None:
        """Begin to write `tensors`, in this order, as the safetensors file `path`.

        Waits while all threads are at work. Errors of an earlier shard are raised here, OSError
        for the disk.
        """
        while len(self._running) > self._threads:
            self._wait_for_oldest()
        self._running.append((path.name, self._makers.submit(self._write, path, tensors)))

    def finish(self) -> dict[str, str]:
        """Wait until all shards are on the disk; their SHA-256 by file name."""
        while self._running:
            self._wait_for_oldest()
        for shard in self._syncing:
            shard.result()
        return self._digests

    def __enter__(self) -> ShardStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._makers.shutdown(cancel_futures=True)
        self._syncer.shutdown(cancel_futures=True)

    def _wait_for_oldest(self) -> None:
        name, shard = self._running.popleft()
        self._digests[name] = shard.result()

    def _write(self, path: Path, tensors: Sequence[PlannedTensor]) -> str:
        """Write one shard and have it synced; its SHA-256."""
        with PieceReader() as reader, path.open("wb", buffering=0) as file:
            blocks = _Blocks(file.write, self._count)
            blocks.put(memoryview(header_bytes(tensors)))
            for tensor in tensors:
                if self._stop.is_set():
                    break
                if tensor.rows == 1:
                    _copy(tensor, reader, blocks)
                else:
                    _copy_rows(tensor, reader, blocks)
            blocks.flush()
        self._syncing.append(self._syncer.submit(sync_path, path))
        return blocks.digest.hexdigest()

    def _count(self, written: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._progress(written)


class _Blocks:
    """A buffer that is hashed and written when it is full."""

    def __init__(self, write: Callable[[memoryview], int], count: Callable[[int], None]) -> None:
        self.digest = hashlib.sha256()
        self._write, self._count = write, count
        self._buffer = bytearray(_BLOCK_BYTES)
        self._used = 0

    def room(self, least: int = 1) -> memoryview:
        """The free part of the buffer, `least` bytes or more."""
        if len(self._buffer) - self._used < least:
            self.flush()
            if len(self._buffer) < least:
                self._buffer = bytearray(least)
        return memoryview(self._buffer)[self._used :]

    def use(self, count: int) -> None:
        """Say that the first `count` bytes of the room have been filled."""
        self._used += count

    def put(self, data: memoryview) -> None:
        """Copy `data` in."""
        while data:
            room = self.room()[: len(data)]
            room[:] = data[: len(room)]
            self.use(len(room))
            data = data[len(room) :]

    def flush(self) -> None:
        """Hash and write what is in the buffer."""
        data = memoryview(self._buffer)[: self._used]
        self.digest.update(data)
        while data:
            data = data[self._write(data) :]
        self._count(self._used)
        self._used = 0


def _copy(tensor: PlannedTensor, reader: PieceReader, blocks: _Blocks) -> None:
    """The bytes of a tensor of one row, range after range."""
    for piece in tensor.pieces:
        if piece.is_packed:
            blocks.put(reader.signs(piece))
            continue
        start, stop = piece.info.start + piece.start, piece.info.start + piece.stop
        is_vector = is_scale_vector(piece.info)  # checked whole: a few KB
        while start < stop:
            room = blocks.room(stop - start if is_vector else 1)[: stop - start]
            reader.read_into(room, piece.info, start)
            if is_vector:
                check_finite(room, piece)
            blocks.use(len(room))
            start += len(room)


def _copy_rows(tensor: PlannedTensor, reader: PieceReader, blocks: _Blocks) -> None:
    """The bytes of a tensor of many rows, as many rows at a time as there is room for."""
    width = tensor.nbytes // tensor.rows
    row = 0
    while row < tensor.rows:
        room = blocks.room(width)
        count = min(len(room) // width, tensor.rows - row)
        reader.read_rows(room[: count * width], tensor, row, row + count)
        blocks.use(count * width)
        row += count

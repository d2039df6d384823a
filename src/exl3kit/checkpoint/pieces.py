"""A tensor to be written that is made of stored tensors: a copy, a cut, or cuts joined.

Seen as bytes, a tensor cut along axis a is `rows` = shape[0] * ... * shape[a - 1] rows, of which
the cut takes the same columns of each. With one row the columns are a range of the file, and a copy
is all of it: such bytes go from file to file in blocks, whatever the tensor's size. With more rows
the source tensor is read whole, once for all cuts that follow one another.

Packed signs of exllamav3's first versions are the one thing that is written in another form: as the
vector of +1 and -1 that they stand for.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from exl3kit.checkpoint.header import TensorInfo
from exl3kit.checkpoint.shard import Entry
from exl3kit.checkpoint.signs import unpack_signs
from exl3kit.errors import CheckpointError

_MAX_OPEN = 64  # by each of up to eight threads, of the 1024 descriptors a process may have


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `stop` of every row of a stored tensor.

    `is_packed`: it holds packed signs, and the bytes are those of the unpacked vector.
    """

    info: TensorInfo
    start: int
    stop: int
    is_packed: bool = False


@dataclass(frozen=True, slots=True)
class PlannedTensor(Entry):
    """A tensor to be written: row by row, its pieces side by side."""

    rows: int
    pieces: tuple[Piece, ...]


def copy_of(info: TensorInfo, name: str) -> PlannedTensor:
    """The stored tensor with all its bytes, dtype and shape, under `name`."""
    return PlannedTensor(name, info.dtype, info.shape, 1, (Piece(info, 0, info.nbytes),))


def joined(name: str, axis: int, cuts: Sequence[tuple[TensorInfo, int, int]]) -> PlannedTensor:
    """Elements start to stop along `axis` of each stored tensor, joined along that axis.

    The tensors must have one dtype and equal shapes but for that axis.
    """
    first = cuts[0][0]
    unit = math.prod(first.shape[axis + 1 :]) * first.dtype.itemsize
    pieces = tuple(Piece(info, start * unit, stop * unit) for info, start, stop in cuts)
    size = sum(stop - start for _, start, stop in cuts)
    shape = (*first.shape[:axis], size, *first.shape[axis + 1 :])
    return PlannedTensor(name, first.dtype, shape, math.prod(first.shape[:axis]), pieces)


def unpacked(name: str, cuts: Sequence[tuple[TensorInfo, int, int]]) -> PlannedTensor:
    """Signs start to stop of each packed vector (n/16,), joined: float16."""
    width = torch.float16.itemsize
    pieces = tuple(Piece(info, start * width, stop * width, True) for info, start, stop in cuts)
    size = sum(stop - start for _, start, stop in cuts)
    return PlannedTensor(name, torch.float16, (size,), 1, pieces)


def is_scale_vector(info: TensorInfo) -> bool:
    """Whether a stored tensor is the suh or svh of an EXL3 linear."""
    is_vector = info.dtype == torch.float16 and len(info.shape) == 1
    return is_vector and info.name.endswith(("suh", "svh"))


def check_finite(halves: memoryview, piece: Piece) -> None:
    """CheckpointError unless the bytes of a piece of a scale vector are finite values.

    One that is not makes a whole linear NaN, which a copy would carry into another checkpoint.
    """
    values = np.frombuffer(halves, np.float16)
    if (bad := np.flatnonzero(~np.isfinite(values))).size:
        raise CheckpointError(
            f"{piece.info.file}: {piece.info.name!r}: expected finite scales, got "
            f"{values[bad[0]]} at {piece.start // 2 + int(bad[0])}; fetch or quantise this tensor "
            "again"
        )


class PieceReader:
    """Reads the bytes of planned tensors; keeps files open, and the tensors read whole last.

    Those are the sources of one planned tensor, an expert's trellis of a few MB as a rule. Their
    buffers are used again and again: pages fresh from the kernel cost as much as the read.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[Path, int] = OrderedDict()
        self._wholes: OrderedDict[TensorInfo, np.ndarray] = OrderedDict()

    def read_rows(self, buffer: memoryview, tensor: PlannedTensor, first: int, stop: int) -> None:
        """Fill `buffer` with rows `first` to `stop` of `tensor`."""
        out = np.frombuffer(buffer, np.uint8).reshape(stop - first, -1)
        column = 0
        for piece in tensor.pieces:
            width = piece.stop - piece.start
            source = self._whole(piece.info, len(tensor.pieces)).reshape(tensor.rows, -1)
            out[:, column : column + width] = source[first:stop, piece.start : piece.stop]
            column += width

    def signs(self, piece: Piece) -> memoryview:
        """The bytes of a piece of packed signs, unpacked; FormatError if it is something else."""
        words = torch.empty(piece.info.shape, dtype=piece.info.dtype)
        self.read_into(words.view(torch.uint8).numpy().data, piece.info, piece.info.start)
        vector = unpack_signs(words, piece.info.name)
        return vector.view(torch.uint8).numpy().data[piece.start : piece.stop]

    def read_into(self, buffer: memoryview, info: TensorInfo, start: int) -> None:
        """Fill `buffer` from byte `start` of the file of `info`; CheckpointError if it is short."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._file(info.file), [buffer[done:]], start + done)
            except OSError as err:
                raise CheckpointError(
                    f"{info.file}: tensor {info.name!r}: cannot read: {err.strerror}"
                ) from None
            if not count:
                raise CheckpointError(
                    f"{info.file}: truncated: tensor {info.name!r} ends at byte {info.end}, "
                    f"found {start + done} bytes"
                )
            done += count

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _whole(self, info: TensorInfo, most: int) -> np.ndarray:
        """All bytes of a stored tensor; at most `most` tensors are kept."""
        data = self._wholes.pop(info, None)
        if data is None:
            spare = None
            while len(self._wholes) >= most:
                _, spare = self._wholes.popitem(last=False)
            if spare is not None and len(spare) == info.nbytes:
                data = spare
            else:
                data = np.empty(info.nbytes, np.uint8)
            self.read_into(data.data, info, info.start)
        self._wholes[info] = data  # the last in order: the first to go is the one used longest ago
        return data

    def _file(self, path: Path) -> int:
        if path in self._files:
            self._files.move_to_end(path)
        else:
            self._files[path] = os.open(path, os.O_RDONLY)
            if len(self._files) > _MAX_OPEN:
                os.close(self._files.popitem(last=False)[1])
        return self._files[path]

"""`quantization_log.jsonl`: one line for each matrix that is done, written when its bytes are.

It is the user's log and the job's memory at once: a line says that a matrix is stored and what it
cost, and carries the CRC-32 of its stored bytes, so that after a power cut a line whose bytes never
reached the disk is found out. A line that is no record, as zeros after such a cut, counts for
nothing: its matrix is made again. Times make it the one file of two equal jobs that differs, so it
is not in SHA256SUMS.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from exl3kit.checkpoint.atomic import disk_errors
from exl3kit.errors import CheckpointError
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.log import get_logger
from exl3kit.quantize.hessian import Coverage

_log = get_logger(__name__)

LOG_NAME = "quantization_log.jsonl"


@dataclass(frozen=True, slots=True)
class MatrixResult:
    """One quantised matrix; `proxy_error` = tr(E' H E) / tr(W' H W), H = 1 where there is none.

    `name` is a linear's, or that of one rank's part of it. `tokens` are those that reached the
    linear in calibration, `coverage` is where its Hessian comes from, `scale` the g it shares.
    """

    name: str
    bits: int | float
    proxy_error: float
    scale: float
    coverage: Coverage
    tokens: int


class Journal:
    """The log of one job, taken up where it ends; a line cut short by a kill is dropped.

    Use as a context manager.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        whole = _whole_lines(path) if path.exists() else b""
        self._lines = _parse(whole, path)
        with disk_errors(path.parent):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            os.ftruncate(self._descriptor, len(whole))
        self._end = len(whole)

    def get(self, name: str) -> tuple[MatrixResult, int] | None:
        """The result of matrix `name` and the CRC-32 of its bytes; None if it is not done."""
        return self._lines.get(name)

    def result(self, name: str) -> MatrixResult:
        """The result of a matrix that is done; CheckpointError if the log has no line of it."""
        if name not in self._lines:
            raise CheckpointError(
                f"{self._path}: expected a line of {name!r}, which is stored, found none; the log "
                "is damaged: restore it, or begin again in another folder"
            )
        return self._lines[name][0]

    def add(self, result: MatrixResult, crc: int, seconds: float) -> None:
        """Write a line; a disk that is full leaves the log as it was."""
        record = {**asdict(result), "seconds": round(seconds, 3), "crc32": crc}
        data = (json.dumps(record) + "\n").encode()
        with disk_errors(self._path.parent):
            done = 0
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], self._end + done)
        self._end += len(data)
        self._lines[result.name] = result, crc

    def sync(self) -> None:
        """Wait until the disk has the log."""
        with disk_errors(self._path.parent):
            os.fsync(self._descriptor)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def read_log(folder: Path) -> list[MatrixResult]:
    """The matrices that the log of an output folder has, finished or not, in the order they came.

    CheckpointError if there is no log.
    """
    path = folder / LOG_NAME
    if not path.is_file():
        raise CheckpointError(f"{path}: expected the log of `exl3kit quantize`, found none")
    return [result for result, _ in _parse(_whole_lines(path), path).values()]


def _whole_lines(path: Path) -> bytes:
    """The log without a last line that was cut short."""
    data = path.read_bytes()
    return data[: data.rfind(b"\n") + 1]


def _parse(data: bytes, path: Path) -> dict[str, tuple[MatrixResult, int]]:
    """Result and CRC-32 by name; of a matrix that was made again, the last."""
    found: dict[str, tuple[MatrixResult, int]] = {}
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            result, crc = _record(line)
        except (ValueError, TypeError, KeyError, RecursionError):
            _log.warning("%s: line %d is damaged and counts for nothing", path, number)
        else:
            found[result.name] = result, crc
    return found


def _record(line: bytes) -> tuple[MatrixResult, int]:
    """What `add` wrote; ValueError, TypeError or KeyError for anything else."""
    record: dict[str, Any] = json.loads(line)
    crc = int(record.pop("crc32"))
    del record["seconds"]
    record["coverage"] = Coverage(record["coverage"])
    result = MatrixResult(**record)
    numbers = result.bits, result.proxy_error, result.scale, result.tokens
    if not isinstance(result.name, str) or not all(isinstance(x, int | float) for x in numbers):
        raise TypeError(line)
    return result, crc


def crc32(parts: Iterable[Exl3Tensor]) -> int:
    """CRC-32 of all stored bytes of some EXL3 linears."""
    crc = 0
    for part in parts:
        for tensor in part.tensors().values():
            flat = tensor.cpu().contiguous().reshape(-1)
            crc = zlib.crc32(flat.view(torch.uint8).numpy().data, crc)
    return crc

"""The header of one safetensors file: 8 bytes of length, JSON, then the data.

The file is untrusted. The JSON may take at most the file and at most 100 MB; every offset must lie
in the file; every size must be shape x dtype; and, as the safetensors library demands, the tensors
must cover the data exactly, without holes or overlaps. exllamav3 does not pad its header, so data
may start at any byte: nothing here or in `reader` assumes alignment.

The JSON is read entry by entry, so that memory is the text, twice, and some 300 bytes a tensor: for
100 MB of them 470 MB, or 180 MB if they are anything else, where Python's objects for all of the
JSON took 880 MB and up to 2.5 GB.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exl3kit.checkpoint.atomic import read_errors
from exl3kit.checkpoint.jsonfile import check_regular, is_int, json_members
from exl3kit.checkpoint.keys import show
from exl3kit.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_MAX_RANK = 64  # torch's limit on dimensions
_MAX_ENTRY_CHARS = 8192  # 64 sizes of 19 digits take 1300
_MAX_METADATA_CHARS = 2**22
_METADATA = "__metadata__"

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: bytes `start` to `end` of `file`, from its first byte on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return self.end - self.start


@dataclass(frozen=True)
class FileHeader:
    """A safetensors file's tensors in the order of its header, and its `__metadata__`."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(path: Path) -> FileHeader:
    """Read and check the header of `path`. CheckpointError names the file and what is wrong."""
    with read_errors(path):
        check_regular(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_length(file.read(8), size, path)
            text = file.read(length)
    if not text.startswith(b"{"):
        raise CheckpointError(f"{path}: header must start with '{{', got {text[:1]!r}")
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] | None = None
    for name, entry in json_members(text, f"{path}: header", _most_chars):
        if name in tensors or (name == _METADATA and metadata is not None):
            raise CheckpointError(f"{path}: header: key {name!r} appears twice")
        if name == _METADATA:
            metadata = _metadata(entry, path)
        else:
            check_tensor_name(name, str(path))
            tensors[name] = _tensor_info(name, entry, path, 8 + length)
    _check_cover(tensors, path, 8 + length, size)
    return FileHeader(tensors, metadata or {})


def check_tensor_name(name: str, where: str) -> None:
    """Refuse a name with control characters: names are shown to users, on terminals too."""
    if not name or not name.isprintable():
        raise CheckpointError(f"{where}: tensor name must be printable text, got {name[:80]!r}")


def _header_length(first: bytes, size: int, path: Path) -> int:
    if len(first) < 8:
        raise CheckpointError(
            f"{path}: truncated: expected at least 8 bytes of header length, found {size} bytes"
        )
    (length,) = struct.unpack("<Q", first)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: header length is {length} bytes, expected at most {MAX_HEADER_BYTES}; "
            "this is not a safetensors file, or it is damaged"
        )
    if 8 + length > size:
        raise CheckpointError(
            f"{path}: truncated: the header ends at byte {8 + length}, found {size} bytes"
        )
    return length


def _most_chars(name: str) -> int:
    return _MAX_METADATA_CHARS if name == _METADATA else _MAX_ENTRY_CHARS


def _metadata(value: Any, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings")
    return value


def _tensor_info(name: str, entry: Any, path: Path, data_start: int) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: expected exactly the keys dtype, shape, data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(
            f"{where}: dtype must be one of {', '.join(DTYPES)}, got {str(entry['dtype'])[:40]!r}"
        )
    shape = _sizes(entry["shape"], f"{where}: shape")
    offsets = _sizes(entry["data_offsets"], f"{where}: data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{where}: data_offsets must be [start, end] with start <= end, got {list(offsets)}"
        )
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    if nbytes != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where}: {list(shape)} of {entry['dtype']} takes {nbytes} bytes, "
            f"but data_offsets span {offsets[1] - offsets[0]}"
        )
    return TensorInfo(name, dtype, shape, path, data_start + offsets[0], data_start + offsets[1])


def _sizes(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_RANK:
        raise CheckpointError(f"{where} must be a list of at most {_MAX_RANK} integers")
    for item in value:
        if not is_int(item) or not 0 <= item < 2**63:
            raise CheckpointError(
                f"{where} must hold integers from 0 to 2**63 - 1, got {show(item)}"
            )
    return tuple(value)


def _check_cover(tensors: dict[str, TensorInfo], path: Path, data_start: int, size: int) -> None:
    """The tensors, sorted by place, must fill data_start..size exactly."""
    end, previous = data_start, "the header"
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.end)):
        if info.start != end:
            kind = "overlaps" if info.start < end else "leaves a hole after"
            raise CheckpointError(
                f"{path}: tensor {info.name!r} {kind} {previous}: it starts at byte "
                f"{info.start}, expected {end}"
            )
        end, previous = info.end, repr(info.name)
    if end > size:
        raise CheckpointError(
            f"{path}: truncated: expected {end} bytes, found {size}; copy or download it again"
        )
    if end < size:
        raise CheckpointError(
            f"{path}: {size - end} bytes after the last tensor: expected {end} bytes, found {size}"
        )

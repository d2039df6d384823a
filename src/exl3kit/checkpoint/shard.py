"""The layout of a safetensors file to be written: its tensors in order, and its header."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from exl3kit.checkpoint.header import DTYPE_NAMES
from exl3kit.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to be stored: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


AnyEntry = TypeVar("AnyEntry", bound=Entry)


def in_file_order(entries: Iterable[AnyEntry]) -> list[AnyEntry]:
    """Widest dtype first, else as given.

    That order keeps every tensor aligned to its own item size, which the safetensors library's
    torch reader needs, without the holes that it refuses.
    """
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def header_bytes(entries: Sequence[Entry]) -> bytes:
    """Length and JSON, padded to 8 bytes, of a file whose data are `entries` back to back."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.nbytes
        header[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def part_name(number: int) -> str:
    """Name of a shard while it is not known how many there will be."""
    return f"shard-{number:05d}.part"


def final_name(number: int, count: int) -> str:
    """Name of shard `number`, from 1 on, of a checkpoint with `count` of them."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def check_entry(name: str, dtype: torch.dtype) -> None:
    """CheckpointError for a name or dtype that safetensors cannot store."""
    if name == "__metadata__":
        raise CheckpointError(f"tensor {name!r}: safetensors keeps this name for itself")
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(f"tensor {name!r}: dtype {dtype} cannot be stored in safetensors")

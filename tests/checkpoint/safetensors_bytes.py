"""Safetensors files made byte by byte, so that a test can make the ones no library writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_raw(path: Path, header: dict[str, Any] | bytes, data: bytes = b"", pad: int = 0) -> Path:
    """Length, header JSON (or these very bytes) with `pad` spaces, data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    """One tensor's value in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}

"""JSON that comes with a checkpoint, read strictly and within bounds.

Python's parser accepts duplicate keys, NaN and any nesting, and raises five kinds of exception; a
checkpoint is untrusted input, so all of that becomes one `CheckpointError` which names the file.
"""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from exl3kit.errors import CheckpointError

# The index of a 933,888-tensor checkpoint (GLM-5.2, TP4) has about 100 MB.
MAX_JSON_BYTES = 256 * 2**20


def parse_json(text: bytes, where: str) -> Any:
    """The value of UTF-8 JSON `text`; CheckpointError names `where` if it is none.

    Refuses duplicate keys, NaN, Infinity and what overflows to it (1e999), and nesting deeper than
    Python's parser can follow.
    """
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except CheckpointError as err:
        raise CheckpointError(f"{where}: {err}") from None
    except RecursionError:
        raise CheckpointError(f"{where}: JSON is nested too deeply") from None
    except ValueError as err:
        raise CheckpointError(f"{where}: not valid JSON: {err}") from None


def read_json(path: Path) -> Any:
    """The value of a JSON file of at most MAX_JSON_BYTES; CheckpointError names the file."""
    try:
        check_regular(path)
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes, expected at most {MAX_JSON_BYTES}")
        return parse_json(path.read_bytes(), str(path))
    except OSError as err:
        raise CheckpointError(f"{path}: cannot read: {err.strerror}") from None


def check_regular(path: Path) -> None:
    """Refuse what is there and no file: opening a pipe waits, and a device may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path}: cannot read: expected a regular file, or a link to one")


def read_json_object(path: Path) -> dict[str, Any]:
    """The object a JSON file holds; CheckpointError if its top level is anything else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def is_int(value: object) -> TypeGuard[int]:
    """True for a JSON integer; JSON `true` is an int in Python and is not one here."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_bare_name(name: str) -> bool:
    """True for a plain file name: joined to a folder, it stays in that folder."""
    return (
        name not in ("", ".", "..")
        and not any(char in name for char in "/\\:\0")
        and name.isprintable()
        and name == name.strip()
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    for key in value:
        key.encode()  # a lone surrogate is a ValueError here, and not later where it is printed
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise CheckpointError(f"key {twice!r} appears twice")
    return value


def _no_constant(text: str) -> NoReturn:
    raise CheckpointError(f"{text} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise CheckpointError(f"expected a finite number, got {text[:40]}")
    return value

"""JSON that comes with a checkpoint, read strictly and within bounds.

Python's parser accepts duplicate keys, NaN and any nesting, and raises five kinds of exception; a
checkpoint is untrusted input, so all of that becomes one `CheckpointError` which names the file.

It also takes up to 30 bytes of memory for one of text (`{"a":0},`). So `parse_json` counts what
would become an object before it makes any, 2 million at most, which take 190 MB beside their text;
`json_members` makes one member of the outermost object at a time.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from exl3kit.checkpoint.atomic import read_errors
from exl3kit.errors import CheckpointError

# The index of a 933,888-tensor checkpoint (GLM-5.2, TP4) has about 100 MB.
MAX_JSON_BYTES = 256 * 2**20
MAX_VALUES = 2_000_000  # twice that index's
_SPACE = re.compile(r"[ \t\n\r]*")


def parse_json(text: bytes, where: str) -> Any:
    """The value of UTF-8 JSON `text`; CheckpointError names `where` if it is none.

    Refuses duplicate keys, NaN, Infinity and what overflows to it (1e999), nesting deeper than
    Python's parser can follow, and more than MAX_VALUES values.
    """
    with _json_errors(where):
        if sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
            raise CheckpointError(f"expected at most {MAX_VALUES} values, found more")
        return json.loads(text.decode("utf-8"), **_HOOKS)


def json_members(text: bytes, where: str, most: Callable[[str], int]) -> Iterator[tuple[str, Any]]:
    """Key and value of each member of the UTF-8 JSON object `text`, strictly as in `parse_json`.

    No value may take more than `most(key)` characters. A key that comes twice is given twice.
    """
    with _json_errors(where):
        chars = text.decode("utf-8")
        at, mark = 0, "{"
        while mark != "}":
            at = _expect(chars, at, mark)
            if mark == "{" and chars.startswith("}", at):
                break
            key, at = _key(chars, at)
            value, at = _value(chars, _expect(chars, at, ":"), key, most(key))
            yield key, value
            mark = "}" if chars.startswith("}", at) else ","
        if _expect(chars, at, "}") < len(chars):
            raise CheckpointError("not valid JSON: text after the end of the object")


def json_bytes(value: Any) -> bytes:
    """JSON as it is written beside the weights."""
    return (json.dumps(value, indent=2) + "\n").encode()


def read_json(path: Path) -> Any:
    """The value of a JSON file of at most MAX_JSON_BYTES; CheckpointError names the file."""
    with read_errors(path):
        check_regular(path)
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes, expected at most {MAX_JSON_BYTES}")
        text = path.read_bytes()
    return parse_json(text, str(path))


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


@contextmanager
def _json_errors(where: str) -> Iterator[None]:
    """Turn what a parser raises into a CheckpointError that names `where`."""
    try:
        yield
    except CheckpointError as err:
        raise CheckpointError(f"{where}: {err}") from None
    except RecursionError:
        raise CheckpointError(f"{where}: JSON is nested too deeply") from None
    except ValueError as err:
        raise CheckpointError(f"{where}: not valid JSON: {err}") from None


def _expect(chars: str, at: int, mark: str) -> int:
    """Where the text goes on after `mark` and white space."""
    if not chars.startswith(mark, at):
        raise json.JSONDecodeError(f"expected {mark!r}", chars, at)
    return _skip(chars, at + 1)


def _skip(chars: str, at: int) -> int:
    match = _SPACE.match(chars, at)
    return match.end() if match else at


def _key(chars: str, at: int) -> tuple[str, int]:
    if not chars.startswith('"', at):
        raise json.JSONDecodeError("expected a name in double quotes", chars, at)
    key, end = _DECODER.raw_decode(chars, at)
    key.encode()  # as in _unique_keys
    return key, _skip(chars, end)


def _value(chars: str, at: int, key: str, most: int) -> tuple[Any, int]:
    try:
        value, length = _DECODER.raw_decode(chars[at : at + most])
    except json.JSONDecodeError as err:
        raise CheckpointError(
            f"{key[:80]!r}: not valid JSON of at most {most} characters: {err}"
        ) from None
    return value, _skip(chars, at + length)


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


_HOOKS: dict[str, Any] = {
    "object_pairs_hook": _unique_keys,
    "parse_constant": _no_constant,
    "parse_float": _finite,
}
_DECODER = json.JSONDecoder(**_HOOKS)

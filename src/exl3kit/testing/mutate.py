"""Damage to one file of a checkpoint folder: every kind by a seeded generator, none by hand.

Four kinds of place: safetensors headers, JSON files, tensor bytes, and the files themselves. All of
it is what a broken download, a careless script or an attacker could leave behind.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

INTERESTING: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 8, 16, 127, 128, 129, 255, 4096, 4097, 2**15, 2**31 - 1, 2**31, 2**32, 2**53,
    2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 0.5, 3.0, 3.25, 1e308, True, False, None, "", "3",
    "mixed", "mcg", "mul1", "../x.json:k", "a\u0000b", "\u202e", "x" * 300, [], {}, [[]], [None],
    [1, 2], [0, 0], [5, 1], {"a": 1}, ["LlamaForCausalLM"], ["Glm4MoeForCausalLM"],
)  # fmt: skip
_DTYPES = ("F16", "BF16", "F32", "I16", "I32", "U8", "I64", "BOOL", "F8_E4M3", "F64", "Q4")
_TEXTS = (b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 5000, b'{"a":1,"a":2}', b"NaN")
_FLOATS = (math.nan, math.inf, -math.inf)


def mutate(folder: Path, random: Random) -> str:
    """Damage one file in `folder`; what was done, for a report."""
    weights = sorted(folder.glob("*.safetensors"))
    documents = sorted(folder.glob("*.json"))
    kind = random.choice(("header", "header", "json", "json", "tensor", "bytes", "file"))
    if kind == "json":
        return _change(random.choice(documents), random, _mutate_json)
    if kind == "header":
        return _change(random.choice(weights), random, _mutate_header)
    if kind == "tensor":
        return _change(random.choice(weights), random, _mutate_data)
    if kind == "bytes":
        return _change(random.choice(weights + documents), random, _mutate_bytes)
    return _mutate_files(folder, random.choice(weights + documents), random)


def _change(path: Path, random: Random, how: Callable[[bytes, Random], tuple[bytes, str]]) -> str:
    data, what = how(path.read_bytes(), random)
    path.write_bytes(data)
    return f"{path.name}: {what}"


def _mutate_bytes(data: bytes, random: Random) -> tuple[bytes, str]:
    """A few bytes flipped, cut off, inserted or repeated, mostly near the front."""
    blob = bytearray(data)
    reach = len(blob) if random.random() < 0.3 else min(len(blob), 400)
    at = random.randrange(max(reach, 1))
    kind = random.choice(("flip", "cut", "insert", "repeat", "zero the end"))
    if kind == "flip":
        for _ in range(random.randint(1, 8)):
            place = random.randrange(max(reach, 1))
            if place < len(blob):
                blob[place] ^= random.randint(1, 255)
    elif kind == "cut":
        del blob[at:]
    elif kind == "insert":
        blob[at:at] = random.randbytes(random.randint(1, 40))
    elif kind == "repeat":
        blob += blob[at : at + 64]
    else:
        blob[at:] = bytes(len(blob) - at)
    return bytes(blob), f"{kind} at {at}"


def _mutate_json(data: bytes, random: Random) -> tuple[bytes, str]:
    """A value replaced, removed, renamed or put elsewhere; now and then no JSON at all."""
    if random.random() < 0.1:
        text = random.choice(_TEXTS)
        return text, f"replaced by {text[:12]!r}"
    document = json.loads(data)
    what = [_mutate_value(document, random) for _ in range(random.choice((1, 1, 2)))]
    return json.dumps(document).encode(), ", ".join(what)


def _mutate_header(data: bytes, random: Random) -> tuple[bytes, str]:
    """An entry of the header changed, or the length in front of it."""
    length = int.from_bytes(data[:8], "little")
    if random.random() < 0.15:
        new = random.choice(
            (0, 1, 2, 7, length - 1, length + 1, len(data), 10**8, 2**63, 2**64 - 1)
        )
        return new.to_bytes(8, "little") + data[8:], f"header length {new}"
    header = json.loads(data[8 : 8 + length])
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    entry, kind = random.choice(entries), random.choice(("dtype", "shape", "offsets", "any"))
    if kind == "dtype":
        entry["dtype"] = random.choice(_DTYPES)
    elif kind == "shape" and entry["shape"]:
        entry["shape"][random.randrange(len(entry["shape"]))] = random.choice(INTERESTING)
    elif kind == "offsets":
        entry["data_offsets"] = random.choice(entries)["data_offsets"]
    else:
        kind = _mutate_value(header, random)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :], kind


def _mutate_data(data: bytes, random: Random) -> tuple[bytes, str]:
    """One tensor's bytes: noise, zeros, or values that are not finite."""
    import numpy as np

    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = random.choice([name for name in header if name != "__metadata__"])
    start, end = (8 + length + offset for offset in header[name]["data_offsets"])
    kind = random.choice(("noise", "zeros", "not finite"))
    if kind == "noise":
        new = random.randbytes(end - start)
    elif kind == "zeros":
        new = bytes(end - start)
    else:
        new = np.full((end - start) // 2 + 1, random.choice(_FLOATS), np.float16).tobytes()
    return data[:start] + new[: end - start] + data[end:], f"{name}: {kind}"


def _mutate_files(folder: Path, path: Path, random: Random) -> str:
    """A file removed, emptied, doubled under another name, or turned into a folder."""
    kind = random.choice(("remove", "empty", "double", "folder", "shard of many"))
    if kind == "remove":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "double":
        (folder / f"copy{path.suffix}").write_bytes(path.read_bytes())
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    else:
        (folder / "model-00001-of-99999.safetensors").write_bytes(path.read_bytes())
    return f"{path.name}: {kind}"


def _mutate_value(document: Any, random: Random) -> str:
    """Change one place in a JSON document, in place."""
    places = _places(document)
    if not places:
        return "nothing"
    owner, key = random.choice(places)
    kind = random.choice(("replace", "replace", "remove", "rename", "copy"))
    if kind == "replace":
        owner[key] = random.choice(INTERESTING)
    elif kind == "remove":
        del owner[key]
    elif kind == "rename" and isinstance(owner, dict):
        owner[random.choice((f"{key}x", "rank7.trellis", "a\u0000", "", f"{key}.rank01.suh"))] = (
            owner.pop(key)
        )
    else:
        other, other_key = random.choice(places)
        owner[key] = json.loads(json.dumps(other.get(other_key) if isinstance(other, dict) else 0))
    return f"{kind} {str(key)[:60]!r}"


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON document."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [p for key in keys for p in _places(value[key])]

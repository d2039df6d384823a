from __future__ import annotations

import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from exl3kit.checkpoint.header import DTYPES, MAX_HEADER_BYTES, read_header
from exl3kit.checkpoint.reader import read_tensor
from exl3kit.errors import CheckpointError
from tests.checkpoint.safetensors_bytes import entry, write_raw


def _example(dtype: torch.dtype) -> torch.Tensor:
    data = torch.randint(0, 2, (3 * 5 * dtype.itemsize,), dtype=torch.uint8)
    return data.view(dtype).reshape(3, 5)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_reads_what_the_library_writes_in_every_dtype(tmp_path: Path) -> None:
    tensors = {name: _example(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(7, dtype=torch.int32), "empty": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "a.safetensors")
    assert header.metadata == {"format": "pt"}
    assert header.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        found = read_tensor(header.tensors[name])
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
        assert _bits(found) == _bits(expected), name


@pytest.mark.parametrize("pad", range(8))
def test_data_may_start_at_any_byte(tmp_path: Path, pad: int) -> None:
    """exllamav3 does not pad its header, and a 4-byte marker shifts what follows it."""
    marker, wide = torch.tensor(-877912083, dtype=torch.int32), torch.arange(3, dtype=torch.int64)
    header = {"a.mcg": entry("I32", [], 0, 4), "b": entry("I64", [3], 4, 28)}
    path = write_raw(tmp_path / "x.safetensors", header, _bits(marker) + _bits(wide), pad)
    infos = read_header(path).tensors
    assert torch.equal(read_tensor(infos["a.mcg"]), marker)
    assert torch.equal(read_tensor(infos["b"]), wide)


def test_tensors_own_their_bytes(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"a": entry("U8", [4], 0, 4)}, b"abcd")
    info = read_header(path).tensors["a"]
    first, second = read_tensor(info), read_tensor(info)
    write_raw(path, {"a": entry("U8", [4], 0, 4)}, b"wxyz")
    second.zero_()
    assert bytes(first.tolist()) == b"abcd"


def test_file_that_shrank_after_its_header_was_read(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"a": entry("U8", [4], 0, 4)}, b"abcd")
    info = read_header(path).tensors["a"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"x.safetensors: truncated: .*{info.end}"):
        read_tensor(info)


GOOD = entry("U8", [4], 0, 4)
BAD_HEADERS: dict[str, tuple[dict[str, Any] | bytes, str]] = {
    "not json": (b"{]", "not valid JSON"),
    "not an object": (b"[1, 2]", "must start with"),
    "leading space": (b' {"a":1}', "must start with"),
    "not utf-8": (b'{"\xff":1}', "not valid JSON"),
    "lone surrogate": (b'{"\\ud800":{}}', "not valid JSON"),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{}}', "'__metadata__' appears twice"),
    "no comma": (b'{"__metadata__":{} "b":{}}', "not valid JSON: expected ','"),
    "no colon": (b'{"a" {}}', "not valid JSON: expected ':'"),
    "name without quotes": (b"{a:{}}", "not valid JSON: expected a name"),
    "comma at the end": (b'{"__metadata__":{},}', "not valid JSON"),
    "not closed": (b'{"__metadata__":{}', "not valid JSON"),
    "text after it": (b"{} x", "text after the end"),
    "long entry": (
        b'{"a":{"dtype":"U8","shape":[' + b"1," * 9000 + b"4]}}",
        "'a': not valid JSON of at most 8192 characters",
    ),
    "duplicate tensor": (
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{}}',
        "'a' appears twice",
    ),
    "NaN": (b'{"a":NaN}', "NaN"),
    "infinite float": (b'{"a":1e999}', "a finite number, got 1e999"),
    "deep": (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
    "huge integer": (b'{"a":' + b"9" * 5000 + b"}", "not valid JSON"),
    "control character": ({"a\x1b[2J": GOOD}, "must be printable text"),
    "empty name": ({"": GOOD}, "must be printable text"),
    "metadata not strings": ({"__metadata__": {"x": 1}, "a": GOOD}, "__metadata__"),
    "entry not an object": ({"a": 3}, "expected exactly the keys"),
    "missing key": ({"a": {"dtype": "U8", "shape": [4]}}, "expected exactly the keys"),
    "extra key": ({"a": {**GOOD, "x": 1}}, "expected exactly the keys"),
    "unknown dtype": ({"a": entry("F4", [4], 0, 4)}, "dtype must be one of"),
    "dtype not a string": ({"a": {**GOOD, "dtype": ["U8"]}}, "dtype must be one of"),
    "boolean size": ({"a": {**GOOD, "shape": [True, 4]}}, "integers from 0"),
    "boolean offset": ({"a": {**GOOD, "data_offsets": [False, 4]}}, "integers from 0"),
    "float size": ({"a": {**GOOD, "shape": [4.0]}}, "integers from 0"),
    "negative size": ({"a": {**GOOD, "shape": [-2, -2]}}, "integers from 0"),
    "size past int64": ({"a": {**GOOD, "shape": [2**63]}}, "integers from 0"),
    "rank 65": ({"a": {**GOOD, "shape": [1] * 65}}, "at most 64"),
    "size not shape x dtype": ({"a": entry("I16", [4], 0, 4)}, "takes 8 bytes"),
    "product overflows": ({"a": entry("U8", [2**40, 2**40], 0, 4)}, "takes"),
    "offsets reversed": ({"a": entry("U8", [4], 4, 0)}, "start <= end"),
    "three offsets": ({"a": {**GOOD, "data_offsets": [0, 2, 4]}}, "start, end"),
    "overlap": ({"a": entry("U8", [3], 0, 3), "b": entry("U8", [2], 2, 4)}, "'b' overlaps 'a'"),
    "hole": ({"a": entry("U8", [1], 0, 1), "b": entry("U8", [2], 2, 4)}, "hole after 'a'"),
    "hole at the start": ({"a": entry("U8", [2], 2, 4)}, "hole after the header"),
    "past the end": ({"a": entry("U8", [5], 0, 5)}, "truncated: expected"),
    "data left over": ({"a": entry("U8", [3], 0, 3)}, "1 bytes after the last tensor"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_headers_are_refused_with_the_file_named(tmp_path: Path, case: str) -> None:
    header, text = BAD_HEADERS[case]
    path = write_raw(tmp_path / "bad.safetensors", header, b"abcd")
    with pytest.raises(CheckpointError, match=r"bad.safetensors") as error:
        read_header(path)
    assert text in str(error.value)


@pytest.mark.parametrize("size", [0, 7])
def test_file_without_a_length(tmp_path: Path, size: int) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"\0" * size)
    with pytest.raises(CheckpointError, match=f"truncated.*at least 8.*found {size}"):
        read_header(path)


def test_truncated_file_states_expected_and_found_bytes(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"expected {whole} bytes, found {whole - 100}"):
        read_header(path)


def _peak(path: Path) -> int:
    """Most bytes that Python has at a time while the header is read."""
    tracemalloc.start()
    try:
        with suppress(CheckpointError):
            read_header(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", [b"[],", b'{"a":0},', b'"ab",', b"1.5,"])
def test_memory_for_what_is_no_entry(tmp_path: Path, text: bytes) -> None:
    """Python's objects for all of it would take 8 to 30 times the text."""
    header = b'{"a":[' + text * (1_000_000 // len(text)) + b"0]}"
    assert _peak(write_raw(tmp_path / "x.safetensors", header)) < 3 * len(header)


def test_memory_for_entries(tmp_path: Path) -> None:
    """The text twice, and what is kept; 9 times the text for Python's objects and that."""
    prefix = "model.layers.1.mlp.experts"
    header = {f"{prefix}.{n}.gate_proj.rank0.suh": entry("F16", [0], 0, 0) for n in range(20_000)}
    path = write_raw(tmp_path / "x.safetensors", header)
    assert len(read_header(path).tensors) == 20_000
    assert _peak(path) < 6 * path.stat().st_size


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1, 2**40, 2**64 - 1])
def test_claimed_header_length_allocates_nothing(tmp_path: Path, length: int) -> None:
    path = tmp_path / "bomb.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="header"):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()

"""Damaged and random input: every refusal is an `Exl3Error`, and nothing accepted is unsafe."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from exl3kit.checkpoint.header import read_header
from exl3kit.checkpoint.jsonfile import parse_json
from exl3kit.checkpoint.manifest import BLOCK_KEY, RankSlicedManifest
from exl3kit.checkpoint.names import normalise_name
from exl3kit.checkpoint.reader import read_tensor
from exl3kit.checkpoint.verify import verify_checkpoint
from exl3kit.errors import Exl3Error
from exl3kit.models.registry import model_map
from tests.checkpoint.safetensors_bytes import entry, write_raw
from tests.checkpoint.test_manifest import uniform_block

FUZZ = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
VALID = {
    "__metadata__": {"format": "pt"},
    "a.trellis": entry("I16", [1, 1, 4], 0, 8),
    "a.suh": entry("F16", [2], 8, 12),
    "a.mcg": entry("I32", [], 12, 16),
}
INTERESTING = [0, 1, 2, 4, 8, 16, 17, 2**31, 2**53, 2**63, 2**64, -1, True, None, 1.5, "4", [], {}]
JSON_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
        st.sampled_from(INTERESTING),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


def _read_everything(path: Path) -> bool:
    """True if the file is accepted; then every tensor must be readable and inside the file."""
    try:
        header = read_header(path)
    except Exl3Error:
        return False
    size = path.stat().st_size
    for info in header.tensors.values():
        assert 8 <= info.start <= info.end <= size
        tensor = read_tensor(info)
        assert tensor.numel() * tensor.element_size() == info.nbytes
    return True


def _library_accepts(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as file:
            return file.keys() is not None
    except (SafetensorError, OSError):
        return False


@FUZZ
@given(data=st.data())
def test_damaged_files(tmp_path: Path, data: st.DataObject) -> None:
    """Flip, cut or insert bytes. What we accept, the safetensors library accepts as well."""
    path = write_raw(tmp_path / "x.safetensors", VALID, bytes(range(16)))
    blob = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(blob) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        if kind == "flip":
            blob[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del blob[at:]
            blob += b"\0"
        else:
            blob[at:at] = data.draw(st.binary(max_size=4))
    path.write_bytes(blob)
    if _read_everything(path):
        assert _library_accepts(path)


@FUZZ
@given(
    name=st.sampled_from(["a.trellis", "a.suh", "a.mcg"]),
    key=st.sampled_from(["dtype", "shape", "data_offsets", None]),
    value=JSON_VALUES | st.lists(st.sampled_from(INTERESTING), min_size=1, max_size=3),
)
def test_wrong_header_values(tmp_path: Path, name: str, key: str | None, value: Any) -> None:
    header = json.loads(json.dumps(VALID))
    if key is None:
        header[name] = value
    else:
        header[name][key] = value
    path = write_raw(tmp_path / "x.safetensors", header, bytes(range(16)))
    if _read_everything(path):
        assert _library_accepts(path)


@FUZZ
@given(blob=st.binary(max_size=60))
def test_random_json_bytes(blob: bytes) -> None:
    try:
        parse_json(blob, "x.json")
    except Exl3Error as error:
        assert "x.json" in str(error)


@FUZZ
@given(key=st.sampled_from([*uniform_block(), "k_values", "bits_per_expert"]), value=JSON_VALUES)
def test_wrong_metadata_values(tmp_path: Path, key: str, value: Any) -> None:
    block = uniform_block() | {key: value}
    try:
        manifest = RankSlicedManifest.from_config({BLOCK_KEY: block}, tmp_path)
    except Exl3Error:
        return
    assert manifest is not None
    assert all(2 <= bits <= 6 for row in manifest.layer_bits.values() for bits in row)


@FUZZ
@given(
    text=st.from_regex(r"(model\.)?layers\.\d+\.mlp\.experts\.(\d+|shared_h)\.\w+\.rank\d*\.\w+")
    | st.text(max_size=30)
)
def test_tensor_names(text: str) -> None:
    manifest = RankSlicedManifest.from_config({BLOCK_KEY: uniform_block()}, None)
    assert manifest is not None
    try:
        result, rank = normalise_name(text, manifest)
    except Exl3Error:
        return
    assert result == text if rank is None else ".rank" not in result and rank < manifest.tp


@settings(FUZZ, max_examples=80)
@given(
    file=st.sampled_from(["config.json", "tier_bitmap.json", "model.safetensors.index.json"]),
    at=st.integers(0, 1000),
    value=JSON_VALUES,
)
def test_verify_with_wrong_json_values(sliced_folder: Path, file: str, at: int, value: Any) -> None:
    """One value anywhere in a folder's JSON replaced: a fault or an `Exl3Error`, never a crash."""
    path = sliced_folder / file
    text = path.read_text()
    try:
        document = json.loads(text)
        places = _places(document)
        owner, key = places[at % len(places)]
        owner[key] = value
        path.write_text(json.dumps(document))
        with contextlib.suppress(Exl3Error):
            verify_checkpoint(sliced_folder, model_map)
    finally:
        path.write_text(text)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON document."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    inner = [place for key in keys for place in _places(value[key])]
    return [(value, key) for key in keys] + inner


def test_library_and_parser_agree_on_the_valid_file(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", VALID, bytes(range(16)))
    assert _read_everything(path)
    assert _library_accepts(path)


@pytest.mark.parametrize("at", range(0, 40, 3))
def test_every_truncation_is_refused(tmp_path: Path, at: int) -> None:
    path = write_raw(tmp_path / "x.safetensors", VALID, bytes(range(16)))
    path.write_bytes(path.read_bytes()[: -1 - at])
    assert not _read_everything(path)

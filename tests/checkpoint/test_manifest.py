from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exl3kit.checkpoint.manifest import (
    BLOCK_KEY,
    SHARED_H_SCHEMA,
    TENSOR_SCHEMA,
    RankSlicedManifest,
    make_manifest,
)
from exl3kit.errors import CheckpointError


def uniform_block() -> dict[str, Any]:
    return {
        "format": "exl3-trellis",
        "codebook": "mcg",
        "bits": 3,
        "moe_layers": [1, 2],
        "experts_per_layer": 4,
        "tensor_schema": TENSOR_SCHEMA,
        "tp": 2,
    }


def mixed_block() -> dict[str, Any]:
    mixed = {"bits": "mixed", "k_values": [3, 4], "bits_per_expert": "tier_bitmap.json:k"}
    return uniform_block() | mixed


def bits_table() -> dict[str, Any]:
    return {"1": {"k": [3, 4, 3, 4], "keep_nvfp4": []}, "2": {"k": [3, 3, 3, 3]}}


def parse(block: Any, folder: Path | None = None) -> RankSlicedManifest:
    manifest = RankSlicedManifest.from_config({BLOCK_KEY: block}, folder)
    assert manifest is not None
    return manifest


def refusal(block: Any, folder: Path | None = None) -> str:
    with pytest.raises(CheckpointError) as error:
        RankSlicedManifest.from_config({BLOCK_KEY: block}, folder)
    assert isinstance(error.value, ValueError)
    return str(error.value)


def test_uniform() -> None:
    manifest = parse(uniform_block())
    assert (manifest.tp, manifest.experts_per_layer, manifest.is_mixed) == (2, 4, False)
    assert list(manifest.moe_layers) == [1, 2]
    assert manifest.layer_bits == {1: (3, 3, 3, 3), 2: (3, 3, 3, 3)}
    assert manifest.bits_of(2, 3) == 3


def test_mixed_reads_the_map_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "tier_bitmap.json").write_text(json.dumps(bits_table()))
    manifest = parse(mixed_block() | {"bits": " Mixed ", "k_values": [4, 3, 3]}, tmp_path)
    assert manifest.layer_bits == {1: (3, 4, 3, 4), 2: (3, 3, 3, 3)}
    assert manifest.k_values == (3, 4)


def test_absent_block_and_nested_text_config() -> None:
    assert RankSlicedManifest.from_config({"model_type": "glm4_moe"}, None) is None
    nested = {"text_config": {BLOCK_KEY: uniform_block()}}
    assert RankSlicedManifest.from_config(nested, None) == parse(uniform_block())
    both = nested | {BLOCK_KEY: uniform_block() | {"tp": 4}}
    with pytest.raises(CheckpointError, match="outer config and its text_config differ"):
        RankSlicedManifest.from_config(both, None)


@pytest.mark.parametrize("layout", ["per_expert_v1", "shared_h_v1"])
@pytest.mark.parametrize("rates", [(3, 3), (2, 6)])
def test_written_block_parses_to_the_same_manifest(
    tmp_path: Path, layout: str, rates: tuple[int, ...]
) -> None:
    extra = {"producer": "x", "calibration": {"tokens": [1, 2]}}
    manifest = make_manifest(4, {5: rates, 6: rates}, extra, layout)
    block = json.loads(json.dumps(manifest.to_config()))
    if table := manifest.map_file():
        (tmp_path / table[0]).write_text(json.dumps(table[1]))
    again = parse(block, tmp_path)
    assert again.to_config() == block
    assert again.layer_bits == manifest.layer_bits
    assert {"producer", "calibration"} <= again.extra.keys()


def test_informational_keys_survive() -> None:
    extra = {"exllamav3_version": "0.0.43", "slicing": "free text", "mtp78": {"a": [1]}}
    extra |= {"k_values": [3], "bits_per_expert": None}  # nothing goes by them: bits is a number
    written = parse(uniform_block() | extra).to_config()
    assert extra.items() <= written.items()


def test_missing_keys_are_listed_sorted() -> None:
    """R1"""
    block = uniform_block()
    for key in ("tp", "bits", "codebook"):
        del block[key]
    assert "missing keys: bits, codebook, tp" in refusal(block)


# Row of the table in docs/checkpoints.md, the change, and what the message must contain.
REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("R2", {"codebook": "mul1"}, ["'mul1'", "'mcg'"]),
    ("R2", {"codebook": None}, ["None", "'mcg'"]),
    ("R3", {"moe_layers": [2, 1]}, ["[2, 1]", "[first, last]"]),
    ("R3", {"moe_layers": [-1, 1]}, ["[-1, 1]", "[first, last]"]),
    ("R3", {"moe_layers": [1, True]}, ["[1, True]", "[first, last]"]),
    ("R3", {"moe_layers": [1, 2, 3]}, ["[1, 2, 3]", "[first, last]"]),
    ("R3", {"moe_layers": "1-2"}, ["'1-2'", "[first, last]"]),
    ("R4", {"tensor_schema": "layers.{L}.ffn.x"}, ["layers.{L}.ffn.x", TENSOR_SCHEMA]),
    ("R5", {"rotation_layout": "shared_v2"}, ["shared_v2", "per_expert_v1", "shared_h_v1"]),
    ("R6", {"rotation_layout": "shared_h_v1"}, ["rotation_layout", "shared_h_tensor_schema"]),
    ("R6", {"shared_h_tensor_schema": SHARED_H_SCHEMA}, ["per_expert_v1", "absent"]),
    ("R6", {"shared_h_tensor_schema": None}, ["per_expert_v1", "absent"]),
    (
        "R6",
        {"rotation_layout": "shared_h_v1", "shared_h_tensor_schema": "x"},
        ["rotation_layout", "shared_h_tensor_schema", "'x'"],
    ),
    ("R7", {"bits": 3.25}, ["3.25", "2..6"]),
    ("R7", {"bits": 1}, ["got 1", "2..6"]),
    ("R7", {"bits": 7}, ["got 7", "2..6"]),
    ("R7", {"bits": True}, ["True", "2..6"]),
    ("R7", {"bits": "3"}, ["'3'", "2..6"]),
    ("R7", {"bits": float("inf")}, ["inf", "2..6"]),
    ("R8", {"bits": "mixed"}, ["None", "2..6"]),
    ("R8", mixed_block() | {"k_values": []}, ["[]", "2..6"]),
    ("R8", mixed_block() | {"k_values": [3, 3.5]}, ["3.5", "2..6"]),
    ("R8", mixed_block() | {"k_values": [3, 9]}, ["9", "2..6"]),
    ("R9", {"bits": "mixed", "k_values": [3]}, ["bits_per_expert", "None"]),
    ("3.4", {"tp": 0}, ["tp", "got 0"]),
    ("3.4", {"tp": "2"}, ["tp", "'2'"]),
    ("3.4", {"tp": True}, ["tp", "True"]),
    ("3.4", {"experts_per_layer": 4.0}, ["experts_per_layer", "4.0"]),
    ("3.4", {"experts_per_layer": 10**12}, ["experts_per_layer", str(10**12)]),
    ("3.3", {"mcg_multiplier": 1}, ["mcg_multiplier", "3417055213", "got 1"]),
    ("2", {"format": "exl3-trellis-v2"}, ["format", "exl3-trellis-v2"]),
]


@pytest.mark.parametrize("row, change, texts", REFUSED)
def test_refusals_name_key_value_and_rule(
    row: str, change: dict[str, Any], texts: list[str]
) -> None:
    message = refusal(uniform_block() | change)
    assert all(text in message for text in texts), (row, message)


def test_integral_float_is_accepted_as_bits() -> None:
    assert parse(uniform_block() | {"bits": 3.0}).bits_of(1, 0) == 3


@pytest.mark.parametrize(
    "reference",
    ["/etc/x:k", "..\\x:k", "a/b.json:k", "../x.json:k", ".json", ":k", "x.json:", "C:x.json:k",
     "..:k", ".:k", "x.json", " x.json:k", "a\0b.json:k",
     "SHA256SUMS:k", "config.json:k", "model.safetensors.index.json:k"],
)  # fmt: skip
def test_map_reference_must_be_a_bare_file_name(tmp_path: Path, reference: str) -> None:
    """Refused before any read: R9, with the reference in the message."""
    message = refusal(mixed_block() | {"bits_per_expert": reference}, tmp_path)
    assert repr(reference) in message and "bare file name" in message


def test_map_field_is_split_at_the_last_colon(tmp_path: Path) -> None:
    message = refusal(mixed_block() | {"bits_per_expert": "map.json:k"}, tmp_path)
    assert "map.json" in message and "missing" in message


BAD_TABLES: list[tuple[Any, list[str]]] = [
    ([], ["object", "list"]),
    ({"1": {"k": [3, 3, 3, 3]}}, ["layer 2", "None"]),
    ({**bits_table(), "2": [3]}, ["layer 2", "[3]"]),
    ({**bits_table(), "2": {"k": [3, 3]}}, ["layer 2", "k", "4 integers", "2 entries"]),
    ({**bits_table(), "2": {}}, ["layer 2", "k", "4 integers", "None"]),
    ({**bits_table(), "2": {"k": [3, 3, 3, "4"]}}, ["layer 2", "'4'"]),
    ({**bits_table(), "2": {"k": [3, 3, 3, True]}}, ["layer 2", "True"]),
    ({**bits_table(), "2": {"k": [3, 3, 3, 5]}}, ["layer 2", "[5]", "[3, 4]"]),
]


@pytest.mark.parametrize("table, texts", BAD_TABLES)
def test_bad_maps_name_layer_field_expected_and_got(
    tmp_path: Path, table: Any, texts: list[str]
) -> None:
    """R10"""
    (tmp_path / "tier_bitmap.json").write_text(json.dumps(table))
    message = refusal(mixed_block(), tmp_path)
    assert "tier_bitmap.json" in message
    assert all(text in message for text in texts), message


def test_tail_fallback_is_three_bits_if_declared(tmp_path: Path) -> None:
    table = {**bits_table(), "2": {"tail_tr3": [0, 1, 2, 3]}}
    (tmp_path / "tier_bitmap.json").write_text(json.dumps(table))
    assert parse(mixed_block(), tmp_path).layer_bits[2] == (3, 3, 3, 3)
    (tmp_path / "tier_bitmap.json").write_text(json.dumps({"1": table["2"], "2": table["2"]}))
    assert "layer 1" in refusal(mixed_block() | {"k_values": [4, 5]}, tmp_path)


def test_new_manifest_refuses_gaps_and_ragged_layers() -> None:
    with pytest.raises(CheckpointError, match="contiguous"):
        make_manifest(2, {1: (3, 3), 3: (3, 3)})
    with pytest.raises(CheckpointError, match="2 experts"):
        make_manifest(2, {1: (3, 3), 2: (3,)})
    with pytest.raises(CheckpointError, match=r"2..6"):
        make_manifest(2, {1: (3, 8)})
    with pytest.raises(CheckpointError, match="tp must be an integer"):
        make_manifest(0, {1: (3, 3)})
    with pytest.raises(CheckpointError, match="0 <= first"):
        make_manifest(2, {-1: (3, 3)})

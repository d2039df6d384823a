from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from exl3kit.checkpoint.index import INDEX_NAME, read_index, scan_folder
from exl3kit.checkpoint.stamps import read_stamps
from exl3kit.errors import CheckpointError

ONE, TWO, THREE = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))


def write_shards(folder: Path, **changes: Any) -> Path:
    """Three shards with one tensor each and their index; `changes` go into the weight map."""
    for file, name in ((ONE, "a"), (TWO, "b"), (THREE, "c")):
        save_file({name: torch.zeros(2)}, folder / file)
    weight_map = {"a": ONE, "b": TWO, "c": THREE} | changes
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_index(folder)
    return str(error.value)


def test_all_shards_and_extra_files_are_read(tmp_path: Path) -> None:
    """An add-on file that the index does not name is read too, as the ordinary loader does."""
    write_shards(tmp_path)
    save_file({"mtp.x": torch.zeros(2)}, tmp_path / "mtp.safetensors")
    assert sorted(read_index(tmp_path)) == ["a", "b", "c", "mtp.x"]


@pytest.mark.parametrize("keeps_index", [True, False])
def test_deleted_shard_is_named_with_or_without_index(tmp_path: Path, keeps_index: bool) -> None:
    write_shards(tmp_path)
    (tmp_path / TWO).unlink()
    if not keeps_index:
        (tmp_path / INDEX_NAME).unlink()
    assert f"missing shards: {TWO}; copy or download them" in refusal(tmp_path)


def test_tensor_that_is_not_in_its_shard(tmp_path: Path) -> None:
    assert "not in their shard: gone" in refusal(write_shards(tmp_path, gone=ONE))


def test_stale_index_is_a_fault_but_can_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One shard holds a tensor more, one lost its tensor to an extra file."""
    write_shards(tmp_path)
    save_file({"b": torch.zeros(2), "new": torch.zeros(2)}, tmp_path / TWO)
    save_file({"other": torch.zeros(2)}, tmp_path / ONE)
    save_file({"a": torch.zeros(2)}, tmp_path / "extra.safetensors")
    assert sorted(read_index(tmp_path)) == ["a", "b", "c", "new", "other"]
    scan = scan_folder(tmp_path)
    assert scan.faults == scan.stale and len(scan.stale) == 2
    assert "new" in scan.stale[1] and scan.stale[0].endswith("names: a")
    assert "stale" in caplog.text


def test_index_of_the_model_before_it_was_quantised(tmp_path: Path) -> None:
    """Converters copy it with the side files; its shards never existed here."""
    save_file({"m.trellis": torch.zeros(2), "n.weight": torch.ones(1)}, tmp_path / "a.safetensors")
    weight_map = {"m.weight": "model-00001-of-00009.safetensors", "n.weight": "b.safetensors"}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    assert sorted(read_index(tmp_path)) == ["m.trellis", "n.weight"]
    weight_map["lost.weight"] = "model-00001-of-00009.safetensors"
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    assert "missing shards: model-00001-of-00009" in refusal(tmp_path)


def test_index_that_lists_nothing(tmp_path: Path) -> None:
    """Engines that follow it would load no weights, and say nothing for a quantised model."""
    write_shards(tmp_path)
    (tmp_path / INDEX_NAME).write_text('{"weight_map": {}}')
    assert sorted(read_index(tmp_path)) == ["a", "b", "c"]
    (fault,) = scan_folder(tmp_path).stale
    assert "lists no tensors" in fault


def test_hidden_files_are_not_weights(tmp_path: Path) -> None:
    """macOS leaves `._NAME` beside what it copies to other file systems."""
    write_shards(tmp_path)
    (tmp_path / f"._{ONE}").write_bytes(b"x")
    assert scan_folder(tmp_path).faults == ()
    assert len(read_stamps(tmp_path)) == 3


def test_tensor_in_two_files(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert ONE in message and "model.safetensors" in message and "in both: a" in message


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "", 3])
def test_index_cannot_point_outside(tmp_path: Path, file: object) -> None:
    assert "bare file name" in refusal(write_shards(tmp_path, evil=file))


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', "{", '{"a":1,"a":2}'])
def test_malformed_index(tmp_path: Path, text: str) -> None:
    (write_shards(tmp_path) / INDEX_NAME).write_text(text)
    assert INDEX_NAME in refusal(tmp_path)


def test_all_faults_are_collected(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / TWO).unlink()
    (tmp_path / THREE).write_bytes((tmp_path / THREE).read_bytes()[:-1])
    faults = scan_folder(tmp_path).faults
    assert any(THREE in fault and "truncated" in fault for fault in faults)
    assert any(TWO in fault and "missing" in fault for fault in faults)


def test_absurd_shard_count_is_refused_not_listed(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model-1-of-999999999.safetensors")
    assert "claim a set of 999999999" in refusal(tmp_path)


@pytest.mark.parametrize("name", [TWO, INDEX_NAME])
def test_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    pipe = write_shards(tmp_path) / name
    pipe.unlink()
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)  # a reader would get these bytes, not wait for ever
    try:
        os.write(writer, bytes(8))
        assert f"{name}: cannot read: expected a regular file" in refusal(tmp_path)
    finally:
        os.close(writer)


def test_folder_without_weights(tmp_path: Path) -> None:
    assert "expected *.safetensors files, found none" in refusal(tmp_path)
    assert "expected a checkpoint folder" in refusal(tmp_path / "nowhere")

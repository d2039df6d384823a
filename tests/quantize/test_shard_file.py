"""A shard filled in place is a safetensors file, and one left behind is taken up."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from exl3kit.checkpoint.shard import Entry
from exl3kit.errors import CheckpointError
from exl3kit.quantize.shard_file import ShardFile

TENSORS = {
    "a": torch.arange(7, dtype=torch.uint8),
    "b": torch.randn(3, 5),
    "marker": torch.tensor(-5, dtype=torch.int32),
    "empty": torch.empty(0, 4, dtype=torch.bfloat16),
    "view": torch.randn(4, 6).half().T,
}
ENTRIES = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]


def test_tensors_written_in_any_order_make_a_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with ShardFile(path, ENTRIES) as shard:
        for name in reversed(TENSORS):
            shard.write(name, TENSORS[name])
        assert torch.equal(shard.read("view"), TENSORS["view"])
        shard.sync()
        assert shard.digest() == hashlib.sha256(path.read_bytes()).hexdigest()
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)


def test_bytes_may_come_in_pieces(tmp_path: Path) -> None:
    data = TENSORS["b"].numpy().tobytes()
    with ShardFile(tmp_path / "x", ENTRIES) as shard:
        for start in range(0, len(data), 7):
            shard.write_bytes("b", start, memoryview(data)[start : start + 7])
        assert torch.equal(shard.read("b"), TENSORS["b"])


def test_a_file_of_the_same_layout_is_taken_up_and_another_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with ShardFile(path, ENTRIES) as shard:
        shard.write("b", TENSORS["b"])
    with ShardFile(path, ENTRIES) as shard:
        assert torch.equal(shard.read("b"), TENSORS["b"])
    renamed = [Entry("c", e.dtype, e.shape) if e.name == "b" else e for e in ENTRIES]
    with ShardFile(path, renamed) as shard:
        assert not shard.read("c").any()


def test_no_room_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match="disk full"):
        ShardFile(tmp_path / "x", ENTRIES)
    assert len(os.listdir("/proc/self/fd")) == before

"""Tensors made of stored bytes, streamed into shards: cuts, joins, sizes around the block's."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3kit.checkpoint.header import TensorInfo, read_header
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.checkpoint.pieces import _MAX_OPEN, copy_of, joined
from exl3kit.checkpoint.stream import _MAX_THREADS
from exl3kit.checkpoint.writer import CHECKSUMS_NAME, CheckpointWriter
from exl3kit.errors import CheckpointError

BLOCK = 2**20  # bytes of one write


@pytest.fixture
def source(tmp_path: Path) -> tuple[dict[str, torch.Tensor], dict[str, TensorInfo]]:
    random = torch.Generator().manual_seed(0)
    shapes = {
        "cube": (6, 10, 7),
        "long": (3 * BLOCK // 2 + 1,),
        "wide": (3, BLOCK // 2 + 5),  # a row is more than a block
        "tall": (BLOCK, 3),
        "empty": (0, 4),
        "scalar": (),
    }
    tensors = {
        name: torch.randint(-999, 999, shape, generator=random, dtype=torch.int16)
        for name, shape in shapes.items()
    }
    save_file(tensors, tmp_path / "source.safetensors")
    return tensors, read_header(tmp_path / "source.safetensors").tensors


def test_copies_cuts_and_joins(
    source: tuple[dict[str, torch.Tensor], dict[str, TensorInfo]], tmp_path: Path
) -> None:
    tensors, infos = source
    cube, wide, tall = infos["cube"], infos["wide"], infos["tall"]
    planned = [
        *(copy_of(info, f"copy.{name}") for name, info in infos.items()),
        joined("cut0", 0, [(cube, 2, 5)]),
        joined("cut1", 1, [(cube, 3, 9)]),
        joined("cut2", 2, [(cube, 1, 2)]),
        joined("join1", 1, [(cube, 8, 10), (cube, 0, 1), (cube, 4, 4)]),
        joined("wide", 1, [(wide, 1, BLOCK // 2 + 5)]),
        joined("tall", 1, [(tall, 1, 3), (tall, 0, 1)]),
    ]
    expected = {f"copy.{name}": tensor for name, tensor in tensors.items()} | {
        "cut0": tensors["cube"][2:5],
        "cut1": tensors["cube"][:, 3:9],
        "cut2": tensors["cube"][:, :, 1:2],
        "join1": torch.cat((tensors["cube"][:, 8:], tensors["cube"][:, :1]), dim=1),
        "wide": tensors["wide"][:, 1:],
        "tall": tensors["tall"].roll(-1, dims=1),
    }
    written: list[int] = []
    with CheckpointWriter(tmp_path / "out", BLOCK) as writer:
        writer.add("made", torch.ones(3))
        writer.copy(planned, written.append)
        writer.add("later", torch.ones(2))
        writer.finish({})
    found = open_checkpoint(tmp_path / "out")
    assert found.names() == sorted({*expected, "made", "later"})
    for name, tensor in expected.items():
        assert torch.equal(found.tensor(name), tensor), name
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3 and set(load_file(shards[0])) == {"made"}
    made = sum(shard.stat().st_size for shard in shards[1:-1])
    assert sum(written) == made
    for line in (tmp_path / "out" / CHECKSUMS_NAME).read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    sizes = sum(t.nbytes for t in expected.values()) + 5 * 4
    assert index["metadata"]["total_size"] == sizes


def test_name_given_twice_leaves_nothing(
    source: tuple[dict[str, torch.Tensor], dict[str, TensorInfo]], tmp_path: Path
) -> None:
    info = source[1]["cube"]
    with (
        CheckpointWriter(tmp_path / "out") as writer,
        pytest.raises(CheckpointError, match="'a': expected a new name"),
    ):
        writer.copy([copy_of(info, "a"), copy_of(info, "a")])
    assert list((tmp_path / "out").iterdir()) == []


def test_source_that_shrinks_or_goes(
    source: tuple[dict[str, torch.Tensor], dict[str, TensorInfo]], tmp_path: Path
) -> None:
    infos = source[1]
    file = tmp_path / "source.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    for planned in (copy_of(infos["long"], "a"), joined("a", 1, [(infos["tall"], 0, 1)])):
        with (
            CheckpointWriter(tmp_path / "out") as writer,
            pytest.raises(CheckpointError, match=r"source.safetensors: truncated: tensor "),
        ):
            writer.copy([planned])
    file.unlink()
    with (
        CheckpointWriter(tmp_path / "out") as writer,
        pytest.raises(CheckpointError, match=r"tensor 'cube': cannot read: No such file"),
    ):
        writer.copy([copy_of(infos["cube"], "a")])


def test_threads_together_stay_below_the_limit_of_descriptors() -> None:
    """1024 is what a process has by default, its own libraries included."""
    assert _MAX_THREADS * _MAX_OPEN <= 512

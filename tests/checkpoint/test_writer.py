from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from exl3kit.checkpoint.header import DTYPES
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.checkpoint.writer import CHECKSUMS_NAME, UNFINISHED_NAME, CheckpointWriter
from exl3kit.errors import CheckpointError

CONFIG = {"architectures": ["Glm4MoeForCausalLM"], "nested": {"a": [1, None]}}


def _tensors() -> dict[str, torch.Tensor]:
    """Every dtype, odd lengths, scalars and an empty one: all that can break alignment."""
    made = {
        f"t.{name}": torch.randint(0, 2, (7 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
        for name, dtype in DTYPES.items()
    }
    return made | {
        "m.mcg": torch.tensor(-877912083, dtype=torch.int32),
        "m.empty": torch.empty(3, 0),
        "m.strided": torch.arange(12.0).reshape(3, 4).T,
    }


def _write(path: Path, shard_bytes: int) -> dict[str, torch.Tensor]:
    tensors = _tensors()
    with CheckpointWriter(path, shard_bytes) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish(CONFIG)
    return tensors


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other) if t.numel())
    return not one.numel() or torch.equal(*flat)


@pytest.mark.parametrize("shard_bytes", [1, 100, 10_000])
def test_every_dtype_reads_back_here_and_in_the_library(tmp_path: Path, shard_bytes: int) -> None:
    tensors = _write(tmp_path / "out", shard_bytes)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.config == CONFIG
    assert checkpoint.names() == sorted(tensors)
    seen = 0
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118, not a dict
                assert _same(opened.get_tensor(name), tensors[name]), name
                assert _same(checkpoint.tensor(name), tensors[name]), name
                seen += 1
    assert seen == len(tensors)


def test_layout_of_the_folder(tmp_path: Path) -> None:
    tensors = _write(tmp_path / "out", 100)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    shards = sorted(name for name in names if name.endswith(".safetensors"))
    count = len(shards)
    assert count > 1
    assert shards == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert names - set(shards) == {"model.safetensors.index.json", "config.json", CHECKSUMS_NAME}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    sizes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert index["metadata"]["total_size"] == sizes
    for shard in shards:
        data = (tmp_path / "out" / shard).read_bytes()
        assert int.from_bytes(data[:8], "little") % 8 == 0
    for line in (tmp_path / "out" / CHECKSUMS_NAME).read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest


def test_tensor_changed_after_add_is_written_as_it_was(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path) as writer:
        tensor = torch.ones(4)
        writer.add("a", tensor)
        tensor.zero_()
        writer.finish({})
    assert open_checkpoint(tmp_path).tensor("a").tolist() == [1, 1, 1, 1]


def test_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    for out in ("one", "two"):
        torch.manual_seed(0)
        _write(tmp_path / out, 100)
    sums = [(tmp_path / out / CHECKSUMS_NAME).read_bytes() for out in ("one", "two")]
    assert sums[0] == sums[1]


def test_side_files_and_json(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    kept = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.txt",
            "generation_config.json", "LICENSE"]  # fmt: skip
    left = ["config.json", "model.safetensors", "pytorch_model.bin", "README.md", "x.py",
            "tokenizer.safetensors", "tokenizer\n.json"]  # fmt: skip
    for name in kept + left:
        (source / name).write_text(name)
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("a", torch.ones(1))
        assert writer.copy_side_files(source) == sorted(kept)
        writer.write_json("tier_bitmap.json", {"1": {"k": [3]}})
        for name in ("../x.json", "config.json", "SHA256SUMS", "a.safetensors", "shard-00001.part"):
            with pytest.raises(CheckpointError, match=f"'{name}': expected a bare file name"):
                writer.write_json(name, {})
        with pytest.raises(CheckpointError, match=r"'config\.json': expected a bare file name"):
            writer.copy_file(source / "config.json")
        writer.finish(CONFIG)
    assert {*kept, "tier_bitmap.json"} <= {file.name for file in (tmp_path / "out").iterdir()}
    assert json.loads((tmp_path / "out/config.json").read_text()) == CONFIG


def test_side_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("/proc/self/mem")  # a file whose first byte is none
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("a", torch.ones(1))
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot read"):
            writer.copy_side_files(tmp_path)


def test_wrong_use(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        with pytest.raises(CheckpointError, match="at least one tensor"):
            writer.finish({})
        writer.add("a", torch.ones(1))
        with pytest.raises(CheckpointError, match=r"'a'.*already added"):
            writer.add("a", torch.ones(1))
        with pytest.raises(CheckpointError, match="complex128"):
            writer.add("b", torch.ones(1, dtype=torch.complex128))
        writer.finish({})
        with pytest.raises(CheckpointError, match="has ended"):
            writer.add("c", torch.ones(1))
    with pytest.raises(CheckpointError, match="shard_bytes"):
        CheckpointWriter(tmp_path / "other", 0)


def test_foreign_or_complete_folders_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match=r"found mine.txt; name another folder"):
        CheckpointWriter(tmp_path)
    with pytest.raises(CheckpointError, match="found a file"):
        CheckpointWriter(tmp_path / "mine.txt")
    _write(tmp_path / "done", 100)
    with pytest.raises(CheckpointError, match="expected an empty or new output folder"):
        CheckpointWriter(tmp_path / "done")
    assert open_checkpoint(tmp_path / "done").has("m.mcg")


def test_unfinished_folder_with_damage_and_with_a_file_of_the_users(tmp_path: Path) -> None:
    """The list of side files is no text after a power cut; a download stays."""
    (tmp_path / UNFINISHED_NAME).write_bytes(b"tier_bitmap.json\n\xff\xfe\0\n")
    ours = ("tier_bitmap.json", ".tier_bitmap.json.part", "spool.part", "shard-00001.part",
            "model-00001-of-00002.safetensors", ".config.json.part")  # fmt: skip
    for name in (*ours, "film.mkv.part"):
        (tmp_path / name).write_text("x")
    with pytest.raises(CheckpointError, match=r"found film\.mkv\.part; name another folder"):
        CheckpointWriter(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["film.mkv.part"]


def test_leaving_early_removes_everything(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), CheckpointWriter(tmp_path / "out", 16) as writer:
        writer.add("a", torch.ones(8))
        writer.write_json("tier_bitmap.json", {})
        writer.add("b", torch.ones(8))
        raise RuntimeError("the caller failed")
    assert list((tmp_path / "out").iterdir()) == []


def test_folder_that_is_taken_away(tmp_path: Path) -> None:
    """The clean-up finds nothing to clean, which is not what went wrong."""
    writer = CheckpointWriter(tmp_path / "out", 16)
    writer.add("a", torch.ones(8))
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(CheckpointError, match="out: cannot write: No such file or directory"):
        writer.add("b", torch.ones(8))


def test_full_disk_is_one_clear_error_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(tmp_path / "out", 16)
    writer.add("a", torch.ones(8))

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(CheckpointError, match=r"out: disk full .*bytes are free"):
            writer.add("b", torch.ones(8))
    assert list((tmp_path / "out").iterdir()) == []


_KILLED_RUN = """
import os, signal, sys, torch
from pathlib import Path
import exl3kit.checkpoint.writer as module
from exl3kit.checkpoint.atomic import write_file
writer = module.CheckpointWriter(Path(sys.argv[1]), 16)
writer.write_json("tier_bitmap.json", {})
for i in range(4):
    writer.add(f"old.{i}", torch.ones(8))

def die(path, data):
    if path.name == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
    write_file(path, data)

module.write_file = die
if sys.argv[2] == "add":
    os.kill(os.getpid(), signal.SIGKILL)
writer.finish({})
"""


@pytest.mark.parametrize(
    "moment, left_behind",
    [
        ("add", "shard-00001.part"),
        ("model.safetensors.index.json", "model-00001-of-00004.safetensors"),
        ("config.json", "model.safetensors.index.json"),
    ],
)
def test_killed_run_is_no_model_and_the_next_run_starts_clean(
    tmp_path: Path, moment: str, left_behind: str
) -> None:
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", _KILLED_RUN, str(out), moment], check=False)
    assert killed.returncode == -signal.SIGKILL
    left = {file.name for file in out.iterdir()}
    assert {UNFINISHED_NAME, left_behind} <= left
    assert "config.json" not in left
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        open_checkpoint(out)
    _write(out, 100)
    names = {file.name for file in out.iterdir()}
    assert not any(name.endswith(".part") or name == "tier_bitmap.json" for name in names)
    assert not any(name.startswith("old.") for name in open_checkpoint(out).names())


def test_second_run_into_a_folder_that_is_being_written_is_refused(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "m") as writer:
        writer.add("a", torch.zeros(1))
        with pytest.raises(CheckpointError, match="another run is writing this folder"):
            CheckpointWriter(tmp_path / "m")
        writer.finish(CONFIG)
    assert open_checkpoint(tmp_path / "m").names() == ["a"]


def test_unfinished_folder_with_foreign_files_is_refused(tmp_path: Path) -> None:
    CheckpointWriter(tmp_path).write_json("map.json", {})
    (tmp_path / "notes.txt").write_text("keep")
    with pytest.raises(CheckpointError, match=r"found notes.txt"):
        CheckpointWriter(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "keep"
